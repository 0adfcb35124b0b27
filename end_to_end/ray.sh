#!/usr/bin/env bash
# The quickstart as a job of Ray Train on this machine: two workers of two virtual CPU devices each. Needs maxtext[ray].
# On a cluster: --address, and --topology 4x4 --accelerator TPU-V6E, or --gpus-per-worker 8, instead of --cpu.
# OPTIONS="--dry-run" says what Ray would be asked for.
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

read -r -a OPTIONS <<< "${OPTIONS:-}"
prepared
maxtext launch ray configs/quickstart.yml --workers 2 --cpu --devices-per-worker 2 "${OPTIONS[@]}" run_name=ray \
  data.prepared="$DATA" output_dir="$RUNS" train.steps="$STEPS" schedule.total_steps="$STEPS" mesh.fsdp=4 "${SMALLER[@]}"
