"""Bits of a run: with determinism any_mesh they are the same on each mesh of data and fsdp, and when it changes."""

import dataclasses
import functools
import os

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxtext.checkpoint.integrity import tree_fingerprints
from maxtext.checkpoint.manager import Restored
from maxtext.checkpoint.provenance import versions
from maxtext.config.schema import Config
from maxtext.parallel.fixed_sum import sum_of_parts, sum_of_vector, sum_over
from maxtext.train.conditions import check_conditions, conditions
from maxtext.train.resume import ResumeError
from maxtext.train.state import abstract_state, init_state
from maxtext.train.step import compile_train_step
from tests.tiny import mesh_of, place, random_batch, tiny_config, tiny_model

ONE, DATA, FSDP, BOTH = (1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 4, 1)
COUNTS = [1, 3, 15, 15, 10, 12, 7, 5]  # real targets of each row


def config(accumulation=1, dtype="float32", **model) -> Config:
    model = {"n_layers": 2, "layer_pattern": ("full",), "d_model": 16, "n_heads": 4, "n_kv_heads": 2} | model
    return tiny_config(tiny_model(**model), determinism="any_mesh", gradient_accumulation_steps=accumulation,
                       compute_dtype=dtype)


def batch_of(cfg, step):
    """Rows of several documents, of different lengths."""
    batch = random_batch(cfg, seed=step, counts=COUNTS)
    ends = np.random.default_rng(step).random(batch.tokens_BT.shape) < 0.2
    return batch.replace(segments_BT=np.cumsum(ends, axis=1, dtype=np.int32))


def step_on(cfg, shape):
    mesh = mesh_of(shape)
    with jax.set_mesh(mesh):
        return compile_train_step(cfg).lower(abstract_state(cfg, mesh), place(batch_of(cfg, 0), mesh)).compile()


class Runs:
    """Short runs of one config on any mesh; it compiles once for each."""

    def __init__(self, **how):
        self.cfg, self.step_on = config(**how), functools.cache(lambda shape: step_on(self.cfg, shape))
        with jax.set_mesh(mesh_of(ONE)):
            self.first = jax.tree.map(np.asarray, init_state(self.cfg))

    def trained(self, *shapes):
        """Losses and norms of one update on each of these meshes in turn; fingerprints of the whole state after."""
        state, metrics, prints = self.first, [], {}
        for step, shape in enumerate(shapes):
            mesh = mesh_of(shape)
            with jax.set_mesh(mesh):
                placed = jax.tree.map(lambda x, want: jax.device_put(np.array(x), want.sharding), state,
                                      abstract_state(self.cfg, mesh))
                state, found = self.step_on(shape)(placed, place(batch_of(self.cfg, step), mesh))
                metrics.append({name: found[name].item() for name in ("cross_entropy", "squared_log_z", "grad_norm")})
                prints = tree_fingerprints(state)
        assert len(prints) > 30  # weights, both moments, windows, counts
        return metrics, prints


def differences(run, other):
    """Names of all metrics and arrays in which two runs differ."""
    (metrics, prints), (other_metrics, other_prints) = run, other
    assert prints.keys() == other_prints.keys()
    return [name for one, two in zip(metrics, other_metrics, strict=True) for name in one if one[name] != two[name]] + [
        name for name, value in prints.items() if value != other_prints[name]]


@pytest.fixture(scope="module")
def runs():
    return Runs()


@pytest.fixture(scope="module")
def undisturbed(runs):
    return runs.trained(DATA, DATA, DATA)


@pytest.fixture(scope="module")
def bfloat16():
    runs = Runs(dtype="bfloat16")
    return runs, runs.trained(DATA, DATA)


@pytest.mark.parametrize("shape", [
    ONE, (2, 1, 1), FSDP, BOTH,
    *(pytest.param(shape, marks=pytest.mark.one_pass) for shape in ((4, 1, 1), (1, 4, 1), (1, 2, 1)))])
def test_a_mesh_changes_no_bit(runs, undisturbed, shape):
    assert differences(runs.trained(shape, shape, shape), undisturbed) == []


@pytest.mark.parametrize("shapes", [(DATA, (2, 1, 1), DATA), (FSDP, ONE, BOTH)])
def test_a_change_of_mesh_in_the_middle_changes_no_bit(runs, undisturbed, shapes):
    assert differences(runs.trained(*shapes), undisturbed) == []


@pytest.mark.parametrize("shape", [ONE, BOTH])
def test_nor_in_bfloat16(bfloat16, shape):
    runs, undisturbed = bfloat16
    assert differences(runs.trained(shape, shape), undisturbed) == []


def test_micro_batches_change_no_bit(undisturbed):
    assert differences(Runs(accumulation=4).trained(*[(2, 1, 1)] * 3), undisturbed) == []


@pytest.mark.one_pass
def test_other_arithmetic_changes_bits(runs, undisturbed):
    """So the comparisons above can fail: without a fixed order, meshes differ from each other."""
    cfg = dataclasses.replace(runs.cfg, train=dataclasses.replace(runs.cfg.train, determinism="none"))
    plain = Runs()
    plain.cfg = cfg
    one, data = plain.trained(ONE, ONE, ONE), plain.trained(DATA, DATA, DATA)
    assert {"grad_norm", "params.embed"} <= set(differences(one, data))
    assert {"grad_norm", "params.embed"} <= set(differences(one, undisturbed))


# The order of summation


def tree_of(parts):
    """What the sum of parts must be, by numpy."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


@pytest.mark.parametrize(("shape", "scattered"), [(DATA, None), (FSDP, None), (BOTH, None), (FSDP, 0), (BOTH, 1)])
def test_devices_add_in_pairs_of_neighbours(shape, scattered):
    parts = np.random.default_rng(0).standard_normal((8, 16, 24, 3)).astype(np.float32)
    parts *= np.float32(10) ** np.random.default_rng(1).integers(-3, 4, parts.shape)
    assert (tree_of(parts) != parts.sum(0)).any()  # the order matters
    how = None if scattered is None else ("fsdp", scattered)
    out = P(*(None,) * (scattered or 0), None if scattered is None else "fsdp")
    with jax.set_mesh(mesh_of(shape)):
        add = jax.shard_map(lambda x: sum_over(x[0], ("data", "fsdp"), how), in_specs=P(("data", "fsdp")),
                            out_specs=out, check_vma=False)
        got = jax.jit(add)(jax.device_put(parts, P(("data", "fsdp"))))
    np.testing.assert_array_equal(got, tree_of(parts))


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_device_adds_in_pairs_of_neighbours(count):
    parts = np.random.default_rng(0).standard_normal((count, 50)).astype(np.float32)
    parts[:, 0] = -0.0  # a sum that starts from +0 loses the sign
    got = jax.jit(lambda x: sum_of_parts(lambda index: x[index], count))(parts)
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), tree_of(parts).view(np.int32))
    assert count == 1 or np.asarray(sum_of_vector(parts)).tolist() == tree_of(parts).tolist()


def test_initial_weights_have_the_same_bits():
    def prints(shape):
        with jax.set_mesh(mesh_of(shape)):
            return tree_fingerprints(init_state(config()))

    assert prints(ONE) == prints(FSDP) == prints(BOTH)


# What bits depend on besides


def restored(cfg, changes=()):
    found = conditions(cfg, mesh_of(DATA)) | dict(changes)
    return Restored(3, None, {"conditions": found}, "", versions())


def test_a_resume_under_the_same_conditions_is_taken():
    for kind in ("none", "same_mesh", "any_mesh"):
        cfg = dataclasses.replace(config(), train=dataclasses.replace(config().train, determinism=kind))
        check_conditions(cfg, mesh_of(DATA), restored(cfg))
    check_conditions(cfg, mesh_of(ONE), restored(cfg))  # of any mesh


@pytest.mark.parametrize(("kind", "change", "message"), [
    ("same_mesh", {"mesh": "data 4"}, "mesh: 'data 4' when update 3 was saved, 'data 8 x pipeline 1 x"),
    ("any_mesh", {"virtual shards": "4"}, "virtual shards: '4' when update 3 was saved, '8' now"),
    ("any_mesh", {"device": "another"}, "device: 'another' when update 3 was saved"),
    ("any_mesh", {"XLA_FLAGS": "--xla_other"}, "XLA_FLAGS: '--xla_other' when update 3 was saved"),
])
def test_a_resume_under_others_is_refused(kind, change, message):
    cfg = dataclasses.replace(config(), train=dataclasses.replace(config().train, determinism=kind))
    with pytest.raises(ResumeError) as error:
        check_conditions(cfg, mesh_of(DATA), restored(cfg, change))
    assert message in str(error.value)
    assert "or write train.determinism: none" in str(error.value)
    none = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, determinism="none"))
    check_conditions(none, mesh_of(DATA), restored(cfg, change))


def test_flags_that_decide_no_bit_are_no_condition(monkeypatch):
    """The number of virtual devices, and what `maxtext launch` adds for its workers."""
    saved = restored(config())
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("count=8", "count=2") + (
        " --xla_cpu_collective_call_terminate_timeout_seconds=9 --xla_cpu_collective_timeout_seconds=9"))
    check_conditions(config(), mesh_of(DATA), saved)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_other")
    with pytest.raises(ResumeError, match="--xla_other"):
        check_conditions(config(), mesh_of(DATA), saved)


def test_other_versions_are_other_conditions():
    cfg = config()
    old = dataclasses.replace(restored(cfg), versions=versions() | {"jax": "0.1"})
    with pytest.raises(ResumeError, match=r"saved with jax 0\.1, now"):
        check_conditions(cfg, mesh_of(DATA), old)
