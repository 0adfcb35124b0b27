"""Batches on the mesh: what every iterator of global batches has, and which rows a process needs.

Shapes: B instances of the global batch, T tokens of one instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.batch import Batch, make_batch
from maxtext.data.journal import Journal, data_step
from maxtext.data.reader import Rows
from maxtext.data.tokens import ResolvedData

STATE_VERSION = 1


class GlobalBatches(Iterator[Batch]):
    """Global batches of the updates 1, 2, ... without end, whatever they are read from; made by `make_batches`.

    Attributes:
      journal: what was decided about the data.
      last_wait_seconds: how long the last `__next__` waited for the reader.
    """

    def __init__(self, cfg: Config, resolved: ResolvedData, sharding: jax.sharding.NamedSharding | None,
                 journal: Journal | None = None):
        self.journal = Journal() if journal is None else journal
        self._cfg, self._resolved, self._sharding = cfg, resolved, sharding
        self._shape = (cfg.train.global_batch, cfg.data.sequence_length)
        self._rows = local_rows(sharding, self._shape)
        self._step = 0
        self.last_wait_seconds = 0.0

    def abstract(self) -> Batch:
        """The shapes, types and shardings of every batch, to compile from."""
        return abstract_batch(self._cfg, self._sharding)

    def data_step(self, update: int) -> int:
        """Which batch of the data's order an update takes: its own number, unless batches were passed over."""
        return data_step(update, self.journal.jumps)

    @property
    def source_tokens(self) -> dict[str, int]:
        """Tokens of each source in the batches so far, of all rows and whatever becomes of their loss."""
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch, for JSON: the number of updates, and what they were counted in."""
        raise NotImplementedError

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the position of `state`, on any number of hosts, devices and workers.

        Raises:
          DataError: the state counts other data, another seed or another batch shape, or had other weights of sources
            up to its step: step k would mean other text.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What a person should know of the data before the run, for the start table; JSON-able."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the reader's threads and processes."""
        raise NotImplementedError

    def _header(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, "step": self._step, **self._identity(), **self.journal.state()}

    def _check(self, state: dict[str, Any]) -> list[str]:
        """What differs between a saved position and this data. Raises DataError: it is of another version."""
        if state.get("version") != STATE_VERSION:
            raise DataError(f"data position: version {state.get('version')}; this program reads {STATE_VERSION}")
        keys = {"seed": "data.seed", "global_batch": "train.global_batch", "sequence_length": "data.sequence_length",
                "n_instances": "the number of instances in the data", "fingerprint": "the data (fingerprint)"}
        return [f"{keys[key]} is {value} but was {state.get(key)}" for key, value in self._identity().items()
                if state.get(key) != value]

    def _take(self, state: dict[str, Any], wrong: list[str]) -> None:
        """Takes over step and journal. Raises DataError: something is wrong."""
        if wrong:
            raise DataError(f"cannot continue at step {state.get('step')}: {'; '.join(wrong)}. Restore the old values, "
                            "or start a new run with another run_name")
        self.journal.add_state(state)
        self._step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._cfg.data.seed, "global_batch": self._shape[0], "sequence_length": self._shape[1],
                "n_instances": self._resolved.n_instances, "fingerprint": self._resolved.fingerprint}

    def _placed(self, rows: Rows, masked: np.ndarray | None) -> Batch:
        """The batch of the rows of this process, on the devices."""
        batch = make_batch(rows["tokens"], rows.get("real"), rows.get("segments"), rows.get("rejected"), masked)
        return batch if self._sharding is None else jax.tree.map(self._to_global, batch)

    def _to_global(self, local: np.ndarray) -> jax.Array:
        """The global array, (B, T) or (B,), of which this process holds the rows self._rows."""
        sharding = _sharding_of(self._sharding, local.ndim)
        assert sharding is not None
        if sharding.is_fully_addressable:
            return jax.device_put(local, sharding)

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # devices of this process only
            wanted = np.arange(self._shape[0])[index[0]]
            return local[(np.searchsorted(self._rows, wanted), *index[1:])]

        return jax.make_array_from_callback(self._shape[:local.ndim], sharding, shard)


def abstract_batch(cfg: Config, sharding: jax.sharding.NamedSharding | None) -> Batch:
    """The shapes, types and shardings of every batch of a run, from its config alone."""
    def shaped(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding_of(sharding, len(shape)))

    rows, data = (cfg.train.global_batch,), cfg.data
    shape = (*rows, data.sequence_length)
    ids = shaped(shape, jnp.int32)
    return Batch(ids, ids, shaped(shape, jnp.float32), ids if data.document_masking else None,
                 shaped(rows, jnp.float32) if data.instance_filter.enabled else None,
                 shaped(rows, jnp.int32) if data.pads else None)


def _sharding_of(sharding: jax.sharding.NamedSharding | None, rank: int) -> jax.sharding.NamedSharding | None:
    """The placement of an array of the batch: rows over the same devices whatever their rank."""
    if sharding is None or rank == 2:
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:rank]))


def local_rows(sharding: jax.sharding.NamedSharding | None, shape: tuple[int, int]) -> np.ndarray:
    """Rows of the global batch, ascending, that the devices of this process hold.

    Raises:
      DataError: B does not divide over the sharding.
    """
    if sharding is None:
        return np.arange(shape[0])
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise DataError(f"train.global_batch {shape[0]} does not divide over the mesh {dict(sharding.mesh.shape)} as "
                        f"{sharding.spec}: {error}") from error
    return rows_of((index for index in indices.values() if index is not None), shape[0])


def rows_of(indices: Iterable[tuple[slice, ...]], n_rows: int) -> np.ndarray:
    """The union, ascending, of the rows that device indices name."""
    wanted = np.zeros(n_rows, bool)
    for index in indices:
        wanted[index[0]] = True
    return np.flatnonzero(wanted)
