"""Limits in seconds of CPU, which hold on a busy or slow machine too.

Neighbours on a core slow a process down by a third and more, in its own seconds of CPU too: they share caches and
ports. A limit is therefore meant for the machine where it was set, and a measurement is divided by how much slower the
machine of the moment starts a fixed program.
"""

from __future__ import annotations

import atexit
import functools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

_MODULES = """argparse asyncio concurrent.futures ctypes dataclasses difflib doctest email.mime.text http.server imaplib
              inspect json logging.config mailbox multiprocessing.managers pydoc tarfile typing unittest.mock
              xml.dom.minidom xmlrpc.client zipfile"""
_SECONDS = 0.2  # of CPU that importing them takes, start included, at the pace for which limits are set


@functools.cache
def _environment() -> dict[str, str]:
    """With modules compiled once and kept, as for a user, wherever the tests may write."""
    folder = tempfile.mkdtemp(prefix="maxtext-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": folder}


def run(argv: list[str], **options) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Runs a command; the seconds of CPU that it and its children took, and what it said."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, text=True, capture_output=True, timeout=60, env=_environment(), **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def least(measure: Callable[[], float], limit: float, tries: int = 8) -> float:
    """The least of up to `tries` measurements, in seconds of CPU at the standard pace; one below `limit` is enough."""
    found: list[float] = []
    while len(found) < tries and not any(seconds < limit for seconds in found):
        # Isolated, so that it finds its modules compiled: compiling them would pass for a slow machine.
        pace, _ = run([sys.executable, "-I", "-c", f"import {', '.join(_MODULES.split())}"])
        found.append(measure() / max(1.0, pace / _SECONDS))
    return min(found)
