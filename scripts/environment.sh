# Sourced by quickstart.sh, test.sh and .ci/run: makes the virtual environment and keeps it equal to a lock file.
# Settings from the environment: PYTHON (interpreter to build on), VENV (folder, default .venv in the repository).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-.venv}"

say() { printf '== %s\n' "$*"; }

die() {
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  shift
  [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
  exit 1
}

# Whether $1 runs and is Python >= 3.11. It is run, not only looked up: a version manager's shim may exist and not work.
python_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    python_is_new_enough "$PYTHON" || die "PYTHON=$PYTHON does not run, or is older than Python 3.11" \
      "give another: PYTHON=/path/to/python3.12 $0"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if python_is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "no Python >= 3.11 found (tried python3, python3.13, python3.12, python3.11, python)" \
    "install one, for example: apt install python3 python3-venv" \
    "or name one: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
  local python
  python="$(find_python)" || exit 1
  if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
    die "VENV=$VENV exists and is no virtual environment" "choose another folder: VENV=/path/to/new/folder $0"
  fi
  "$python" -c 'import venv, ensurepip' 2>/dev/null || die "$python has no venv module" \
    "install it, for example: apt install python3-venv" "or use another interpreter: PYTHON=/path/to/python3.12 $0"
  say "making $VENV with Python $(python_version "$python")"
  "$python" -m venv "$VENV" || die "could not make $VENV" "remove it and try again: rm -r $VENV"
}

# Whether the environment works, pip included (an interrupted start may leave one without).
venv_works() { python_is_new_enough "$VENV/bin/python" && "$VENV/bin/python" -c 'import pip' >/dev/null 2>&1; }

install() {  # install WHAT PIP_ARGUMENTS...
  local what="$1" log="$VENV/install.log" tool=("$VENV/bin/python" -m pip install)
  shift
  if command -v uv >/dev/null 2>&1; then tool=(uv pip install --python "$VENV/bin/python"); fi
  if ! "${tool[@]}" --quiet "$@" >"$log" 2>&1; then
    cat "$log" >&2
    die "could not install $what (messages above, also in $log)" \
      "check the network or the package index settings, then run the same command again; it goes on where it stopped"
  fi
}

# ensure_environment LOCK: after it, $VENV holds exactly the lock's versions and this checkout in editable form.
# A copy of each installed lock is kept in the environment, so that an unchanged one costs nothing.
ensure_environment() {
  local lock="$1" started=$SECONDS
  cd "$ROOT"
  case "$VENV" in /*) ;; *) VENV="$ROOT/$VENV" ;; esac
  if ! venv_works; then
    make_venv
    rm -f "$VENV"/*.lock "$VENV/pyproject.toml"
  elif [ -n "${PYTHON:-}" ] && [ "$(python_version "$(find_python)")" != "$(python_version "$VENV/bin/python")" ]; then
    die "$VENV has Python $(python_version "$VENV/bin/python"), PYTHON=$PYTHON is $(python_version "$PYTHON")" \
      "choose another folder (VENV=.venv-other $0) or remove it (rm -r $VENV)"
  fi
  if ! cmp -s "$lock" "$VENV/$lock"; then
    say "installing $(grep -c == "$lock") pinned packages from $lock (about a minute with pip, seconds with uv)"
    install "$lock" --require-hashes -r "$lock"
    cp "$lock" "$VENV/$lock"
    # The test lock holds every pin of the other one.
    if [ "$lock" = requirements-test.lock ]; then cp requirements.lock "$VENV/requirements.lock"; fi
  fi
  if ! cmp -s pyproject.toml "$VENV/pyproject.toml"; then
    install "maxtext itself" --no-deps --no-build-isolation -e .
    cp pyproject.toml "$VENV/pyproject.toml"
  fi
  say "environment $VENV ready (Python $(python_version "$VENV/bin/python"), $((SECONDS - started)) s)"
}
