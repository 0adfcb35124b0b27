"""The arrays of a checkpoint: what Orbax is given, and what it must bring back. The tree itself is opaque."""

import contextlib
import difflib
import functools
import json
import logging
import os
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from maxtext.checkpoint import integrity, streamed
from maxtext.checkpoint.manifest import CheckpointError, Leaf, Manifest

PyTree = Any
_FILE_BYTES = 128 << 20  # about, of a data file: enough of them to be written, hashed and read at the same time


class Orbax:
    """Orbax, imported in a thread of its own from the moment this is made.

    The import takes between a third of a second and one second; most callers compile or read data meanwhile.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._import, name="import orbax", daemon=True)
        self._thread.start()
        self._writer: Any = None

    @staticmethod
    def _import() -> None:
        import orbax.checkpoint  # noqa: F401

    def _checkpointer(self) -> Any:
        self._thread.join()
        import orbax.checkpoint as ocp

        _quieten()
        # No compression: float32 weights shrink by under a tenth, and zstd makes a save about three times slower.
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False))

    def start(self, path: str, arrays: dict[str, jax.Array]) -> None:
        """Begin to write a flat dict of arrays to a new directory; copies to the host are done when it returns."""
        self._writer = self._writer or self._checkpointer()
        import orbax.checkpoint as ocp

        self._writer.save(path, args=ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE_BYTES))

    def finish(self) -> None:
        """Wait until all is written; raises what went wrong."""
        self._writer.wait_until_finished()

    def close(self) -> None:
        """Free the writer's threads; the next `start` makes a new one (it must, after an error)."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def read(self, path: str, saved: dict[str, Leaf], wanted: dict[str, Any]) -> dict[str, jax.Array]:
        """Every leaf of `wanted` (jax.ShapeDtypeStruct by name) on its sharding, whatever mesh saved it."""
        if streamed.is_streamed(path):
            return streamed.read(path, wanted)
        arguments, arrays = {}, {}
        with contextlib.closing(self._checkpointer()) as reader:
            import orbax.checkpoint as ocp

            for name, want in wanted.items():
                sharding = want.sharding or SingleDeviceSharding(jax.local_devices()[0])
                if want.size == 0:
                    arrays[name] = jax.device_put(np.zeros(want.shape, want.dtype), sharding)
                    continue
                plain = want
                if integrity.is_key(want.dtype):
                    plain = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(want.shape, want.dtype))
                arguments[name] = ocp.ArrayRestoreArgs(
                    sharding=_extended(sharding, want.ndim, plain.ndim), global_shape=plain.shape, dtype=plain.dtype
                )
            partial = {} if wanted.keys() == saved.keys() else {"item": arguments, "partial_restore": True}
            arrays |= reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments, **partial))
        for name, leaf in saved.items():
            if leaf.key_impl and name in wanted:
                wrap = jax.jit(jax.random.wrap_key_data, static_argnames="impl", out_shardings=wanted[name].sharding)
                arrays[name] = wrap(arrays[name], impl=leaf.key_impl)
        return arrays


@functools.cache
def _quieten() -> None:
    """Keeps Orbax's threads from writing pages of stack traces beside the one message that says why a save failed.

    Each of them logs what it met, which `Orbax.finish` raises; and what still comes from the disk finds their event
    loops closed.
    """
    logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname or
                                        record.levelno != logging.ERROR)
    shown = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    sys.unraisablehook = hook


def read_leaf(path: str, name: str) -> np.ndarray:
    """One stored leaf as a host array, whatever its size on other machines was split into."""
    if streamed.is_streamed(path):
        return streamed.read_leaf(path, name)
    import orbax.checkpoint as ocp

    # Orbax logs a page of warnings about sharing caches for every single leaf that is read alone.
    logging.getLogger("absl").setLevel(logging.ERROR)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as reader:
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        wanted = ocp.args.PyTreeRestore(item={name: np.zeros(0)}, restore_args=how, partial_restore=True)
        return np.asarray(reader.restore(path, args=wanted)[name])


def read_row(path: str, name: str, row: int) -> np.ndarray | None:
    """One row of a stored leaf, or None where it can only be read whole."""
    return streamed.read_row(path, name, row) if streamed.is_streamed(path) else None


def describe(state: PyTree) -> tuple[dict[str, Leaf], dict[str, jax.Array]]:
    """Every leaf's description, and what Orbax is given: no empty arrays, random keys as their words."""
    try:
        named = integrity.named_leaves(state)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    leaves, arrays = {}, {}
    for name, leaf in named.items():
        if not isinstance(leaf, jax.Array):
            raise CheckpointError(f"leaf {name} is a {type(leaf).__name__}; a state is made of jax arrays alone")
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise CheckpointError(f"leaf {name} is {leaf.dtype}, of which no fingerprint is defined")
        key = integrity.is_key(leaf.dtype)
        leaves[name] = Leaf(leaf.shape, str(leaf.dtype), (0, 0), 0, str(jax.random.key_impl(leaf)) if key else None)
        if leaf.size:
            arrays[name] = jax.random.key_data(leaf) if key else leaf
    if not arrays:
        raise CheckpointError("the state has no arrays to save")
    return leaves, arrays


def refuse_mismatch(step_dir: str, found: Manifest, wanted: dict[str, Any], partial: bool = False) -> None:
    """CheckpointError that lists every leaf whose name, shape or dtype is not the one saved.

    With `partial` the checkpoint may hold more leaves than are asked for.
    """
    asked = {name: Leaf(tuple(leaf.shape), str(leaf.dtype), (0, 0)) for name, leaf in wanted.items()}
    missing, extra = asked.keys() - found.leaves.keys(), found.leaves.keys() - asked.keys()
    faults = []
    for name, leaf in asked.items():
        if name in missing:
            near = difflib.get_close_matches(name, extra, 1, 0.0) if extra else []
            hint = f"; the nearest is {near[0]} ({found.leaves[near[0]]})" if near else ""
            faults.append(f"{name}: the state wants {leaf}, the checkpoint has no such leaf{hint}")
        elif leaf.shape != found.leaves[name].shape:
            faults.append(f"{name}: the state wants shape {leaf}, the checkpoint has {found.leaves[name]}")
        elif leaf.dtype != found.leaves[name].dtype:
            faults.append(f"{name}: the state wants dtype {leaf}, the checkpoint has {found.leaves[name]}")
    faults += [
        f"{name}: the checkpoint has {leaf}, the state has no such leaf"
        for name, leaf in found.leaves.items()
        if name in extra and not partial
    ]
    if faults:
        advice = "use the config that it was saved with, or another run_name"
        raise CheckpointError("\n  ".join([f"{step_dir} does not fit this model and optimizer; {advice}:", *faults]))


def _extended(sharding: Any, ndim: int, new_ndim: int) -> Any:
    """The sharding of random keys carried over to their words, which have one more, unsharded, dim."""
    if new_ndim == ndim or not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *[None] * (new_ndim - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def reason(error: BaseException) -> str:
    """An error as one line; of a long one both ends, because the operating system's reason stands at the end."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 600 else f"{text[:250]} ... {text[-350:]}"


def undecodable(error: BaseException | None) -> bool:
    """Whether a read failed because of what the files hold, as where memory was wrong before they were written.

    TensorStore says so of its own files by a status, and the JSON beside them does not parse. Of all else a machine or
    a version may be the cause, and then no other checkpoint would be read either.
    """
    while error is not None:
        if "DATA_LOSS" in str(error) or isinstance(error, json.JSONDecodeError):
            return True
        error = error.__cause__ or error.__context__
    return False
