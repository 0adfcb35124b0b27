"""Process-wide settings of JAX, made before its first use: flags of the compiler and the compilation cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def prepare_runtime() -> None:
    """Sets up the persistent compilation cache, so that a second start of the same run compiles nothing.

    The cache lies in JAX_COMPILATION_CACHE_DIR, or else in the user's cache folder; an empty value turns it off.
    """
    folder = os.environ.get(CACHE_VARIABLE)
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
        folder = os.path.join(base, "maxtext", "xla")
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
