#!/usr/bin/env bash
# The stages of OLMo 3 7B in small: pre-training with a change of schedule, mid-training, long context, the mean of its last
# checkpoints. docs/reproduce_olmo3.md says what passes from one to the next.
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

prepared
stage() { maxtext train "configs/tiny/olmo3_tiny_$1.yml" data.prepared="$DATA" output_dir="$RUNS" "${@:2}" "${SMALLER[@]}"; }
stage stage1 train.steps=20
stage stage1b
stage stage2 train.init_from.path="$RUNS/olmo3_tiny_stage1"
stage long train.init_from.path="$RUNS/olmo3_tiny_stage2"
rm -rf "$RUNS/olmo3_tiny_mean"
maxtext checkpoint merge "$RUNS/olmo3_tiny_mean" "$RUNS/olmo3_tiny_long@10" "$RUNS/olmo3_tiny_long@12"
