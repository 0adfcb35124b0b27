"""What nobody foresaw: one line for the person, the trace in a file for whoever mends it."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import traceback

from maxtext.config.reason import placed

LONGEST = 300  # characters of the exception's own words


def unforeseen(error: BaseException, what: str, folder: str | None = None) -> str:
    """Writes the trace of an exception into `folder`, or else where temporary files go; returns the line to show.

    Args:
      error: with its traceback.
      what: was done, such as `maxtext report`.
      folder: that outlives this process, such as a run directory; it need not exist.
    """
    name = f"trace_{time.strftime('%Y%m%d_%H%M%S')}_{socket.gethostname()}_{os.getpid()}.txt"
    text = "".join(traceback.format_exception(error))
    where = "the trace could not be written to any file"
    for place in ([folder] if folder and os.path.isdir(folder) else []) + [tempfile.gettempdir()]:
        path = os.path.join(place, name)
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{' '.join(sys.argv)}\n\n{text}")
        except OSError:
            continue
        where = f"the trace is in {path}"
        break
    words = " ".join(placed(error).split())[:LONGEST]
    return (f"{what} failed: {type(error).__name__}: {words} ({_place(error)}). This has no message of its own yet: "
            f"{where}, which a report of the fault should hold")


def no_devices(error: BaseException) -> str | None:
    """What to say where JAX could open no device; None for any other exception.

    JAX tells it by a RuntimeError, or by an assertion without words, in `jax/_src/xla_bridge.py`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not isinstance(error, (AssertionError, RuntimeError)) or not frames[-1].filename.endswith(
            os.path.join("jax", "_src", "xla_bridge.py")):
        return None
    asked = os.environ.get("JAX_PLATFORMS", "")
    words = " ".join(str(error).split())[:LONGEST]
    if not asked:
        return f"JAX cannot open the devices of this machine: {words}; JAX_PLATFORMS=cpu goes without them"
    return (f"JAX_PLATFORMS={asked}: JAX has no such device here{': ' * bool(words)}{words}; install JAX for it "
            "(pip install -e '.[cuda]' or '.[tpu]'), or unset JAX_PLATFORMS")


def _place(error: BaseException) -> str:
    """The innermost line of this package, or else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if f"{os.sep}maxtext{os.sep}" in frame.filename] or list(frames)
    return f"{os.path.basename(inside[-1].filename)}:{inside[-1].lineno}" if inside else "nowhere"
