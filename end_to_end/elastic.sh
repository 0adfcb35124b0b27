#!/usr/bin/env bash
# Workers (three, or WORKERS), of which one is killed amid the run: the others go on at once, a replacement joins, and the run
# completes.
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

prepared
run="$RUNS/elastic"
maxtext launch local configs/quickstart.yml --workers "${WORKERS:-3}" run_name=elastic data.prepared="$DATA" output_dir="$RUNS" \
  train.steps="$STEPS" schedule.total_steps="$STEPS" train.global_batch=12 mesh.data=-1 mesh.fsdp=1 "${SMALLER[@]}" &
job=$!
until [ "$(wc -l < "$run/metrics.jsonl" 2>/dev/null || echo 0)" -gt "$((STEPS / 3))" ]; do
  kill -0 "$job" || exit 1
  sleep 0.2
done
# The journal names each worker's process.
worker="$(sed -n 's/.*"event": "started".*"worker": 1.*"pid": \([0-9]*\).*/\1/p' "$run/elastic.jsonl" | tail -n 1)"
kill -KILL "$worker"
wait "$job"
grep '"event": "death"' "$run/elastic.jsonl"
