"""A campaign of faults against real runs, each of which must end as if nothing had happened, to the bit:

    python benchmarks/faults.py [--trials 20] [--seed 0] [--only ROW ...] [--without GUARD] [--json FILE]
    python benchmarks/faults.py --full [--seed 7]

Every trial draws its fault anew from the seed, injects it into a small run (two layers, 4 virtual devices, 24 updates,
a save every 4), starts the same command again where a person or a scheduler would, and compares the last state bit for
bit, and each update's loss and batch, with a run that nothing befell. Where starting costs more than the fault, one run
goes through several. `--without` switches one guard off in the processes that train: the rows that name it must then
fail, or they prove nothing.

The table gives trials, passes, seconds from the fault to the next update, and the most updates done again after one.
With a file the campaign may be stopped at any time; the same command goes on. `--full` takes each row's own number of
trials, keeps them in docs/faults.json, and writes the table of docs/reliability.md. Exit code 1 when a trial failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fault_elastic import ELASTIC_ROWS
from benchmarks.fault_ground import Failed, Ground, Row, Trial, prepare_environment
from benchmarks.fault_results import KEPT, MARK, Results, summary, table
from benchmarks.fault_rows import ROWS as PLAIN_ROWS
from benchmarks.measured_page import RELIABILITY, write_page

ROWS = (*PLAIN_ROWS, *ELASTIC_ROWS)


def campaign(folder: Path, results: Results, trials: int | None, only: Sequence[str] = (),
             without: Sequence[str] = ()) -> bool:
    """Runs the trials that are missing of the rows (all, or those named); a line is printed for each row.

    Args:
      trials: of each row; None: as many as the row is given in the full campaign.

    Returns whether all trials of these rows have passed.
    """
    prepare_environment()
    ground, good = Ground(folder, without), True
    for row in ROWS:
        if only and row.name not in only:
            continue
        for number, faults in results.missing(row, row.full if trials is None else trials):
            _run(ground, row, number, faults, results)
        print(_line(row, summary(results.runs(row.name))), flush=True)
        good &= all(run["passed"] == run["trials"] for run in results.runs(row.name).values())
    return good


def _run(ground: Ground, row: Row, number: int, faults: int, results: Results) -> None:
    trial, began = Trial(ground, f"{row.name.replace(' ', '_')}_{number}",
                         f"{results.kept['seed']}/{row.name}/{number}", faults), time.monotonic()
    try:
        row.run(trial)
    except Failed as failure:
        trial.failures = [*trial.failures, str(failure)]
        trial.failures += ["with it"] * (faults - len(trial.failures))
    except Exception:
        trial.failures = [traceback.format_exc(limit=3)] + ["with it"] * (faults - 1)
    finally:
        shutil.rmtree(ground.directory(trial.name), ignore_errors=True)
    results.add(row.name, number, trial, time.monotonic() - began)


def _line(row: Row, of: dict) -> str:
    def shown(seconds: float | None) -> str:
        return f"{'-' if seconds is None else f'{seconds:.2f}':>8}"

    told = "".join(f"\n    run {failure.strip()}" for failure in of["failures"][:3])
    return (f"{row.name:<28}{of['trials']:>7}{of['passed']:>8}{shown(of['p50'])}{shown(of['p99'])}{of['lost']:>6}"
            f"{of['seconds'] / max(of['trials'], 1):>9.1f}{told}")


def main(argv: Sequence[str] | None = None) -> int:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="rows:\n" + "\n".join(f"  {row.name:<26} {row.doc} (guards: "
                                                                    f"{', '.join(row.guards) or 'several'})"
                                                                    for row in ROWS))
    parser.add_argument("--trials", type=int, default=20, help="of each row")
    parser.add_argument("--full", action="store_true", help="each row's own number of trials")
    parser.add_argument("--seed", type=int, default=None, help="0; with --full 7")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="ROW")
    parser.add_argument("--without", choices=sorted({guard for row in ROWS for guard in row.guards}), metavar="GUARD")
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep the results there, and go on from them")
    options = parser.parse_args(argv)
    if options.full and options.without:
        parser.error("--full with --without: a campaign without a guard is not the one that is published")
    only, path = options.only, options.json or (KEPT if options.full else None)
    if options.without and not only:
        only = [row.name for row in ROWS if options.without in row.guards]
    seed = options.seed if options.seed is not None else 7 if options.full else 0
    try:
        results = Results(seed, path)
    except ValueError as error:
        parser.error(str(error))
    print(f"{'row':<28}{'trials':>7}{'passed':>8}{'p50 s':>8}{'p99 s':>8}{'lost':>6}{'s/trial':>9}")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        good = campaign(Path(folder), results, None if options.full else options.trials, only,
                        [options.without] if options.without else [])
    found = [summary(results.runs(name)) for name in (only or names)]
    passed, trials = (sum(one[name] for one in found) for name in ("passed", "trials"))
    print(f"{passed} of {trials} trials passed, seed {seed}" + (
        f", without {options.without}" if options.without else ""))
    if path == KEPT:
        write_page(RELIABILITY, MARK, table(results.kept, ROWS))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
