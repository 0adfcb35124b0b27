"""`python -m maxtext.elastic.coordinator ROOT`: the process that hosts the coordination services, one a generation.

A process of its own, because JAX ends every worker whose service vanishes: so workers whose supervisor was killed can
still save. It reads a number of members a line, starts a service, and prints its port. A worker may never be without
its service, so it outlives the supervisor for a while: until no worker is left, or GRACE seconds have passed. Then it
removes ROOT, the run's folder in memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

GRACE = 28.0


class Coordinator:
    """The supervisor's hold of that process."""

    def __init__(self, root: str, environment: Mapping[str, str], log: IO[bytes]) -> None:
        """When this process is killed it removes `root`, once the workers have gone."""
        command = [sys.executable, "-m", "maxtext.elastic.coordinator", root]
        self._popen = subprocess.Popen(command, env=dict(environment),
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                                       start_new_session=True)

    def open(self, members: int) -> str:
        """The address of a new service for so many members."""
        assert self._popen.stdout is not None
        self._tell(f"open {members}")
        return f"127.0.0.1:{int(self._popen.stdout.readline())}"  # a ValueError when it died

    def knows(self, pid: int) -> None:
        """It waits for this worker when the supervisor is gone."""
        with suppress(OSError):  # that it has died is found when a service is needed
            self._tell(f"worker {pid}")

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def _tell(self, words: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{words}\n")
        self._popen.stdin.flush()


def main() -> int:
    from maxtext.elastic.private import host_service

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    services, workers = [], set[int]()
    for line in sys.stdin:
        what, value = line.split()
        if what == "worker":
            workers.add(int(value))
            continue
        service, port = host_service(int(value))
        services.append(service)
        print(port, flush=True)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(map(_alive, workers)):
        time.sleep(0.2)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(0)  # without shutting services down, which would wait for their members


def _alive(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
