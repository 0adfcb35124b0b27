"""Process-wide settings of JAX, made before its first use: flags of the compiler and the compilation cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def prepare_runtime() -> None:
    """Sets up the persistent compilation cache, and safe dispatch on virtual devices. Call it before any use of JAX.

    With the cache a second start of the same run compiles nothing. It lies in JAX_COMPILATION_CACHE_DIR, or else in the
    user's cache folder; an empty value turns it off.

    Several virtual devices of one CPU share one thread pool, by default with a thread a device. Devices that wait in a
    collective can fill it, so that a helper thread of the last one finds no room: XLA then ends the process. So the
    pool gets room to spare, and programs run one after another there.
    """
    devices = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if devices:
        os.environ.setdefault("PJRT_NPROC", str(2 * int(devices[1]) + (os.cpu_count() or 1)))  # threads of the pool
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    folder = os.environ.get(CACHE_VARIABLE)
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
        folder = os.path.join(base, "maxtext", "xla")
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        # All programs: the many small ones of the initial weights and the first save cost more than the large one.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
