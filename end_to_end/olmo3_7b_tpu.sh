#!/usr/bin/env bash
# OLMo 3 7B, all stages, on four slices of 64 TPU v5p on GKE. As it stands it only says what would happen: sizes, memory and
# the manifest of each stage. DO=1 hands the manifest of one stage over: DO=1 STAGE=olmo3_7b_stage2 end_to_end/olmo3_7b_tpu.sh
#   IMAGE     image of this project, built with --build-arg EXTRA=tpu
#   BUCKET    Cloud Storage bucket with the data, mounted at /bucket (docs/reproduce_olmo3.md says what belongs where)
# The next stage starts from the last checkpoint of the one before; rerun the same command after any stop.
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

IMAGE="${IMAGE:-REGION-docker.pkg.dev/PROJECT/REPOSITORY/maxtext:tpu}" BUCKET="${BUCKET:-bucket}" STAGE="${STAGE:-all}"
# Lists and held-out sets name their files relative to the folder of the data.
SHAPE=(--topology v5p:4x4x4 --slices 4 --folder /bucket/data)
mesh="mesh.data=4 mesh.fsdp=64"
declare -A of=(
  [olmo3_7b]="$mesh train.steps=596047" [olmo3_7b_stage1b]="$mesh"
  [olmo3_7b_stage2]="$mesh train.init_from.path=/bucket/runs/olmo3_7b"
  # 64 sequences of 65,536: four devices share each.
  [olmo3_7b_long]="mesh.data=4 mesh.fsdp=16 mesh.context=4 train.init_from.path=/bucket/runs/olmo3_7b_stage2"
)
for stage in olmo3_7b olmo3_7b_stage1b olmo3_7b_stage2 olmo3_7b_long; do
  [ "$STAGE" = all ] || [ "$STAGE" = "$stage" ] || continue
  read -r -a settings <<< "output_dir=/bucket/runs ${of[$stage]}"
  if [ "${DO:-}" = 1 ] && [ "$STAGE" = "$stage" ]; then
    maxtext launch gke "$stage" "${SHAPE[@]}" --image "$IMAGE" --bucket "$BUCKET:/bucket" "${settings[@]}"
  else
    maxtext train "$stage" "${settings[@]}" --dry-run --devices 256
    maxtext launch gke "$stage" "${SHAPE[@]}" --image "$IMAGE" --bucket "$BUCKET:/bucket" "${settings[@]}" --dry-run
  fi
done
