"""Elastic jobs of the campaign: `maxtext launch` and its workers as they are, but for slow updates and guards off.

    python benchmarks/fault_worker.py launch local CONFIG --workers N ...    the supervisor
    python benchmarks/fault_worker.py SPEC NUMBER                           a worker

The variable FAULTS names, as JSON, the seconds that are added to each update and the guards that are off.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SETTING = "FAULTS"


def setting(seconds: float, without: Sequence[str]) -> dict[str, str]:
    """The variable, for the environment of a job."""
    return {SETTING: json.dumps({"seconds": seconds, "without": list(without)})}


def launch(arguments: Sequence[str], without: Sequence[str]) -> int:
    """Runs the supervisor, whose workers are started through this file too."""
    from maxtext import cli
    from maxtext.elastic import supervisor

    _switch_off(without)
    command = (sys.executable, str(Path(__file__).resolve()))
    supervisor.Supervisor = functools.partial(supervisor.Supervisor, command=command)  # type: ignore[misc,assignment]
    return cli.main(list(arguments))


def _switch_off(guards: Sequence[str]) -> None:
    if guards:  # else the supervisor goes without JAX, as it is
        from benchmarks import fault_injection

        for guard in guards:
            fault_injection.GUARDS[guard]()


def work(seconds: float, without: Sequence[str]) -> None:
    from benchmarks import fault_injection
    from maxtext.elastic import worker

    _switch_off(without)
    fault_injection.slow_updates(seconds)
    worker.main()


def main() -> int:
    told = json.loads(os.environ[SETTING])
    if sys.argv[1] == "launch":
        return launch(sys.argv[1:], told["without"])
    work(told["seconds"], told["without"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
