"""`maxtext report RUN`: report.html and loss.png of a run directory, from metrics.jsonl and config.yml alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from maxtext.config.reason import placed
from maxtext.report.image import draw
from maxtext.report.overlay import Overlay, compare, lines
from maxtext.report.page import render
from maxtext.report.run_files import ReportError, RunFiles, read_run

METRIC, TOLERANCE = "train/CE loss", 0.01  # what is compared with a reference, and the largest gap that passes


def write_report(run_dir: str, overlay: Overlay | None = None, others: Sequence[RunFiles] = ()) -> tuple[str, str]:
    """Write report.html and loss.png into `run_dir`, each at once in whole; return their paths.

    With an `overlay` the page also shows the run over a reference, and with `others` beside these runs.

    Raises ReportError when the directory holds no metrics, OSError when it cannot be written.
    """
    run = read_run(run_dir)
    page, picture = os.path.join(run_dir, "report.html"), os.path.join(run_dir, "loss.png")
    with open(page + ".tmp", "w", encoding="utf-8") as file:
        file.write(render(run, overlay, others))
    os.replace(page + ".tmp", page)
    draw(run, picture + ".tmp")
    os.replace(picture + ".tmp", picture)
    return page, picture


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code: 0 done, 1 beyond the tolerance, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(prog="maxtext report", description="Write report.html and loss.png of a run.")
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run directory, <output_dir>/<run_name>")
    parser.add_argument("--reference", metavar="CURVE", help="a CSV with a step and a value column, another run, or "
                        "its metrics.jsonl: print the gap at each step that both logged, and draw it into the page")
    parser.add_argument("--compare", metavar="RUN2", nargs="+", default=[], help="other runs, to be laid over it")
    parser.add_argument("--metric", help=f"metric to lay over the reference ({METRIC})")
    parser.add_argument("--tolerance", type=float, help=f"largest gap that passes ({TOLERANCE})")
    parser.add_argument("--by-mean", action="store_true", help="judge the smoothed mean gap instead of every step's, "
                        "as for runs on data in another order")
    options = parser.parse_args(argv)
    for name in ("metric", "tolerance", "by_mean"):
        given = getattr(options, name)
        if options.reference is None and given is not None and given is not False:
            parser.error(f"--{name.replace('_', '-')} only goes with --reference, the curve to compare with")
    metric = METRIC if options.metric is None else options.metric
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    try:
        others = [read_run(folder) for folder in options.compare]
    except (ReportError, OSError) as error:
        print(placed(error), file=sys.stderr)
        return 2
    failed = 0
    for folder in options.run:
        try:
            overlay = None
            if options.reference is not None:
                overlay = compare(read_run(folder), options.reference, metric, tolerance, options.by_mean)
                print(*lines(overlay), sep="\n")
            for path in write_report(folder, overlay, others):
                print(path)
            if overlay is not None and not overlay.passed:
                failed = max(failed, 1)
        except (ReportError, OSError) as error:
            print(placed(error), file=sys.stderr)
            failed = 2
    return failed
