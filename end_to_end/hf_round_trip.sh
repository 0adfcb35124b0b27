#!/usr/bin/env bash
# Out to a folder that transformers loads, back in, and out again: the weights are the same bytes. Needs quickstart.sh.
# With PyTorch and transformers installed (requirements-torch.txt) also: maxtext convert verify RUN FOLDER
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

rm -rf "$RUNS/hf" "$RUNS/imported" "$RUNS/hf_again"
maxtext convert export "$RUNS/quickstart" "$RUNS/hf"
maxtext convert import "$RUNS/hf" "$RUNS/imported"
maxtext convert export "$RUNS/imported" "$RUNS/hf_again"
cmp "$RUNS/hf/model.safetensors" "$RUNS/hf_again/model.safetensors"
maxtext generate "$RUNS/hf" --prompt "def " --tokens 8
