#!/usr/bin/env bash
# A mixture of experts, then the same run with its experts over four virtual devices.
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

prepared
moe() { maxtext train configs/quickstart_moe.yml data.prepared="$DATA" output_dir="$RUNS" schedule.total_steps="$STEPS" \
  "${SMALLER[@]}" "$@"; }
moe train.steps="$((STEPS / 2))"
XLA_FLAGS=--xla_force_host_platform_device_count=4 moe train.steps="$STEPS" mesh.expert=4
