"""Reads batches from a saved position, as a host of several does."""

import json
from typing import Any

import jax
import numpy as np

from maxtext.config.schema import Config
from maxtext.data.batch import Batch
from maxtext.data.global_batches import rows_of
from maxtext.data.journal import Journal, Jump
from maxtext.data.pipeline import make_batches
from maxtext.data.tokens import resolve
from maxtext.model.decoder import init_decoder
from maxtext.model.loss import mean_loss
from tests.tiny import mesh_of, place

# How many batches were read before each of five stops, and on how many hosts the run then goes on.
STOPS = ((0, 2), (1, 4), (4, 1), (7, 4), (10, 2))


def hosts_rows(batch: int, hosts: int) -> list[np.ndarray]:
    """The rows of each host, as a mesh whose devices share the rows gives them."""
    per = batch // hosts
    return [rows_of([(slice(host * per, (host + 1) * per), slice(None))], batch) for host in range(hosts)]


def read(cfg: Config, count: int, state: dict[str, Any] | None = None, rows: np.ndarray | None = None,
         jumps: tuple[Jump, ...] = ()) -> tuple[list[Batch], list[dict[str, Any]]]:
    """`count` batches of the rows `rows` (all by default) from a position, and the positions before and after each."""
    batches = make_batches(cfg, resolve(cfg), journal=Journal())
    batches.journal.add_jumps(list(jumps))
    if rows is not None:
        batches._rows = rows
    if state is not None:
        batches.set_state(json.loads(json.dumps(state)))
    found, states = [], [batches.get_state()]
    for _ in range(count):
        found.append(next(batches))
        states.append(batches.get_state())
    batches.close()
    return found, states


def tokens_of(found: list[Batch]) -> np.ndarray:
    return np.concatenate([batch.tokens_BT for batch in found])


def loss_of(cfg: Config, batch: Batch) -> float:
    """The loss of a batch, with the initial weights."""
    mesh = mesh_of((1, 1, 1))
    with jax.set_mesh(mesh):
        params, batch = init_decoder(cfg.model, jax.random.key(0)), place(batch, mesh)
        return float(jax.jit(lambda p, b: mean_loss(p, b.tokens_BT, b.targets_BT, b.weights_BT, b.weights_BT.sum(), cfg,
                                                    b.segments_BT, b.real_B)[0])(params, batch))
