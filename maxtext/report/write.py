"""`maxtext report RUN`: report.html and loss.png of a run directory, from metrics.jsonl and config.yml alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from maxtext.report.image import draw
from maxtext.report.page import render
from maxtext.report.run_files import ReportError, read_run


def write_report(run_dir: str) -> tuple[str, str]:
    """Write report.html and loss.png into `run_dir`, each at once in whole; return their paths.

    Raises ReportError when the directory holds no metrics, OSError when it cannot be written.
    """
    run = read_run(run_dir)
    page, picture = os.path.join(run_dir, "report.html"), os.path.join(run_dir, "loss.png")
    with open(page + ".tmp", "w", encoding="utf-8") as file:
        file.write(render(run))
    os.replace(page + ".tmp", page)
    draw(run, picture + ".tmp")
    os.replace(picture + ".tmp", picture)
    return page, picture


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    parser = argparse.ArgumentParser(prog="maxtext report", description="Write report.html and loss.png of a run.")
    parser.add_argument("run", metavar="RUN", nargs="+", help="a run directory, <output_dir>/<run_name>")
    failed = 0
    for folder in parser.parse_args(argv).run:
        try:
            for path in write_report(folder):
                print(path)
        except (ReportError, OSError) as error:
            print(error, file=sys.stderr)
            failed = 2
    return failed
