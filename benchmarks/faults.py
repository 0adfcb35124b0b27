"""A campaign of faults against real runs, each of which must end as if nothing had happened, to the bit:

    python benchmarks/faults.py [--trials 20] [--seed 0] [--only ROW ...] [--without GUARD] [--json FILE]

Every trial draws its fault anew from the seed, injects it into a small run (two layers, 4 virtual devices, 24 updates,
a save every 4), starts the same command again where a person or a scheduler would, and compares the last state bit for
bit, and each update's loss and batch, with a run that nothing befell. `--without` switches one guard off in the
processes that train: the rows that name it must then fail, or they prove nothing.

The table gives trials, passes, seconds from the fault to the next update, and updates done again. Exit code 1 when a
trial failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fault_ground import Failed, Ground, Row, Trial, prepare_environment
from benchmarks.fault_rows import ROWS


@dataclasses.dataclass
class Result:
    """What became of the trials of a row."""

    row: str
    trials: int
    passed: int
    recovery_p50: float | None
    recovery_p99: float | None
    lost_updates: int
    seconds: float
    failures: list[str]


def campaign(folder: Path, trials: int, seed: int, only: Sequence[str] = (),
             without: Sequence[str] = ()) -> list[Result]:
    """Runs trials of the rows (all, or those named) in a folder; a line is printed for each row when it is done."""
    prepare_environment()
    ground = Ground(folder, without)
    results = []
    for row in ROWS:
        if not only or row.name in only:
            results.append(_run(ground, row, trials, seed))
            print(_line(results[-1]), flush=True)
    return results


def _run(ground: Ground, row: Row, trials: int, seed: int) -> Result:
    passed, failures, recoveries, lost, began = 0, [], [], 0, time.monotonic()
    for number in range(trials):
        trial = Trial(ground, f"{row.name.replace(' ', '_')}_{number}", f"{seed}/{row.name}/{number}")
        try:
            row.run(trial)
            passed += 1
            recoveries += trial.recoveries
            lost = max(lost, trial.lost)
        except Failed as failure:
            failures.append(f"trial {number}: {failure}")
        except Exception:
            failures.append(f"trial {number}: {traceback.format_exc(limit=3)}")
        finally:
            shutil.rmtree(ground.directory(trial.name), ignore_errors=True)
    recoveries.sort()
    return Result(row.name, trials, passed, statistics.median(recoveries) if recoveries else None,
                  recoveries[min(len(recoveries) - 1, int(0.99 * len(recoveries)))] if recoveries else None, lost,
                  time.monotonic() - began, failures)


def _line(result: Result) -> str:
    def shown(seconds: float | None) -> str:
        return f"{'-' if seconds is None else f'{seconds:.2f}':>8}"

    told = "".join(f"\n    {failure.strip()}" for failure in result.failures[:3])
    return (f"{result.row:<28}{result.trials:>7}{result.passed:>8}{shown(result.recovery_p50)}"
            f"{shown(result.recovery_p99)}{result.lost_updates:>6}{result.seconds / max(result.trials, 1):>9.1f}{told}")


def main(argv: Sequence[str] | None = None) -> int:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="rows:\n" + "\n".join(f"  {row.name:<26} {row.doc} (guards: "
                                                                    f"{', '.join(row.guards) or 'several'})"
                                                                    for row in ROWS))
    parser.add_argument("--trials", type=int, default=20, help="of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="ROW")
    parser.add_argument("--without", choices=sorted({guard for row in ROWS for guard in row.guards}), metavar="GUARD")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    options = parser.parse_args(argv)
    only = options.only
    if options.without and not only:
        only = [row.name for row in ROWS if options.without in row.guards]
    print(f"{'row':<28}{'trials':>7}{'passed':>8}{'p50 s':>8}{'p99 s':>8}{'lost':>6}{'s/trial':>9}")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        results = campaign(Path(folder), options.trials, options.seed, only,
                           [options.without] if options.without else [])
    passed, trials = sum(result.passed for result in results), sum(result.trials for result in results)
    print(f"{passed} of {trials} trials passed, seed {options.seed}" + (
        f", without {options.without}" if options.without else ""))
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    return 0 if passed == trials else 1


if __name__ == "__main__":
    sys.exit(main())
