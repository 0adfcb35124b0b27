"""The axis fsdp in two parts, so that no collective of weights runs over all devices of a slice."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from maxtext.config.schema import Config, MeshConfig, QuantConfig
from maxtext.model.decoder import abstract_decoder
from maxtext.parallel.mesh import batch_devices, cut_fsdp, cut_of_fsdp, sizes_of
from maxtext.parallel.sharding import INNER, spec
from maxtext.plan.collectives import traffic
from maxtext.plan.hlo import Walk, parse
from maxtext.train.step import batch_gradient
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model

pytestmark = pytest.mark.one_pass


def fakes(kind: str, *torus: int) -> list[Any]:
    """Devices of a torus."""
    return [SimpleNamespace(device_kind=kind, platform="tpu", coords=coords) for coords in np.ndindex(torus)]


def config(fsdp: int, **mesh: int) -> Config:
    cfg = tiny_config(tiny_model(d_model=256), global_batch=256)
    return dataclasses.replace(cfg, mesh=MeshConfig(fsdp=fsdp, **({"data": 1, "tensor": 1} | mesh)))


@pytest.mark.parametrize(("kind", "torus", "inner"), [
    ("TPU v5", (4, 4, 8), 8), ("TPU v5", (8, 4, 4), 4), ("TPU v6 lite", (16, 16, 1), 16),  # a ring is the inner part
    ("TPU v5", (4, 4, 2), 1),  # so few gather as they should
    ("TPU7x", (4, 4, 4), 1), ("TPU v5 lite", (8, 8, 1), 1),
])
def test_fsdp_is_cut_where_it_is_the_whole_slice(kind: str, torus: tuple[int, ...], inner: int):
    devices = fakes(kind, *torus)
    assert cut_of_fsdp(config(len(devices)), devices) == inner
    assert cut_of_fsdp(config(len(devices) // 2, data=2), devices) == 1
    assert cut_of_fsdp(dataclasses.replace(config(len(devices)), quant=QuantConfig(kind="int8")), devices) == 1


def test_a_cut_mesh_counts_as_one_that_is_not():
    whole, cut = mesh_of((1, 8, 1)), mesh_of((1, 8, 1), inner=2)
    assert sizes_of(cut) == dict(whole.shape) == sizes_of(whole)
    assert batch_devices(cut) == 8
    assert (cut.devices.flatten() == whole.devices.flatten()).all()
    with jax.set_mesh(cut):
        assert spec("embed", None)[0][:2] == ("fsdp", INNER)
    assert cut_fsdp(whole, 2).shape == cut.shape


def test_weights_and_their_gradients_never_cross_all_devices_at_once():
    """What goes over both parts together is smaller than any matrix; each part gathers and sums."""
    model = tiny_model(n_layers=1, d_model=64, d_ff=96, layer_pattern=("full",))
    cfg, mesh = tiny_config(model), mesh_of((1, 8, 1), inner=2)
    with jax.set_mesh(mesh):
        params, batch = abstract_decoder(cfg.model, mesh), place(random_batch(cfg), mesh)
        gradient = jax.jit(lambda p: batch_gradient(cfg, p, batch, batch.weights_BT.sum())[0])
        rows = traffic(Walk(parse(gradient.lower(params).compile().as_text())).runs, mesh.shape)
    assert {(row.axes, row.devices) for row in rows} == {("fsdp", 4), (INNER, 2), (f"fsdp+{INNER}", 8)}
    assert all(row.bytes_sent / row.count < 4 * 64 * 96 / 8 for row in rows if row.axes == f"fsdp+{INNER}")
    for axes in ("fsdp", INNER):
        kinds = {row.kind for row in rows if row.axes == axes}
        assert "all-gather" in kinds
        assert kinds & {"all-reduce", "reduce-scatter"}
