#!/usr/bin/env bash
# Solves pyproject.toml again and rewrites requirements.lock and requirements-test.lock (needs uv).
# Pass -U for the newest of everything, or -P NAME for one package; without them the pins move only where they must.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v uv >/dev/null || { echo "lock.sh: uv not found; install it with: pip install uv" >&2; exit 1; }

options=(--quiet --universal --generate-hashes --python-version 3.11 --no-emit-index-url --no-header "$@")
# flit_core, the build backend, is pinned too: the editable install then works without network and without isolation.
uv pip compile "${options[@]}" pyproject.toml --group build -o requirements.lock
uv pip compile "${options[@]}" pyproject.toml --group build --extra test -c requirements.lock -o requirements-test.lock

if grep -nE '://|^--|file:' requirements.lock requirements-test.lock; then
  echo "lock.sh: the lines above name a place; a lock holds only versions and hashes" >&2
  exit 1
fi
echo "requirements.lock: $(grep -c == requirements.lock) pins; requirements-test.lock: $(grep -c == requirements-test.lock) pins"
