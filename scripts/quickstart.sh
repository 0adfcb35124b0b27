#!/usr/bin/env bash
# From a bare machine to a trained model: environment, real text, training with held-out evaluation, report.
#   scripts/quickstart.sh [key=value ...]      rerunning resumes, or says that the run is complete
# Needs python3 >= 3.11 with venv and a package index; PYTHON=... and VENV=... choose interpreter and environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "${1:-}" in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac

ensure_environment requirements.lock

say "preparing text and tokenizer"
"$VENV/bin/maxtext" data prepare || die "preparing the data failed (message above)" \
  "mend what it names and run the same command again"

say "training configs/quickstart.yml (Ctrl-C saves a checkpoint; the same command resumes)"
# exec: signals reach the training process itself, which saves before it ends.
exec "$VENV/bin/python" train.py configs/quickstart.yml "$@"
