"""The iterator: the same batches on any hosts, devices, workers and after any restart; checks; fingerprints."""

import gc
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxtext.config.schema import InstanceFilterConfig
from maxtext.data import DataError
from maxtext.data.batch import make_batch
from maxtext.data.global_batches import local_rows, rows_of
from maxtext.data.pipeline import fingerprint, fingerprint_numpy, make_batches
from maxtext.data.reader import RowRules, StepSource
from maxtext.data.tokens import resolve
from maxtext.train.console import host_memory_gib

ORACLE = Path(__file__).resolve().parents[1] / "oracles" / "data_loader"
EXPECTED = json.loads((ORACLE / "expected.json").read_text())
EPOCH = 14  # batches in one epoch of the data below


@pytest.fixture
def files(write_tokens):
    """116 instances of 16 tokens, nearly every one with its own tokens."""
    b = np.random.default_rng(0).integers(2, 1000, 16 * 86 + 9)
    b[::37] = 0  # documents
    b[400:900] = 77  # what an instance filter rejects
    return [write_tokens("a.npy", np.arange(2, 2 + 16 * 30 + 5)), write_tokens("b.npy", b)]


@pytest.fixture
def open_batches(make_config, files):
    """Returns f(sharding, **changes) -> Batches; all are closed at the end."""
    opened = []

    def make(sharding=None, batch=8, steps=100, **data):
        cfg = make_config({"x": files}, batch=batch, steps=steps, **data)
        opened.append(make_batches(cfg, resolve(cfg), sharding))
        return opened[-1]

    yield make
    for batches in opened:
        batches.close()


def mesh_sharding(*shape, spec=("data", "fsdp"), kind=AxisType.Explicit):
    names = ("data", "fsdp", "tensor")
    devices = np.array(jax.devices()[:int(np.prod(shape))]).reshape(shape)
    return NamedSharding(jax.sharding.Mesh(devices, names, axis_types=(kind,) * 3), PartitionSpec(spec))


def take(batches, count):
    return [np.asarray(next(batches).tokens_BT) for _ in range(count)]


def test_batches_are_rows_of_the_order_and_epochs_roll_over(open_batches, files):
    a, b = (np.fromfile(path, np.uint16) for path in files)
    instances = np.concatenate([a[:30 * 16].reshape(30, 16), b[:86 * 16].reshape(86, 16)])
    batches = open_batches()
    got = take(batches, 2 * EPOCH + 3)
    for step, tokens in enumerate(got, 1):
        assert np.array_equal(tokens, instances[batches.instance_ids(step)]), step
    assert batches.epoch(EPOCH) == 1
    assert batches.epoch(EPOCH + 1) == 2
    assert not np.array_equal(got[0], got[EPOCH])


def test_reference_batches(make_config):
    run = EXPECTED["runs"][0]
    cfg = make_config({"x": [str(ORACLE / name) for name in EXPECTED["files"]]}, batch=8, sequence_length=64, seed=0,
                      **{key: EXPECTED[key] for key in ("vocab_size", "eos_id", "pad_id")})
    batches = make_batches(cfg, resolve(cfg))
    where = run["global_order"]["1"].index(0)
    tokens = take(batches, where // 8 + 1)[-1]
    batches.close()
    assert tokens[where % 8].tolist() == run["instance0_tokens"]


def test_targets_and_weights(open_batches):
    batch = next(open_batches())
    assert (batch.tokens_BT.dtype, batch.targets_BT.dtype, batch.weights_BT.dtype) == (np.int32, np.int32, np.float32)
    assert np.array_equal(batch.targets_BT[:, :-1], batch.tokens_BT[:, 1:])
    assert not batch.targets_BT[:, -1].any()
    assert batch.weights_BT.sum(axis=1).tolist() == [15] * 8
    assert not batch.weights_BT[:, -1].any()


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1)])
def test_sharded_arrays_hold_the_same_batches(open_batches, shape, kind):
    sharding = mesh_sharding(*shape, kind=kind)
    plain, sharded = open_batches(), open_batches(sharding)
    for _ in range(3):
        want, got = next(plain), next(sharded)
        for name in ("tokens_BT", "targets_BT", "weights_BT"):
            array = getattr(got, name)
            assert array.sharding.is_equivalent_to(sharding, 2)
            assert np.array_equal(array, getattr(want, name))


def test_hosts_read_disjoint_rows_that_make_up_the_batch(open_batches):
    batches = open_batches()
    want = take(batches, 3)
    index_of = mesh_sharding(1, 8, 1).devices_indices_map((8, 16))
    devices = sorted(index_of, key=lambda device: device.id)
    for hosts in (1, 2, 4, 8):
        share = 8 // hosts
        rows = [rows_of([index_of[device] for device in devices[host * share:(host + 1) * share]], 8)
                for host in range(hosts)]
        assert np.array_equal(np.concatenate(rows), np.arange(8))
        for step in range(3):
            parts = [StepSource(batches._order, batches._reader, own, RowRules(eos_id=0))[step]["tokens"]
                     for own in rows]
            assert [part.shape for part in parts] == [(share, 16)] * hosts
            assert np.array_equal(np.concatenate(parts), want[step])


def test_a_host_with_a_tensor_group_reads_only_its_rows():
    index_of = mesh_sharding(1, 2, 4).devices_indices_map((8, 16))
    devices = sorted(index_of, key=lambda device: device.id)
    assert rows_of([index_of[d] for d in devices[:4]], 8).tolist() == [0, 1, 2, 3]
    assert rows_of([index_of[d] for d in devices[4:6]], 8).tolist() == [4, 5, 6, 7]
    assert local_rows(mesh_sharding(2, 2, 2), (8, 16)).tolist() == list(range(8))
    assert local_rows(None, (8, 16)).tolist() == list(range(8))


@pytest.fixture
def two_processes(tmp_path):
    """Returns f(files of process 0, files of process 1) -> what two_processes.py wrote in each of two processes."""

    def run(*files_of):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        script = Path(__file__).with_name("two_processes.py")
        processes = [subprocess.Popen(
            [sys.executable, script, str(port), str(rank), str(tmp_path / f"out{rank}.json"), *files],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank, files in enumerate(files_of)]
        printed = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], printed
        return [json.loads((tmp_path / f"out{rank}.json").read_text()) for rank in (0, 1)]

    return run


def test_two_real_processes_give_the_single_process_batches(two_processes, open_batches, files):
    results = two_processes(files, files)
    plain = open_batches(batch=16, document_masking=True,
                         instance_filter=InstanceFilterConfig(enabled=True, max_period=1, max_count=3))
    want = [next(plain) for _ in range(4)]
    assert 0 < sum(batch.rejected_B.sum() for batch in want) < 32
    assert max(batch.segments_BT.max() for batch in want) > 0
    assert results[0]["rows"] == [0, 1, 4, 5, 8, 9, 12, 13]
    assert results[1]["rows"] == [2, 3, 6, 7, 10, 11, 14, 15]
    for result in results:
        assert result["fingerprints"] == [int(fingerprint_numpy(batch.tokens_BT)) for batch in want]
        for step, batch in enumerate(want):
            for name in ("tokens_BT", "weights_BT", "segments_BT", "rejected_B"):
                assert result[name][step] == getattr(batch, name)[result["rows"]].tolist()


def test_processes_with_different_data_refuse_to_start(two_processes, files, write_tokens):
    other = [write_tokens("other/a.npy", np.arange(3, 3 + 16 * 30 + 5)), files[1]]
    for result in two_processes(files, other):
        assert result["refused"].startswith("processes 1 resolved other data than process 0")


@pytest.mark.parametrize("done", [0, 1, 5, EPOCH - 1, EPOCH, EPOCH + 2])
def test_resuming_continues_exactly(open_batches, done):
    straight = take(open_batches(), 2 * EPOCH + 2)
    first = open_batches()
    take(first, done)
    state = json.loads(json.dumps(first.get_state()))
    assert state["step"] == done
    assert len(json.dumps(state)) < 400
    second = open_batches(prefetch=1)
    take(second, 3)  # a position that is left behind
    second.set_state(state)
    rest = take(second, len(straight) - done)
    assert all(np.array_equal(a, b) for a, b in zip(rest, straight[done:], strict=True))
    assert second.get_state() == first.get_state() | {"step": len(straight),
                                                      "source_tokens": {"x": 8 * 16 * len(straight)}}


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (0, 1), (0, 7), (2, 4)])
def test_order_and_position_do_not_depend_on_workers(open_batches, workers, prefetch):
    want = take(open_batches(), EPOCH + 3)
    batches = open_batches(workers=workers, prefetch=prefetch)
    got = take(batches, EPOCH + 1)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=False))
    resumed = open_batches()
    resumed.set_state(batches.get_state())
    assert np.array_equal(take(resumed, 2), want[EPOCH + 1:])


@pytest.mark.parametrize(("change", "message"), [
    ({"seed": 1}, "data.seed is 1 but was 0"),
    ({"batch": 4}, "train.global_batch is 4 but was 8"),
    ({"sequence_length": 8}, "data.sequence_length is 8 but was 16"),
])
def test_position_of_another_order_is_refused(open_batches, change, message):
    state = open_batches().get_state()
    with pytest.raises(DataError, match=f"cannot continue at step 0: .*{message}"):
        open_batches(**change).set_state(state)


def test_position_in_other_data_is_refused(open_batches, files):
    batches = open_batches()
    next(batches)
    state = batches.get_state()
    tokens = np.fromfile(files[0], np.uint16)
    tokens[5] += 1
    tokens.tofile(files[0])
    with pytest.raises(DataError, match=r"the data \(fingerprint\) is"):
        open_batches().set_state(state)
    with pytest.raises(DataError, match="version 7"):
        open_batches().set_state(state | {"version": 7})


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_id_is_refused_before_its_batch(open_batches, files, workers):
    batches = open_batches(workers=workers)
    bad = 33  # an instance that preflight has already passed: the file changes behind its back
    with open(files[1], "r+b") as file:
        file.seek((3 * 16 + 2) * 2)
        file.write(np.array([1000], "<u2").tobytes())
    step = next(s for s in range(1, EPOCH + 1) if bad in batches.instance_ids(s))
    take(batches, step - 1)
    with pytest.raises(DataError, match=r"b.npy: id 1000 at byte offset 100 is not below vocab_size 1000"):
        next(batches)
    assert batches.get_state()["step"] == step - 1


@pytest.mark.parametrize("workers", [0, 1])
def test_file_that_is_cut_while_training_is_an_error_not_a_crash(open_batches, files, workers):
    batches = open_batches(workers=workers, prefetch=0)
    Path(files[1]).write_bytes(Path(files[1]).read_bytes()[:200])
    with pytest.raises(DataError, match=r"b.npy: \d+ bytes at byte offset \d+ where 32 are expected"):
        take(batches, EPOCH)


def test_ids_above_2_31_are_caught_and_not_made_negative(make_config, write_tokens):
    path = write_tokens("a.npy", np.full(160, 5), np.uint32)
    cfg = make_config({"x": [path]}, dtype="uint32")
    batches = make_batches(cfg, resolve(cfg))
    with open(path, "r+b") as file:
        file.write(np.array([2**31 + 5], "<u4").tobytes())
    with pytest.raises(DataError, match=f"id {2**31 + 5} at byte offset 0"):
        take(batches, 2)
    batches.close()


def test_largest_id_of_a_wide_vocabulary_passes(make_config, write_tokens):
    path = write_tokens("a.npy", np.full(160, 100277))
    cfg = make_config({"x": [write_tokens("b.npy", np.full(160, 100277), np.uint32)]}, vocab_size=100278, batch=2)
    batches = make_batches(cfg, resolve(cfg))
    assert (take(batches, 1)[0] == 100277).all()
    batches.close()
    assert path


def test_batch_that_does_not_divide_over_the_mesh_is_refused(open_batches):
    with pytest.raises(DataError, match=r"train.global_batch 6 does not divide over the mesh"):
        open_batches(mesh_sharding(1, 8, 1), batch=6)


def test_waiting_time_is_measured(open_batches, monkeypatch):
    import time

    batches = open_batches(prefetch=0)
    read = batches._reader.read

    def slow(ids):
        time.sleep(0.2)
        return read(ids)

    next(batches)
    monkeypatch.setattr(batches._reader, "read", slow)
    next(batches)
    assert 0.2 <= batches.last_wait_seconds < 2


def test_memory_is_flat_over_2000_batches(make_config, write_tokens):
    """Of 48 kB each: to keep even one array of every batch would be a third of what the process has."""
    paths = [write_tokens(f"{i}.npy", np.random.default_rng(i).integers(2, 1000, 1 << 18)) for i in range(2)]
    cfg = make_config({"x": paths}, batch=16, sequence_length=256)
    batches = make_batches(cfg, resolve(cfg))
    sizes = []
    for step in range(2001):
        next(batches)
        if step % 200 == 0:
            gc.collect()
            sizes.append(host_memory_gib())
    batches.close()
    assert max(sizes[1:]) < 1.05 * sizes[1], sizes


def test_describe_adds_up_and_is_json(open_batches, files):
    info = open_batches(steps=28).describe()
    assert json.loads(json.dumps(info)) == info
    assert info["sources"] == {"x": {"files": 2, "tokens": 116 * 16, "instances": 116, "share": 1.0}}
    assert info["tokens_per_epoch"] == 116 * 16
    assert (info["batches_per_epoch"], info["instances_dropped_per_epoch"], info["epochs"]) == (EPOCH, 4, 2.0)


def test_fingerprint_is_the_same_in_numpy_and_on_every_mesh(open_batches):
    tokens = take(open_batches(), 1)[0]
    want = int(fingerprint_numpy(tokens))
    assert int(fingerprint(make_batch(tokens))) == want
    for shape in ((1, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)):
        for kind in (AxisType.Explicit, AxisType.Auto):
            sharding = mesh_sharding(*shape, kind=kind)
            batch = next(open_batches(sharding))
            assert isinstance(sharding.mesh, jax.sharding.Mesh)
            with jax.set_mesh(sharding.mesh):
                on_device = jax.jit(fingerprint)(batch)
            assert on_device.dtype == jnp.uint32
            assert on_device.shape == ()
            assert int(on_device) == want


def test_fingerprint_sees_every_change_of_order_and_content():
    tokens = np.random.default_rng(0).integers(0, 100278, (8, 64)).astype(np.int32)
    rolled = tokens.copy()
    rolled[3] = np.roll(rolled[3], 1)
    one_more = tokens.copy()
    one_more[7, 63] += 1
    swapped = tokens.copy()
    swapped[0, :2] = swapped[0, 1::-1]
    rows = tokens[[1, 0, *range(2, 8)]]
    doubled = tokens[[0, 0, *range(2, 8)]]
    same_sums = np.array([[1, 4], [2, 3]], np.int32)
    values = [int(fingerprint_numpy(x)) for x in (tokens, rolled, one_more, swapped, rows, doubled, tokens.T,
                                                  same_sums, same_sums[::-1])]
    assert len(set(values)) == len(values)


def test_fingerprint_is_as_documented():
    def weight(x):
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return (x ^ x >> 16) | 1

    tokens = np.random.default_rng(0).integers(0, 100278, (8, 64)).astype(np.int32)
    want = sum(int(token) * weight(place) for place, token in enumerate(tokens.ravel())) % 2**32
    assert int(fingerprint_numpy(tokens)) == want


def test_data_modules_import_neither_grain_nor_jax_until_needed():
    code = ("import sys, maxtext.data.tokens, maxtext.data.order, maxtext.data.reader, maxtext.data.prepare\n"
            "assert not {'jax', 'grain', 'sentencepiece', 'tokenizers'} & set(sys.modules)\n"
            "import maxtext.data.pipeline\nassert 'grain' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
