# shellcheck shell=bash
# Sourced by each recipe. What may be set in the environment:
#   MAXTEXT   the command (maxtext)
#   DATA      prepared text (data/quickstart); made when it is not there
#   RUNS      folder of the runs (runs)
#   STEPS     updates of a run on it (600)
#   SMALLER   more overrides of each training, key=value with blanks between them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MAXTEXT="${MAXTEXT:-maxtext}" DATA="${DATA:-data/quickstart}" RUNS="${RUNS:-runs}" STEPS="${STEPS:-600}"
read -r -a SMALLER <<< "${SMALLER:-}"

maxtext() { echo "+ maxtext $*" >&2; command "$MAXTEXT" "$@"; }

prepared() { [ -e "$DATA/dataset.json" ] || maxtext data prepare --out "$DATA"; }

# The quickstart's config under a name: quickstart NAME [key=value ...]
quickstart() {
  maxtext train configs/quickstart.yml run_name="$1" data.prepared="$DATA" output_dir="$RUNS" \
    schedule.total_steps="$STEPS" "${SMALLER[@]}" "${@:2}"
}
