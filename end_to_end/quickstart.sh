#!/usr/bin/env bash
# Text to a trained, evaluated small OLMo 3, and what it goes on with. About 3 minutes on 2 CPU cores.
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

prepared
quickstart quickstart train.steps="$STEPS"
maxtext eval "$RUNS/quickstart" --output "$RUNS/quickstart/eval.json"
maxtext generate "$RUNS/quickstart" --prompt "def " --tokens 20
maxtext checkpoint verify "$RUNS/quickstart/checkpoints"
maxtext report "$RUNS/quickstart"
