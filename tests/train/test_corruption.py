"""Silent corruption of one device: found by comparing bits, and the device is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.fault_injection import flipped
from maxtext.parallel.host_memory import HOST, on_devices
from maxtext.train import corruption, loop
from maxtext.train.corruption import Comparison
from maxtext.train.loop import Outcome, TrainingError, train
from maxtext.train.state import init_state
from tests.runs import Runs, saved_bits, saved_steps, some_devices
from tests.tiny import mesh_of, place, random_batch, tiny_config

MESHES = [(4, 1, 1), (2, 2, 1)]


def with_flip(state: Any, device: jax.Device, leaf: int, bit: int = 0) -> Any:
    leaves, treedef = jax.tree.flatten(state)
    leaves[leaf] = flipped(leaves[leaf], device, bit)
    return jax.tree.unflatten(treedef, leaves)


@pytest.fixture(scope="module", params=MESHES, ids=str)
def compared(request: pytest.FixtureRequest):
    """A comparison on a mesh, with a state and a batch."""
    cfg = tiny_config()
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, data=request.param[0]))
    mesh = mesh_of(request.param)
    with jax.set_mesh(mesh):
        return Comparison(cfg, mesh), init_state(cfg), place(random_batch(cfg), mesh), mesh


def test_one_flipped_bit_in_a_copy_is_found_and_its_device_named(compared):
    comparison, state, _, mesh = compared
    rng = np.random.default_rng(0)
    floats = [i for i, leaf in enumerate(jax.tree.leaves(state)) if leaf.dtype == np.float32 and leaf.size > 1]
    with jax.set_mesh(mesh):
        assert comparison.replicas(state) is None
        for _ in range(8):
            device = mesh.devices.flat[rng.integers(mesh.size)]
            found = comparison.replicas(with_flip(state, device, int(rng.choice(floats)), int(rng.integers(32))))
            assert found is not None
            named = f"device {device.id} (cpu, process 0)"
            assert found.startswith((f"{named} has other bits of ", *(["one of "] if mesh.shape["data"] == 2 else [])))
            assert named in found


def test_a_device_that_computes_something_else_is_found(compared, monkeypatch: pytest.MonkeyPatch):
    """Within as many comparisons as there are devices, whichever it is."""
    comparison, state, batch, mesh = compared
    broken = mesh.devices.flat[2]
    put = jax.device_put

    def faulty(x: Any, where: Any = None, **named: Any) -> Any:
        done = put(x, where, **named)
        if getattr(where, "device_set", None) == {broken} and done.dtype == np.float32 and done.ndim == 2:
            return flipped(done, broken)
        return done

    with jax.set_mesh(mesh):
        assert [comparison.gradient(state.params, batch) for _ in range(mesh.size)] == [None] * mesh.size
        monkeypatch.setattr(corruption.jax, "device_put", faulty)
        found = [comparison.gradient(state.params, batch) for _ in range(mesh.size)]
    assert [one for one in found if one] == [
        f"device {broken.id} (cpu, process 0) has another gradient of the same row than its peers"] * 2


def test_what_lies_in_the_memory_of_hosts_is_compared_too():
    cfg = tiny_config()
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, data=4), optim=dataclasses.replace(
        cfg.optim, offload="host", offload_weights="host"))
    mesh = mesh_of((4, 1, 1))
    with jax.set_mesh(mesh):
        comparison, state, batch = Comparison(cfg, mesh), init_state(cfg), place(random_batch(cfg), mesh)
        assert comparison(state, batch) is None
        embed = state.params.embed
        assert embed.sharding.memory_kind == HOST
        wrong = jax.device_put(flipped(on_devices(embed), mesh.devices.flat[1]), embed.sharding)
        found = comparison(state.replace(params=state.params.replace(embed=wrong)), batch)
    assert found == "device 1 (cpu, process 0) has other bits of params.embed than its copies"


@pytest.mark.one_pass
def test_a_run_stops_and_its_checkpoints_since_then_are_set_aside(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    devices = some_devices(4)
    cfg = runs.config("run", "train.steps=12", "checkpoint.every=2", "eval.every=null", "mesh.data=4",
                      "guard.compare_devices_every=3")
    compile_train_step = loop.compile_train_step

    class Step:
        def __init__(self, cfg: Any) -> None:
            self._step = compile_train_step(cfg)

        def lower(self, *arguments: Any) -> Any:
            lowered = self._step.lower(*arguments)

            class Compiled:
                def compile(self) -> Any:
                    step = lowered.compile()

                    def run(state: Any, batch: Any) -> Any:
                        state, metrics = step(state, batch)
                        if int(state.step) == 7:
                            state = with_flip(state, devices[2], 3)
                        return state, metrics

                    return run

            return Compiled()

    with monkeypatch.context() as patch:
        patch.setattr(loop, "compile_train_step", Step)
        with pytest.raises(TrainingError, match=r"device 2 \(cpu, process 0\) has other bits of params\..* than its "
                           r"copies, at update 9 .*Checkpoints after update 6 are set aside"):
            train(cfg, devices=devices)
    assert saved_steps(cfg) == [2, 4, 6]
    assert train(cfg, devices=devices) == Outcome(12)


@pytest.mark.one_pass
def test_comparing_changes_nothing(runs: Runs):
    options = ("train.steps=6", "checkpoint.every=6", "eval.every=null", "mesh.data=2")
    for name, extra in (("plain", ()), ("compared", ("guard.compare_devices_every=2",))):
        train(runs.config(name, *options, *extra), devices=some_devices(2))
    assert saved_bits(runs.config("plain", *options), 6) == saved_bits(runs.config("compared", *options), 6)
