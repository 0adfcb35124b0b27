"""`checkpoint.gradient_log`: a run that dies loses nothing between two snapshots, and not a bit of what it had."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.fault_injection import flip_bit
from maxtext.checkpoint import tiers_log
from maxtext.checkpoint.tiers import Snapshots, memory_folder, memory_prefix, read_slot
from maxtext.config.architecture import MoeConfig
from maxtext.config.load import ConfigError, to_yaml
from maxtext.config.schema import Config
from maxtext.elastic.attempt import ElasticAttendance, Requests
from maxtext.model.cost import count_params
from maxtext.plan.program import compile_program
from maxtext.plan.topology import PlanError
from maxtext.train.gradient_log import LoggedStep, Memory, made_of
from maxtext.train.loop import train
from maxtext.train.metrics import MetricsWriter
from maxtext.train.optim import global_norm
from maxtext.train.resume import check_same_run
from maxtext.train.state import abstract_state, init_state, numbers_of, optimizer_of
from maxtext.train.step import batch_gradient, compile_train_step, make_gradient, make_train_step
from tests.checkpoint.states import host_bits
from tests.runs import ROOT, Runs, lines, reproducible, saved_bits
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model
from tests.train.test_memory import COMMON, DEVICES, Died, die

LOG = ("checkpoint.snapshots=true", "checkpoint.gradient_log=true", "checkpoint.every=null",
       "checkpoint.snapshot_every=5")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path):
    """A run that nothing befell, which saved updates 8 and 12."""
    cfg = Runs(tmp_path_factory.mktemp("straight"), prepared_text).config(
        "straight", *COMMON, *LOG, "checkpoint.every=4")
    train(cfg, devices=DEVICES)
    return cfg


def died(runs: Runs, monkeypatch: pytest.MonkeyPatch, at: int) -> Path:
    """A run that died when the metrics of an update were to be written; the folder of its one worker in memory."""
    root = die(runs, monkeypatch, at, *LOG)
    settle()
    return root / "worker_0"


def settle() -> None:
    """Waits for what a process that dies may just have written."""
    for thread in threading.enumerate():
        if thread.name.startswith(("gradient ", "snapshot ")):
            thread.join()


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in folder.glob("*.gradient"))


def went_on(runs: Runs, straight: Config, steps: int) -> None:
    """Starts the run again to its update `steps`; all is that of a run that nothing befell."""
    cfg = runs.config("run", *COMMON, *LOG, f"train.steps={steps}")
    train(cfg, devices=DEVICES)
    assert saved_bits(cfg, steps) == saved_bits(straight, steps), "weights, moments, counts and windows"
    assert reproducible(lines(cfg)) == reproducible(lines(straight))[:steps + 1], "each update once, with its loss"
    assert not list(Path(memory_folder()).glob(f"{memory_prefix(cfg.run_dir)}*")), "it goes with a run that has ended"


def test_no_update_is_lost_nor_a_bit_of_it(runs: Runs, straight, monkeypatch, capsys):
    assert steps_in(died(runs, monkeypatch, 8)) == [6, 7, 8], "not those before the snapshot of 5"
    went_on(runs, straight, 8)  # what is compared is the state that was made again
    said = capsys.readouterr().out
    assert "from update 8 of 8: a snapshot of update 5, and 3 updates done again from their gradients (" in said
    assert "gradients rounded to bfloat16 for the log" in said, "the start table"
    went_on(runs, straight, 12)


def test_an_entry_with_a_changed_bit_ends_the_log_and_is_named(runs: Runs, straight, monkeypatch, capsys):
    [second] = died(runs, monkeypatch, 8).glob("*_7.gradient")
    flip_bit(str(second), 0.5, 3)
    went_on(runs, straight, 12)
    said = capsys.readouterr()
    assert "from update 6 of 12: a snapshot of update 5, and 1 updates" in said.out
    assert str(second) in said.err
    assert "the log of gradients ends before update 7" in said.err


def test_a_second_death_goes_back_over_both_attempts(runs: Runs, straight, monkeypatch, capsys):
    died(runs, monkeypatch, 7)
    folder = died(runs, monkeypatch, 9)
    assert steps_in(folder) == [6, 7, 8, 9]
    assert len({path.name.split("_")[1] for path in folder.glob("*.gradient")}) == 2, "of two attempts"
    went_on(runs, straight, 12)
    assert "from update 9 of 12: a snapshot of update 5, and 4 updates" in capsys.readouterr().out


def test_a_full_memory_costs_the_log_until_the_next_snapshot(runs: Runs, straight, monkeypatch, capsys):
    write = tiers_log.write_slot

    def full_at_7(path, at, *given):
        if at.step == 7:
            raise OSError(28, "No space left on device", path)
        write(path, at, *given)

    monkeypatch.setattr(tiers_log, "write_slot", full_at_7)
    assert steps_in(died(runs, monkeypatch, 8)) == [6, 8]
    assert "the gradient of update 7 was not kept in memory" in capsys.readouterr().err
    went_on(runs, straight, 12)
    assert "from update 6 of 12" in capsys.readouterr().out


def test_an_elastic_worker_keeps_it_and_goes_on_from_it(runs: Runs, straight, monkeypatch, tmp_path):
    """In this process alone; in a generation of its own each time, as after a death."""
    def attempt(generation, cfg):
        snapshots = Snapshots(str(tmp_path / "memory"), 0, "run", generation, None, told.append)
        return train(cfg, devices=DEVICES, attendance=ElasticAttendance(
            Requests(), snapshots, 5, lambda topic, words: [words], True,
            lambda event, **details: events.append((event, details)), {}))

    cfg, told, events = runs.config("run", *COMMON, *LOG), [], []
    with monkeypatch.context() as patch:
        write = MetricsWriter.write

        def fatal(self, step, scalars):
            if step == 8:
                raise Died
            write(self, step, scalars)

        patch.setattr(MetricsWriter, "write", fatal)
        with pytest.raises(Died):
            attempt(0, cfg)
    settle()
    assert attempt(1, cfg).step == 12
    [restored] = [details for event, details in events if event == "restored from" and details["source"] == "memory"]
    assert restored["step"] == 8
    assert "a snapshot of update 5, and 3 updates done again from their gradients (snapshot " in restored["how"]
    assert saved_bits(cfg, 12) == saved_bits(straight, 12)
    assert reproducible(lines(cfg)) == reproducible(lines(straight))
    assert told == []


@pytest.mark.one_pass
def test_without_it_numbers_are_others(runs: Runs, straight):
    cfg = runs.config("plain", *COMMON, "train.steps=4", "checkpoint.every=null")
    train(cfg, devices=DEVICES)
    losses = [[line["train/CE loss"] for line in lines(one)[1:5]] for one in (cfg, straight)]
    assert losses[0][0] == losses[1][0], "of the same weights"
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


# ---- one update


MOE = MoeConfig(experts=4, top_k=2, d_expert=16, scores="sigmoid", selection_bias=True, bias_update_rate=0.01)
MODELS = {"dense": {}, "experts": {"moe": MOE}}


def config(model="dense", determinism="none", **optim):
    cfg = tiny_config(tiny_model(n_layers=2, layer_pattern=("full",), **MODELS[model]), determinism=determinism)
    changed = dataclasses.replace(cfg.optim, **optim)
    return dataclasses.replace(cfg, optim=changed, checkpoint=dataclasses.replace(
        cfg.checkpoint, snapshots=True, gradient_log=True))


def batches(cfg):
    """The third is spoilt: its loss is not finite, and its update is skipped."""
    made = [random_batch(cfg, seed=seed) for seed in range(4)]
    made[2] = made[2].replace(weights_BT=np.where(made[2].weights_BT > 0, np.float32(np.inf), np.float32(0)))
    return made


class Recorded:
    """A snapshot before a few updates and the log of them, in a folder; and what they came to."""

    def __init__(self, root: Path, cfg, shape, **how):
        self.root, self.cfg, self.said, self.states, self.skipped = str(root), cfg, [], [], []
        snapshots = Snapshots(self.root, 0, "run", 0, None, self.said.append)
        memory, mesh = Memory(snapshots, lambda topic, words: [words], jax.device_get), mesh_of(shape)
        with jax.set_mesh(mesh):
            state, step = init_state(cfg), LoggedStep(cfg, abstract_state(cfg, mesh))
            placed = [place(batch, mesh) for batch in batches(cfg)]
            program = step.compile(placed[0])
            memory.logs(step)
            snapshots.take(0, state, {"record": 0})
            assert snapshots.wait()
            self.gradients = []
            for number, batch in enumerate(placed, 1):
                state, metrics = program(state, batch)
                memory.keep(number, metrics["gradient"], {"record": number})
                self.gradients.append(jax.tree.map(np.asarray, metrics["gradient"]))
                self.skipped.append(int(metrics["skipped"]))
                self.states.append(jax.tree.map(np.array, state))
            memory.wait()

    def restored(self, shape, cfg=None, newer_than=-1):
        cfg, mesh = cfg or self.cfg, mesh_of(shape)
        snapshots = Snapshots(self.root, 0, "run", 1, None, self.said.append)
        memory = Memory(snapshots, lambda topic, words: [words], jax.device_get)
        with jax.set_mesh(mesh):
            state = abstract_state(cfg, mesh)
            memory.logs(LoggedStep(cfg, state))
            return memory.restore(state, newer_than)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("dense"), config(), (2, 1, 1))


@pytest.fixture
def dense(made_once: Recorded) -> Recorded:
    made_once.said.clear()
    return made_once


def check_done_again(recorded, shape):
    """With the decision of the first time: the third update is skipped."""
    assert recorded.skipped == [0, 0, 1, 0]
    found, how = recorded.restored(shape)
    assert (found.id.step, found.extra, recorded.said) == (4, {"record": 4}, [])
    assert how.startswith("a snapshot of update 0, and 4 updates done again from their gradients (snapshot ")
    assert host_bits(found.state) == host_bits(recorded.states[3])
    assert host_bits(found.state) != host_bits(recorded.states[2])


def test_updates_are_done_again_bit_for_bit(dense):
    check_done_again(dense, (2, 1, 1))


@pytest.mark.one_pass
@pytest.mark.parametrize(("cfg", "shape"), [
    (config(kind="skip_step_muon"), (1, 4, 1)),
    (config(kind="adamw", moments_dtype="bfloat16"), (1, 2, 2)),
    (config("experts"), (2, 2, 1)),
], ids=["muon", "rounded moments", "experts"])
def test_every_optimizer_does_its_updates_again(tmp_path, cfg, shape):
    check_done_again(Recorded(tmp_path, cfg, shape), shape)


def test_with_any_mesh_they_have_the_same_bits_on_another_mesh(tmp_path):
    recorded = Recorded(tmp_path, config(determinism="any_mesh"), (2, 1, 1))
    for shape in ((1, 1, 1), (2, 4, 1)):
        found, _ = recorded.restored(shape)
        assert host_bits(found.state) == host_bits(recorded.states[3]), shape


def test_without_the_promise_another_mesh_has_the_same_up_to_rounding(dense):
    found, _ = dense.restored((1, 2, 2))
    assert found.id.step == 4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6, atol=1e-7), found.state,
                 dense.states[3])


def test_an_update_takes_in_just_what_is_logged(dense):
    """The gradient of the batch, rounded by hand, and the norm of the rounded one."""
    cfg, mesh, logged = config(), mesh_of((2, 1, 1)), dense.gradients[0]
    with jax.set_mesh(mesh):
        state, batch = init_state(cfg), place(batches(cfg)[0], mesh)
        counted = batch.weights_BT.sum()
        grads, losses, _ = jax.jit(lambda p, b, c: batch_gradient(cfg, p, b, c))(state.params, batch, counted)
        jax.tree.map(lambda g, one: np.testing.assert_allclose(  # half a unit of 8 bits, and float32's noise
            one.astype(np.float32), np.asarray(g), rtol=2**-8, atol=1e-7), grads, logged.grads)
        assert {one.dtype for one in jax.tree.leaves(logged.grads)} == {jnp.dtype(jnp.bfloat16)}
        rounded = jax.tree.map(lambda one: jnp.asarray(one.astype(np.float32)), logged.grads)
        norm = jax.jit(global_norm)(rounded)
        np.testing.assert_allclose(logged.norm, norm, rtol=1e-6)
        assert abs(float(jax.jit(global_norm)(grads)) / float(norm) - 1) > 1e-6, "of the one that was not rounded"
        updates, _ = jax.jit(optimizer_of(cfg).update)(rounded, state.optimizer, state.params,
                                                       loss=losses.cross_entropy, grad_norm=norm)
        for by_hand, after in zip(jax.tree.leaves(jax.tree.map(jnp.add, state.params, updates)),
                                  jax.tree.leaves(dense.states[0].params), strict=True):
            np.testing.assert_allclose(np.asarray(by_hand), after, rtol=1e-6, atol=1e-8)


def test_one_program_and_two_compute_the_same(dense):
    cfg, mesh = config(), mesh_of((2, 1, 1))
    with jax.set_mesh(mesh):
        state, _ = compile_train_step(cfg)(init_state(cfg), place(batches(cfg)[0], mesh))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6), state.params,
                     dense.states[0].params)


def test_without_a_log_nothing_is_rounded():
    mesh = mesh_of((2, 1, 1))
    with jax.set_mesh(mesh):
        for on, kind in ((True, jnp.bfloat16), (False, jnp.float32)):
            cfg = config()
            cfg = dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, gradient_log=on))
            given = abstract_state(cfg, mesh), place(random_batch(cfg), mesh)
            gradient, _ = jax.eval_shape(make_gradient(cfg, numbers_of(cfg)), *given)
            assert {leaf.dtype for leaf in jax.tree.leaves(gradient.grads)} == {jnp.dtype(kind)}
            assert ("bf16" in str(jax.make_jaxpr(make_train_step(cfg))(*given))) == on


def test_a_log_that_ends_before_a_checkpoint_is_not_used(dense):
    assert dense.restored((2, 1, 1), newer_than=5) is None
    assert dense.restored((2, 1, 1), newer_than=4)[0].id.step == 4
    [third] = Path(dense.root).glob("worker_0/*_3.gradient")
    flip_bit(str(third), 0.5, 1)
    assert dense.restored((2, 1, 1), newer_than=3) is None
    assert dense.said[-1] == "what memory holds ends at update 2; the checkpoint of update 3 is taken"
    assert dense.restored((2, 1, 1), newer_than=2)[0].id.step == 2
    flip_bit(str(third), 0.5, 1)
    assert dense.restored((2, 1, 1), newer_than=3)[0].id.step == 4, "as it was"
    assert dense.restored((2, 1, 1), config(lr=5e-3))[0].id.step == 0, "of another learning rate"
    assert "made for another optimizer or schedule" in dense.said[-1]


def test_an_entry_takes_two_bytes_a_weight_and_a_snapshot_twelve(dense):
    """What docs/reliability.md shows of them."""
    weights = count_params(dense.cfg.model)
    [entry], [slot] = (Path(dense.root).glob(f"worker_0/*{ending}") for ending in ("_4.gradient", ".slot"))
    sizes = {kind: sum(block.length for block in read_slot(str(path)).blocks)
             for kind, path in (("entry", entry), ("snapshot", slot))}
    assert sizes["entry"] == 2 * weights + 2 * 4, "loss and norm beside it"
    assert 12 * weights < sizes["snapshot"] < 12 * weights + 2000, "with the windows of the skip rule"
    page = Path(ROOT, "docs", "reliability.md").read_text()
    assert f"| {sizes['snapshot']:,} / K + {sizes['entry']:,} |" in page
    assert f"{weights:,} weights" in page


# ---- what is refused, and what is told


def test_it_needs_snapshots(runs: Runs):
    with pytest.raises(ConfigError, match=r"checkpoint\.snapshots is false; set checkpoint\.snapshots to true"):
        runs.config("run", "checkpoint.gradient_log=true")


def test_it_is_noted_when_a_run_goes_on_with_or_without_it(runs: Runs):
    notes = []
    before = runs.config("run", "checkpoint.snapshots=true")
    check_same_run(runs.config("run", *LOG), to_yaml(before), 5, notes.append)
    assert notes == ["checkpoint.gradient_log changes from False to True after update 5"]


def test_a_plan_says_that_it_reads_one_program():
    with pytest.raises(PlanError, match=r"checkpoint\.gradient_log=false"):
        compile_program(config(), jax.devices()[:1])


def test_other_settings_make_another_update():
    cfg = config()
    assert made_of(cfg) == made_of(dataclasses.replace(cfg, seed=7))
    for other in (config(lr=2e-2), config(betas=(0.9, 0.99)), config("experts"), config(determinism="any_mesh"),
                  dataclasses.replace(cfg, schedule=dataclasses.replace(cfg.schedule, warmup_steps=3)),
                  dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, steps=11))):
        assert made_of(other) != made_of(cfg)
