"""Process-wide settings of JAX, made before its first use: flags of the compiler and the compilation cache."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import jax

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, from glibc's malloc.h


def prepare_runtime() -> None:
    """Sets up the persistent compilation cache, and how a CPU runs programs. Call it before any use of JAX.

    With the cache a second start of the same run compiles nothing. It lies in JAX_COMPILATION_CACHE_DIR, or else in the
    user's cache folder; an empty value turns it off.

    Several virtual devices of one CPU share one thread pool, by default with a thread a device. Devices that wait in a
    collective can fill it, so that a helper thread of the last one finds no room: XLA then ends the process. So the
    pool gets room to spare, and programs run one after another there.

    The thread that calls a program on a CPU also runs it, so that its memory comes from where `keep_freed_memory` keeps
    it. Nothing is lost: no other device would work on while the caller waits.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    devices = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if devices:
        os.environ.setdefault("PJRT_NPROC", str(2 * int(devices[1]) + (os.cpu_count() or 1)))  # threads of the pool
    folder = os.environ.get(CACHE_VARIABLE)
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
        folder = os.path.join(base, "maxtext", "xla")
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        # All programs: the many small ones of the initial weights and the first save cost more than the large one.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def keep_freed_memory() -> None:
    """Makes the C library keep large blocks that are freed for the next that asks. For training on a CPU.

    XLA's CPU back end allocates the temporaries of a program anew in each call. glibc gives such blocks back to the
    system, which then clears every page again at its first touch: a quarter of a small step. It keeps them for the main
    thread, which runs the steps; other threads have small arenas of their own. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return
    mallopt(MMAP_MAX, 0)
    mallopt(TRIM_THRESHOLD, -1)  # never
