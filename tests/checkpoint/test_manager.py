"""Saving and restoring: every bit comes back, on any mesh; what does not fit or cannot be written is named."""

import dataclasses
import datetime
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxtext.checkpoint import manager, manifest
from maxtext.checkpoint.integrity import tree_fingerprints
from maxtext.checkpoint.manager import CheckpointError, Checkpoints
from tests.checkpoint.states import P, abstract, child_environment, config, found, host_bits, make_mesh, make_state

MESHES = [(8, 1), (4, 2), (2, 2), (2, 1), (1, 1)]
EXTRA = {"data": {"epoch": 2, "next": 17}, "rng": [1, 2], "note": "é", "seconds": 0.1}


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return make_mesh(8)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_bit_comes_back(tmp_path: Path, mesh: jax.sharding.Mesh, asynchronous: bool):
    state = make_state(mesh)
    checkpoints = Checkpoints(str(tmp_path / "a" / "b"), config(asynchronous=asynchronous), config_text="lr: 1\n# é")
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.restore(abstract(mesh))) == ([], None, None)
    checkpoints.save(100, state, EXTRA)
    if asynchronous:
        checkpoints.wait()
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.failure) == ([100], 100, None)
    checkpoints.close()

    again = Checkpoints(str(tmp_path / "a" / "b"), config())
    restored = found(again.restore(abstract(mesh)))
    assert (restored.step, restored.extra, restored.config_text) == (100, EXTRA, "lr: 1\n# é")
    assert (again.read_extra(100), again.config_text(100)) == (EXTRA, "lr: 1\n# é")
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert host_bits(restored.state) == host_bits(state)
    assert type(restored.state) is type(state)
    again.close()


@pytest.fixture(scope="module")
def saved_on_8(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("saved"))
    checkpoints = Checkpoints(directory, config(asynchronous=False))
    checkpoints.save(3, make_state(make_mesh(8)), {})
    checkpoints.close()
    return directory


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (1, 1), (2, 1), (2, 2), (4, 2)])
def test_restored_on_another_mesh(saved_on_8: str, fsdp: int, tensor: int):
    mesh = make_mesh(fsdp, tensor)
    checkpoints = Checkpoints(saved_on_8, config(), writer=False)
    with jax.set_mesh(mesh):
        restored = found(checkpoints.restore(abstract(mesh)))
    assert host_bits(restored.state) == host_bits(make_state(make_mesh(8)))
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(abstract(mesh)), jax.tree.leaves(restored.state),
                                 strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, want.ndim), path
        assert jax.typeof(got).sharding.spec == jax.typeof(jax.device_put(got, want.sharding)).sharding.spec, path
        assert len(got.sharding.device_set) == fsdp * tensor, path
    checkpoints.close()


@pytest.mark.parametrize("saver", MESHES)
def test_fingerprints_are_those_that_were_saved_on_every_mesh(tmp_path: Path, saver: tuple[int, int]):
    """Of every ordered pair; of the restored arrays themselves, not as the manager has compared them."""
    saved = make_state(make_mesh(*saver))
    checkpoints = Checkpoints(str(tmp_path), config(asynchronous=False))
    checkpoints.save(1, saved, {})
    prints = tree_fingerprints(saved)
    assert len(prints) == 19
    for reader in MESHES:
        restored = found(checkpoints.restore(abstract(make_mesh(*reader))))
        assert tree_fingerprints(restored.state) == prints, reader
    checkpoints.close()


def test_small_dtypes_empty_arrays_and_many_keys(tmp_path: Path, mesh: jax.sharding.Mesh):
    keys = jax.device_put(jax.random.split(jax.random.key(3, impl="rbg"), 8), NamedSharding(mesh, P("fsdp")))
    state = {
        "bf16": jnp.arange(8, dtype=jnp.bfloat16),
        "f8": jnp.arange(8, dtype=jnp.float8_e4m3fn),
        "u8": jnp.arange(8, dtype=jnp.uint8),
        "none": jnp.zeros((0, 4)),
        "keys": keys,
        "absent": None,
    }
    checkpoints = Checkpoints(str(tmp_path), config(asynchronous=False))
    checkpoints.save(1, state, {})
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    restored = found(checkpoints.restore(target)).state
    assert host_bits(restored) == host_bits(state)
    assert restored["keys"].sharding == keys.sharding
    assert jax.random.key_impl(restored["keys"]) == jax.random.key_impl(keys)
    assert restored["absent"] is None
    checkpoints.close()


def test_a_leaf_without_a_sharding_goes_to_the_first_device(saved_on_8: str):
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract(make_mesh(8)))
    checkpoints = Checkpoints(saved_on_8, config(), writer=False)
    state = found(checkpoints.restore(target)).state
    assert {device for leaf in jax.tree.leaves(state) for device in leaf.devices()} == {jax.devices()[0]}
    assert host_bits(state) == host_bits(make_state(make_mesh(8)))
    checkpoints.close()


@pytest.mark.parametrize("devices", [1, 8])
def test_arrays_may_be_donated_right_after_save(tmp_path: Path, devices: int):
    """The background still reads the arrays then: a save that did not hold them would write what the step wrote."""
    mesh = make_mesh(devices)
    add = jax.jit(lambda x: x + 1)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)

    def arrays(seed: int) -> dict[str, jax.Array]:
        # Made by a program, as a training step does: memory that numpy owns could not be donated.
        rng = np.random.default_rng(seed)
        return {name: jax.block_until_ready(add(jax.device_put(rng.standard_normal((1024, 512), np.float32),
                                                               NamedSharding(mesh, spec))))
                for name, spec in (("split", P("fsdp")), ("replicated", P()))}

    def addresses(tree: dict[str, jax.Array]) -> set[int]:
        return {shard.data.unsafe_buffer_pointer() for leaf in tree.values() for shard in leaf.addressable_shards}

    unsaved = arrays(0)
    before = addresses(unsaved)
    assert addresses(jax.block_until_ready(overwrite(unsaved))) == before, "donation reuses memory: the test has teeth"

    checkpoints = Checkpoints(str(tmp_path), config())
    for step in range(4):
        state = arrays(step)
        expected = host_bits(arrays(step))
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        checkpoints.save(step, state, {})
        jax.block_until_ready(overwrite(state))
        checkpoints.wait()
        assert host_bits(found(checkpoints.restore(target, step)).state) == expected
    checkpoints.close()


def test_extra_is_taken_when_save_is_called(tmp_path: Path):
    checkpoints = Checkpoints(str(tmp_path), config())
    position = {"next": 1, "shape": (2, 3)}
    checkpoints.save(1, {"x": jnp.ones(3)}, position)
    position["next"] = 2
    checkpoints.wait()
    assert checkpoints.read_extra(1) == {"next": 1, "shape": [2, 3]}
    checkpoints.close()


@pytest.mark.parametrize(
    ("step", "state", "extra", "message"),
    [
        (1, {"x": np.ones(2)}, {}, "leaf x is a ndarray; a state is made of jax arrays alone"),
        (1, {"a": {"n": 3}}, {}, r"leaf a\.n is a int;"),
        (1, {}, {}, "the state has no arrays to save"),
        (1, {"x": jnp.ones(2, jnp.complex64)}, {}, "leaf x is complex64"),
        (1, {"x": jnp.ones(2)}, {"n": np.int64(3)}, "must be plain JSON: Object of type int64"),
        (1, {"x": jnp.ones(2)}, {"at": {3: "c"}}, "must be plain JSON: key 3 is a int, not a str"),
        (1, {"x": jnp.ones(2)}, [1], "must be plain JSON: it is a list, not a dict"),
        (-1, {"x": jnp.ones(2)}, {}, "a step is a whole number from 0 on, not -1"),
        (True, {"x": jnp.ones(2)}, {}, "a step is a whole number from 0 on, not True"),
    ],
)
def test_what_can_never_be_saved_is_refused_at_once(tmp_path: Path, step, state, extra, message: str):
    checkpoints = Checkpoints(str(tmp_path), config())
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(step, state, extra)
    checkpoints.save(2, {"x": jnp.ones(2)}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [2]
    checkpoints.close()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(None, None, [1, 2, 3, 4, 5, 6, 7]), (1, None, [7]), (2, 3, [3, 6, 7]), (3, 2, [2, 4, 5, 6, 7])],
)
def test_the_policy_keeps(tmp_path: Path, keep_last: int | None, keep_every: int | None, left: list[int]):
    checkpoints = Checkpoints(str(tmp_path), config(keep_last=keep_last, keep_every=keep_every, asynchronous=False))
    for step in range(1, 8):
        checkpoints.save(step, {"x": jnp.full(3, step)}, {})
    assert checkpoints.steps() == left
    assert sorted(os.listdir(tmp_path)) == [manifest.step_name(step) for step in left], "nothing else stays behind"
    checkpoints.close()


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    checkpoints = Checkpoints(str(tmp_path), config(asynchronous=False))
    for value in (1, 2, 3):
        checkpoints.save(5, {"x": jnp.full(3, value)}, {"value": value})
    restored = found(checkpoints.restore({"x": jax.ShapeDtypeStruct((3,), jnp.int32)}))
    assert (restored.state["x"].tolist(), restored.extra) == ([3, 3, 3], {"value": 3})
    assert sorted(os.listdir(tmp_path / "step_00000005")) == ["arrays-3", "manifest.json"], "no earlier attempt stays"
    checkpoints.close()


def test_saving_after_a_rewind_leaves_the_abandoned_branch(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpoints = Checkpoints(str(tmp_path), config(asynchronous=False, keep_last=2))
    for step in (10, 20, 30):
        checkpoints.save(step, {"x": jnp.full(3, step)}, {})
    target = {"x": jax.ShapeDtypeStruct((3,), jnp.int32)}
    assert found(checkpoints.restore(target, 20)).step == 20
    checkpoints.save(25, {"x": jnp.full(3, 25)}, {})
    assert checkpoints.steps() == [20, 25]
    assert found(checkpoints.restore(target)).state["x"].tolist() == [25, 25, 25]
    assert "step_00000030 was set aside as step_00000030.superseded-1" in caplog.text
    assert (tmp_path / "step_00000030.superseded-1").is_dir()
    checkpoints.close()


def test_a_missing_step_is_named(saved_on_8: str):
    checkpoints = Checkpoints(saved_on_8, config(), writer=False)
    with pytest.raises(CheckpointError, match=r"there is no .*step_00000004/manifest.json; good steps are \[3\]"):
        checkpoints.restore(abstract(make_mesh(8)), 4)
    with pytest.raises(CheckpointError, match=r"there is no step 4 in .*; good steps are \[3\]"):
        checkpoints.read_extra(4)
    checkpoints.close()


def test_leaves_that_do_not_fit_are_all_named_and_nothing_is_converted(saved_on_8: str):
    wanted = abstract(make_mesh(8))
    dtype = dataclasses.replace(wanted.optimizer, count=jax.ShapeDtypeStruct((), jnp.float32))
    embed = jax.ShapeDtypeStruct((64, 40), jnp.float32)
    tree = {"params": {"embedding": embed, "blocks": wanted.params.blocks}, "optimizer": dtype, "key": wanted.key}
    checkpoints = Checkpoints(saved_on_8, config(), writer=True)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(tree)
    text = str(caught.value)
    assert "step_00000003 does not fit this model and optimizer" in text
    assert "optimizer.count: the state wants dtype float32[], the checkpoint has int32[]" in text
    assert "params.embedding: the state wants float32[64,40], the checkpoint has no such leaf; the nearest is " in text
    assert "params.embed: the checkpoint has float32[64,32], the state has no such leaf" in text
    assert len(text.splitlines()) == 4
    shape = dataclasses.replace(wanted, params=dataclasses.replace(wanted.params, embed=embed))
    with pytest.raises(CheckpointError, match=re.escape(
            "params.embed: the state wants shape float32[64,40], the checkpoint has float32[64,32]")):
        checkpoints.restore(shape)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), wanted.params)
    with pytest.raises(CheckpointError, match=re.escape(
            "params.embed: the state wants dtype bfloat16[64,32], the checkpoint has float32[64,32]")):
        checkpoints.restore(dataclasses.replace(wanted, params=half))
    assert checkpoints.steps() == [3], "a state that does not fit is no reason to set a checkpoint aside"
    checkpoints.close()


def test_a_failed_save_is_reported_and_earlier_steps_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpoints = Checkpoints(str(tmp_path), config(keep_last=1))
    state = {"x": jnp.arange(3)}
    checkpoints.save(1, state, {})
    checkpoints.wait()
    (tmp_path / "step_00000002").write_text("in the way")
    checkpoints.save(2, state, {})
    with pytest.raises(CheckpointError, match=r"step 2 was not saved to .*step_00000002: .*File exists"):
        checkpoints.wait()
    assert "step 2 was not saved" in str(checkpoints.failure)
    assert [r.levelno for r in caplog.records if "step 2 was not saved" in r.message] == [logging.ERROR]
    assert checkpoints.steps() == [1]
    assert found(checkpoints.restore({"x": jax.ShapeDtypeStruct((3,), jnp.int32)})).step == 1
    checkpoints.save(3, state, {})
    checkpoints.wait()
    assert (checkpoints.failure, checkpoints.steps()) == (None, [3])
    checkpoints.close()


FULL_DISK = """
import resource, sys, jax.numpy as jnp
from maxtext.checkpoint.manager import Checkpoints, CheckpointError
from tests.checkpoint.states import config
checkpoints = Checkpoints(sys.argv[1], config(keep_last=1))
state = {"x": jnp.arange(300_000)}
checkpoints.save(1, state, {})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # what a write meets on a full disk
checkpoints.save(2, state, {})
try:
    checkpoints.wait()
except CheckpointError as error:
    print("told:", error)
print("steps", checkpoints.steps())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(3, state, {})
checkpoints.wait()
print("steps", checkpoints.steps())
checkpoints.close()
"""


def test_a_disk_that_is_full_and_then_is_not(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], env=child_environment(), check=True,
                          capture_output=True, text=True, timeout=120)
    told, *steps = [line for line in done.stdout.splitlines() if line.startswith(("told", "steps"))]
    assert re.search(r"step 2 was not saved to .*step_00000002: .*(File too large|EFBIG)", told), told
    assert "Traceback" not in done.stderr, "one message says it, not the threads of Orbax"
    assert done.stderr.count("was not saved to") == 1
    assert steps == ["steps [1]", "steps [3]"]
    assert os.listdir(tmp_path) == ["step_00000003"], "the failed attempt gave its room back"


CRASH = """
import contextlib, sys, jax.numpy as jnp
from maxtext.checkpoint.manager import Checkpoints
from tests.checkpoint.states import config
checkpoints = Checkpoints(sys.argv[1], config())
checkpoints.save(1, {"x": jnp.arange(1_000_000)}, {})
checkpoints.wait()
with contextlib.closing(checkpoints) if sys.argv[2] == "closed" else contextlib.nullcontext():
    checkpoints.save(2, {"x": jnp.arange(1_000_000)}, {})
    raise RuntimeError("the step failed")
"""


@pytest.mark.parametrize("how", ["closed", "left"])
def test_a_program_that_fails_while_a_save_is_under_way(tmp_path: Path, how: str):
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), how], env=child_environment(), check=False,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: the step failed" in done.stderr
    checkpoints = Checkpoints(str(tmp_path), config())
    step = found(checkpoints.restore({"x": jax.ShapeDtypeStruct((1_000_000,), jnp.int32)})).step
    if how == "closed" or sys.version_info < (3, 12):
        assert step == 2
    elif step == 1:  # no thread can start once the main one has ended
        assert "step 2 was not saved to" in done.stderr, "what is lost is said"
        assert os.listdir(tmp_path) == ["step_00000001"]
    checkpoints.close()


def test_a_directory_that_cannot_be_used_is_one_clear_message(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make the checkpoint directory .*/file/x: Not a directory; set"):
        Checkpoints(str(tmp_path / "file" / "x"), config())
    with pytest.raises(CheckpointError, match="need a local or mounted path, not gs://bucket/x"):
        Checkpoints("gs://bucket/x", config())


def test_a_read_only_directory_is_refused_at_the_start():
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as directory:  # not tmp_path, into which only its owner may look
        os.chmod(directory, 0o555)
        try:
            if user == 0:  # root may write everywhere: be nobody for a moment
                os.seteuid(65534)
            with pytest.raises(CheckpointError, match=f"{directory} is not writable; set output_dir"):
                Checkpoints(directory, config())
            with pytest.raises(CheckpointError, match=f"cannot make the .*{directory}/x: Permission denied; set"):
                Checkpoints(f"{directory}/x", config())
        finally:
            os.seteuid(user)
            os.chmod(directory, 0o755)


def test_a_reader_changes_nothing(tmp_path: Path):
    checkpoints = Checkpoints(str(tmp_path / "none"), config(), writer=False)
    assert checkpoints.restore({"x": jax.ShapeDtypeStruct((3,), jnp.int32)}) is None
    assert not (tmp_path / "none").exists()
    with pytest.raises(CheckpointError, match="opened for reading"):
        checkpoints.save(1, {"x": jnp.ones(3)}, {})
    checkpoints.close()


def test_nan_is_saved_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpoints = Checkpoints(str(tmp_path), config(asynchronous=False))
    checkpoints.save(1, {"good": jnp.ones(3), "bad": jnp.array([1, jnp.nan, jnp.inf])}, {"loss": float("nan")})
    assert "step 1 holds NaN or infinite values in bad" in caplog.text
    assert manifest.read(str(tmp_path / "step_00000001")).leaves["bad"].nonfinite == 2
    assert np.isnan(checkpoints.read_extra(1)["loss"])
    checkpoints.close()


def test_the_manifest_says_who_wrote_it(saved_on_8: str):
    document = json.loads((Path(saved_on_8) / "step_00000003" / "manifest.json").read_text())["body"]
    assert set(document["versions"]) == {"maxtext", "python", "jax", "jaxlib", "numpy", "orbax-checkpoint"}
    assert document["versions"]["jax"] == jax.__version__
    origin = document["provenance"]
    assert (origin["mesh"], origin["devices"], origin["processes"]) == ({"fsdp": 8}, "8 x cpu", 1)
    assert origin["flags"] == {"XLA_FLAGS": os.environ["XLA_FLAGS"]}
    assert origin["config_sha256"] == hashlib.sha256(b"").hexdigest()
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(document["saved_at"])
    assert datetime.timedelta() <= age + datetime.timedelta(seconds=1) < datetime.timedelta(hours=1)


def test_nothing_is_deleted_before_the_new_step_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk that says it has written and has not: the older step must outlive that."""
    checkpoints = Checkpoints(str(tmp_path), config(keep_last=1, asynchronous=False))
    checkpoints.save(1, {"x": jnp.arange(5000)}, {})
    commit = manifest.commit

    def rot(step_dir: str, token: int = 0) -> None:
        commit(step_dir, token)
        largest = max((path for path in Path(step_dir).rglob("*") if path.is_file()), key=lambda x: x.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "commit", rot)
        with pytest.raises(CheckpointError, match=r"step 2 was not saved .*: read back right after it was written, .* "
                           r"has changed since .*; set aside as step_00000002.bad-1, and no earlier"):
            checkpoints.save(2, {"x": jnp.arange(5000)}, {})
    assert (checkpoints.steps(), checkpoints.stale_seconds > 0) == ([1], True)
    checkpoints.save(3, {"x": jnp.arange(5000)}, {})
    assert (checkpoints.steps(), checkpoints.stale_seconds) == ([3], 0)
    checkpoints.close()


def test_a_step_with_nan_where_there_must_be_none_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    checkpoints = Checkpoints(str(tmp_path), config(asynchronous=False))
    checkpoints.save(1, {"w": jnp.ones(3), "window": jnp.array([jnp.inf])}, {})
    checkpoints.save(2, {"w": jnp.array([1, jnp.nan, 1]), "window": jnp.zeros(1)}, {})
    target = {"w": jax.ShapeDtypeStruct((3,), jnp.float32), "window": jax.ShapeDtypeStruct((1,), jnp.float32)}
    assert found(checkpoints.restore(target, finite=lambda name: name == "w")).step == 1
    assert "step_00000002: NaN or infinite values in w" in caplog.text
    assert found(checkpoints.restore(target)).step == 2
    checkpoints.close()


def test_failed_saves_are_tried_again_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = Checkpoints(str(tmp_path), config())
    now = [100.0]
    monkeypatch.setattr(manager.time, "monotonic", lambda: now[0])
    (tmp_path / "step_00000001").write_text("in the way")
    due = []
    for _ in range(3):
        checkpoints.save(1, {"x": jnp.ones(3)}, {})
        for pause in (4.9, 0.2, 5, 10):
            now[0] += pause
            due.append(checkpoints.retry_due)
    assert due == [False, True, True, True, False, False, True, True, False, False, False, True], "5, 10, 20 seconds"
    os.remove(tmp_path / "step_00000001")
    checkpoints.save(1, {"x": jnp.ones(3)}, {})
    checkpoints.wait()
    assert (checkpoints.retry_due, checkpoints.stale_seconds) == (False, 0)
    checkpoints.close()
