#!/usr/bin/env bash
# The run of resume.sh goes on over four devices, as data x fsdp, and then on one again. The devices are virtual ones of the
# CPU; on GPUs and TPUs leave XLA_FLAGS away. The learning rate has reached its end: only the mesh changes.
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

XLA_FLAGS=--xla_force_host_platform_device_count=4 quickstart resumed train.steps="$((STEPS + 4))" mesh.data=2 mesh.fsdp=2
quickstart resumed train.steps="$((STEPS + 8))"
maxtext data audit "$RUNS/resumed"
