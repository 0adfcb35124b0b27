"""States that are saved piece by piece are restored, verified and refused like any other."""

import glob
import os

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.checkpoint import arrays, inspect, integrity, streamed
from maxtext.checkpoint.manager import CheckpointError, Checkpoints
from maxtext.checkpoint.streamed import StreamedLeaf
from maxtext.config.schema import CheckpointConfig
from tests.tiny import mesh_of

RNG = np.random.default_rng(0)
STACKED, PLAIN, SCALAR = (RNG.standard_normal((3, 8, 6), np.float32), RNG.standard_normal((16, 5), np.float32),
                          np.asarray(7, np.int32))
LEAVES = {"params.stacked": StreamedLeaf((3, 8, 6), "float32", by_row=True),
          "params.plain": StreamedLeaf((16, 5), "float32"), "step": StreamedLeaf((), "int32")}
PIECES = [*(("params.stacked", row, STACKED[row]) for row in (2, 0, 1)), ("params.plain", None, PLAIN),
          ("step", None, SCALAR)]


def abstract(mesh=None):
    def leaf(shape, dtype, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec)) if mesh else None
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return {"params": {"stacked": leaf((3, 8, 6), "float32", None, "fsdp"), "plain": leaf((16, 5), "float32", "data")},
            "step": leaf((), "int32")}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 64)  # so that there are chunks at all
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(), config_text="a: 1")
    checkpoints.save_streamed(3, LEAVES, PIECES, {"x": 1})
    return checkpoints


@pytest.mark.parametrize("shape", [None, (8, 1, 1), (2, 4, 1)])
def test_restored_on_any_mesh(saved, shape):
    restored = saved.restore(abstract(mesh_of(shape) if shape else None))
    assert (restored.step, restored.extra, restored.config_text) == (3, {"x": 1}, "a: 1")
    np.testing.assert_array_equal(restored.state["params"]["stacked"], STACKED)
    np.testing.assert_array_equal(restored.state["params"]["plain"], PLAIN)
    assert int(restored.state["step"]) == 7


def test_one_leaf_and_the_verb_verify_read_it_too(saved, tmp_path, capsys):
    assert inspect.run(["verify", str(tmp_path)]) == 0
    assert "3 leaves" in capsys.readouterr().out
    np.testing.assert_array_equal(arrays.read_leaf(str(tmp_path / "step_00000003" / "arrays-1"), "params.plain"), PLAIN)


def test_a_flipped_bit_is_found(saved, tmp_path):
    chunk = next(p for p in glob.glob(f"{tmp_path}/step_00000003/arrays-1/params.stacked/c/**", recursive=True)
                 if os.path.isfile(p))
    with open(chunk, "r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    with pytest.raises(CheckpointError, match="has changed since it was saved"):
        saved.restore(abstract(), step=3)


def test_pieces_that_stop_early_leave_no_step(tmp_path):
    def cut_off():
        yield from PIECES[:2]
        raise ValueError("the source ends here")

    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig())
    with pytest.raises(ValueError, match=r"^the source ends here$"):
        checkpoints.save_streamed(3, LEAVES, cut_off(), {})
    assert checkpoints.steps() == []
    assert not glob.glob(f"{tmp_path}/step_00000003/arrays-*")
    with pytest.raises(CheckpointError, match=r"not complete.*step"):
        checkpoints.save_streamed(3, LEAVES, PIECES[:-1], {})
    assert checkpoints.steps() == []


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "float64"])
@pytest.mark.parametrize("word", [2**32, 20, 60])
def test_sums_of_parts_add_up_to_the_fingerprint(dtype, word):
    whole = (RNG.standard_normal((3, 4, 5)) * 100).astype(dtype)
    total = [integrity.partial_sums_numpy(whole[row], whole.shape, row * 20, word) for row in range(3)]
    first, second, bad = (sum(column) % 2**32 for column in zip(*total, strict=True))
    if dtype != "float64":
        assert (first, second, bad) == tuple(map(int, integrity.leaf_sums(whole, word)))
    assert (first, second) == integrity.fingerprint_numpy(whole, word)


def test_values_that_are_not_finite_are_counted():
    x = np.array([1, np.nan, np.inf, -np.inf], np.float32)
    assert integrity.partial_sums_numpy(x, (4,), 0)[2] == 3
