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
import sys
import time
from contextlib import suppress

GRACE = 28.0


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
