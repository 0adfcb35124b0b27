"""Attention over a shared sequence against the plain formula, in value and gradient, and what it moves."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxtext.kernels import block_pairs
from maxtext.kernels.attention import causal_attention
from maxtext.kernels.block_pairs import KEY, MASKED, OFFSET, QUERY, VALID, Keys, Plain, Queries, Saved, State
from maxtext.kernels.context_attention import context_attention
from maxtext.kernels.context_layout import Layout, fetched_pairs, gathered_pairs, messages, own_pairs, ring_pairs
from maxtext.kernels.splash import Blocks
from maxtext.kernels.splash_pair import SplashPair, splash_block
from maxtext.kernels.ulysses import ulysses_copies
from maxtext.model import attention
from maxtext.parallel.sequence import natural_order, zigzag_order
from maxtext.parallel.sharding import spec
from tests import tiny

BATCH, HEADS, GROUP, KEY_WIDTH, VALUE_WIDTH = 2, 4, 2, 8, 6
SCALE, BLOCK = 0.3, 3
TOKENS, HEAD_DIMS = PartitionSpec("data", "context"), PartitionSpec("tensor")
QUERIES = PartitionSpec("data", "context", "tensor")
COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def mesh_of(context):
    shape = (8 // context if context > 2 else 2, context, 2 if context == 2 else 1)
    return jax.make_mesh(shape, ("data", "context", "tensor"), axis_types=(AxisType.Explicit,) * 3)


def arguments(length, documents, sinks, heads=HEADS, dtype=np.float32):
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in [
        (BATCH, length, heads, GROUP, KEY_WIDTH), (BATCH, length, heads, KEY_WIDTH),
        (BATCH, length, heads, VALUE_WIDTH), (BATCH, length, heads, GROUP, VALUE_WIDTH)])
    segments = np.cumsum(rng.random((BATCH, length)) < 0.1, axis=1).astype(np.int32) if documents else None
    sinks = rng.standard_normal((heads, GROUP), dtype=np.float32) if sinks else None
    return q, k, v, segments, sinks, dy


@jax.jit
def plain(q, k, v, segments, sinks, dy, window):
    """The whole score matrix, one softmax; and the gradients of q, k, v and sinks."""
    t, s = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])[None]
    seen = (s <= t) & (s > t - window) & (segments[:, :, None] == segments[:, None])[:, None, None]

    def attend(q, k, v, sinks):
        scores = jnp.where(seen, jnp.einsum("btkgh,bskh->bkgts", q, k) * SCALE, -jnp.inf)
        column = jnp.broadcast_to(sinks[:, :, None, None], (*scores.shape[:-1], 1))
        return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1], v)

    y, pull = jax.vjp(attend, q, k, v, sinks)
    return y, *pull(dy)


def expected(q, k, v, segments, sinks, dy, window):
    segments = np.zeros(q.shape[:2], np.int32) if segments is None else segments
    no_sinks = np.full((q.shape[2], GROUP), -np.inf, np.float32)
    wide = (np.asarray(x, np.float32) for x in (q, k, v))
    got = plain(*wide, segments, no_sinks if sinks is None else sinks, np.asarray(dy, np.float32), window or q.shape[1])
    return got[:4] if sinks is None else got


def lower(mesh, strategy, window, segments, sinks, block=BLOCK, kernel="blocked"):
    """A step that gives the result and the gradients, to be lowered; its arguments lie in zigzag order."""
    attend = functools.partial(context_attention, window=window, scale=SCALE, axis="context", strategy=strategy,
                               inner=causal_attention, block=block, kernel=kernel)
    shared = jax.shard_map(attend, in_specs=(QUERIES, QUERIES, QUERIES, None if segments is None else TOKENS,
                                             None if sinks is None else HEAD_DIMS), out_specs=QUERIES)

    def step(q, k, v, segments, sinks, dy):
        y, pull = jax.vjp(lambda q, k, v, sinks: shared(q, k, v, segments, sinks), q, k, v, sinks)
        return y, *(dx for dx in pull(dy) if dx is not None)

    return jax.jit(step)


def on_devices(context, strategy, window, q, k, v, segments, sinks, dy, **settings):
    """Result and gradients in natural order, and the compiled program's text."""
    mesh, order, back = mesh_of(context), zigzag_order(q.shape[1], context), natural_order(q.shape[1], context)

    def put(x, spec):
        return None if x is None else jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        q, k, v, dy = (put(x[:, order], QUERIES) for x in (q, k, v, dy))
        args = (q, k, v, None if segments is None else put(segments[:, order], TOKENS), put(sinks, HEAD_DIMS), dy)
        compiled = lower(mesh, strategy, window, segments, sinks, **settings).lower(*args).compile()
        out = jax.tree.map(np.asarray, compiled(*args))
    return [x[:, back] for x in out[:4]] + list(out[4:]), compiled.as_text()


# Chunks are of 7 tokens on 4 devices, which blocks of 3 do not divide, and of 14 on 2.
@pytest.mark.parametrize(("strategy", "context", "window", "documents", "sinks", "kinds"), [
    ("all_gather", 4, None, True, True, {"all-gather", "reduce-scatter", "all-reduce"}),
    ("all_gather", 4, 9, True, False, {"collective-permute"}),
    pytest.param("all_gather", 4, 19, False, True, {"collective-permute", "all-reduce"}, marks=pytest.mark.one_pass),
    pytest.param("all_gather", 2, 1, True, False, set(), marks=pytest.mark.one_pass),
    ("ring", 4, None, True, True, {"collective-permute", "all-reduce"}),
    pytest.param("ring", 4, 50, False, False, {"collective-permute"}, marks=pytest.mark.one_pass),
    pytest.param("ring", 2, None, False, False, {"collective-permute"}, marks=pytest.mark.one_pass),
    ("ulysses", 4, None, False, True, {"all-to-all", "all-reduce"}),
    # The gather is of the documents' numbers.
    pytest.param("ulysses", 2, 9, True, False, {"all-to-all", "all-gather"}, marks=pytest.mark.one_pass),
])
def test_equals_one_device(strategy, context, window, documents, sinks, kinds):
    args = arguments(56, documents, sinks)
    got, program = on_devices(context, strategy, window, *args)
    for array, exact in zip(got, expected(*args, window), strict=True):
        np.testing.assert_allclose(array, exact, atol=1e-5, rtol=1e-5)
    found = set(COLLECTIVES.findall(program))
    assert found == kinds


@pytest.mark.one_pass
def test_the_kernels_of_tpus_equal_one_device():
    """Interpreted, in chunks of 100 tokens, which are filled up to 128."""
    args = arguments(400, False, True)
    got, _ = on_devices(2, "ring", None, *args, kernel="splash_interpreted", block=None)
    for array, exact in zip(got, expected(*args, None), strict=True):
        np.testing.assert_allclose(array, exact, atol=3e-5, rtol=3e-5)


@pytest.mark.one_pass
def test_a_window_and_documents_in_the_kernels_of_tpus():
    """A pair of which the later half of the queries sees nothing, so that the kernel does not run for them at all."""
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((1, *shape), dtype=np.float32) for shape in [
        (2, 2, 256, 8), (2, 256, 8), (2, 256, 6), (2, 2, 256, 6)])
    q_documents, k_documents = np.ones((1, 256), np.int32), (np.arange(256) > 190)[None].astype(np.int32)
    query, key, pair = Queries(q * 0.2, q_documents), Keys(k, v, k_documents), np.array([0, 0, 256, 256], np.int32)
    log_sum, product = (rng.random((1, 2, 2, 256), dtype=np.float32) for _ in range(2))
    log_sum += 3  # as it is when the queries see other keys too

    def run(kernel):
        saved = Saved(dy, log_sum, np.ones_like(log_sum), product)
        return kernel.read(query, key, pair), kernel.gradients(query, saved, key, pair)

    splash = SplashPair(256, 100, 256, interpret=True, blocks=Blocks(128, 128, 128, 256))
    (exact, exact_grads), (state, grads) = (jax.jit(functools.partial(run, kernel))() for kernel in (
        Plain(100, 1.0), splash))
    seen = np.asarray(exact.peak_NBKGT) > MASKED
    assert seen.any()
    assert not seen[..., 99:].any()
    np.testing.assert_array_equal(state.sum_NBKGT, seen)
    np.testing.assert_allclose(state.peak_NBKGT[seen], (exact.peak_NBKGT + np.log(exact.sum_NBKGT))[seen], rtol=1e-5)
    np.testing.assert_allclose(state.read_NBKGTW[seen], (exact.read_NBKGTW / exact.sum_NBKGT[..., None])[seen],
                               atol=1e-5)
    np.testing.assert_array_equal(np.asarray(state.read_NBKGTW)[~seen], 0)
    for array, wanted in zip(grads, exact_grads, strict=True):
        np.testing.assert_allclose(array, wanted, atol=1e-5, rtol=1e-5)


def test_blocks_of_the_kernels_of_tpus():
    assert [splash_block(*sizes) for sizes in [(8192, None), (8192, 4096), (8192, 4097), (8192, 4098), (8192, 128),
                                               (640, 128), (128, 1), (100, 1), (8000, 16)]] == [
        8192, 4096, 4096, 8192, 512, 640, 128, 128, 8064]


def test_ulysses_copies_heads_that_are_fewer_than_devices():
    args = arguments(16, False, True, heads=2)
    got, _ = on_devices(4, "ulysses", None, *args)
    for array, exact in zip(got, expected(*args, None), strict=True):
        np.testing.assert_allclose(array, exact, atol=1e-5, rtol=1e-5)
    assert [ulysses_copies(*sizes) for sizes in [(8, 1, 4), (2, 2, 4), (6, 2, 4), (1, 8, 8)]] == [1, 2, 2, 8]
    with pytest.raises(ValueError, match="2 key/value heads with 1 query heads each cannot be split over 4 devices"):
        ulysses_copies(2, 1, 4)


def test_a_short_window_is_fetched_alike_by_both():
    mesh = mesh_of(4)
    shapes = [(2, 56, 1, 1, 8), (2, 56, 1, 8), (2, 56, 1, 8), (2, 56, 1, 1, 8)]
    q, k, v, dy = (jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, QUERIES)) for shape in shapes)
    with jax.set_mesh(mesh):
        ring, all_gather = (lower(mesh, strategy, 4, None, None).lower(q, k, v, None, None, dy).as_text()
                            for strategy in ("ring", "all_gather"))
    assert ring == all_gather
    assert ring.count("collective_permute") == 2 * 2 * 3  # two messages of keys, of values; fetched twice, given back


@pytest.mark.parametrize(("platform", "kernel"), [("cpu", False), ("tpu", True)])
def test_a_model_takes_the_kernels_of_its_platform(platform, kernel, monkeypatch):
    monkeypatch.setattr(attention, "platform", lambda: platform)
    with jax.set_mesh(tiny.mesh_of((1, 1, 1), context=2)):
        dims = spec("batch", "sequence", "heads")
        q, k = (jax.device_put(np.ones(shape, np.float32), dims) for shape in [(1, 512, 4, 2, 8), (1, 512, 4, 8)])
        program = jax.make_jaxpr(lambda q, k: attention.attend(q, k, k, None, None, None, tiny.tiny_model()))(q, k)
    assert ("pallas_call" in str(program)) == kernel


@pytest.mark.one_pass
def test_bfloat16_is_rounded_as_on_one_device():
    args = arguments(56, False, False, dtype=jnp.bfloat16)
    got, _ = on_devices(2, "ring", None, *args)
    for array, exact in zip(got, expected(*args, None), strict=True):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_allclose(array.astype(np.float32), exact, atol=2e-2, rtol=2e-2)


def test_ring_needs_less_memory_than_gathering():
    mesh, memory = mesh_of(8), {}
    shapes = [(1, 4096, 1, 1, 64), (1, 4096, 1, 64), (1, 4096, 1, 64), (1, 4096, 1, 1, 64)]
    q, k, v, dy = (jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, QUERIES)) for shape in shapes)
    with jax.set_mesh(mesh):
        for strategy in ("all_gather", "ring"):
            compiled = lower(mesh, strategy, None, None, None, block=128).lower(q, k, v, None, None, dy).compile()
            memory[strategy] = compiled.memory_analysis().temp_size_in_bytes
    assert memory["ring"] < 0.6 * memory["all_gather"]
    assert memory["all_gather"] < 4 * 4096 * 4096 // 8  # bytes of scores of this device's queries and all keys


def test_pairs_of_other_documents_are_not_computed():
    """Values that are no numbers would show: nothing times 0 is not 0."""
    q, k, v = (np.ones((2, 1, 1, *shape), np.float32) for shape in [(1, 4, 8), (4, 8), (4, 6)])
    v[0] = np.nan
    documents = np.array([[[0, 0, 1, 1]], [[2, 2, 2, 3]]], np.int32)
    pairs = np.array([[1, 0, 4, 4], [1, 1, 0, 4], [0, 1, 0, 0]], np.int32)  # other documents; its own; an empty one
    queries, keys = Queries(q, documents), Keys(k, v, documents)

    @functools.partial(jax.jit, static_argnums=0)
    def read(skip):
        return block_pairs.accumulate(block_pairs.start(queries, 6), queries, keys, pairs, Plain(None, 1.0), skip)

    state = read(True)
    np.testing.assert_allclose(block_pairs.finish(State(*(x[1:] for x in state)), None)[0], 1, rtol=1e-6)
    np.testing.assert_array_equal(state.sum_NBKGT[0], 0)
    assert np.isnan(read(False).read_NBKGTW[1]).any()


# Layout, without a compile


def test_zigzag_order():
    order = zigzag_order(12, 3)
    np.testing.assert_array_equal(order, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
    np.testing.assert_array_equal(order[natural_order(12, 3)], np.arange(12))
    np.testing.assert_array_equal(zigzag_order(4, 1), np.arange(4))
    with pytest.raises(ValueError, match=r"20 tokens cannot be shared by 3 devices: .* 2 \* 3 = 6"):
        zigzag_order(20, 3)


def blocks_of(layout):
    """Positions of the tokens in each block of each device, (C, N, block); those that fill up a block are -1."""
    order = zigzag_order(2 * layout.chunk * layout.devices, layout.devices).reshape(layout.devices, 2, layout.chunk)
    short = layout.blocks * layout.block - layout.chunk
    return np.pad(order, ((0, 0), (0, 0), (0, short)), constant_values=-1).reshape(layout.devices, -1, layout.block)


def pairs_computed(layout, lots):
    """How often each (query, key) is computed, and pairs of blocks a device. `lots`: keys (C, N, block) and pairs."""
    length, own = 2 * layout.chunk * layout.devices, blocks_of(layout)
    count, work = np.zeros((length, length), int), np.zeros(layout.devices, int)
    for keys, pairs in lots:
        for device in range(layout.devices):
            for pair in pairs[device]:
                q, k = own[device, pair[QUERY]], keys[device, pair[KEY]][: pair[VALID]]
                back = pair[OFFSET] + np.arange(layout.block)[:, None] - np.arange(len(k))
                seen = (back >= 0) & (back < (layout.window or length)) & (q >= 0)[:, None]
                assert seen.any() == (pair[VALID] > 0)  # no pair without a key that is seen
                t, s = np.broadcast_to(q[:, None], seen.shape)[seen], np.broadcast_to(k, seen.shape)[seen]
                assert (t - s == back[seen]).all()
                count[t, s] += 1
                work[device] += pair[VALID] > 0
    return count, work


def sent(layout, own):
    """What the messages bring, (C, N, block); -2 where nothing came."""
    parts = []
    for message in messages(layout):
        part = np.full((layout.devices, layout.blocks - message.first, layout.block), -2)
        for half, permutation in message.halves:
            for source, target in permutation:
                assert (part[target] == -2).all()
                part[target] = own[source, half * layout.blocks + message.first : (half + 1) * layout.blocks]
        parts.append(part)
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("layout", [
    Layout(2, 7, 3, None), Layout(3, 5, 2, None), Layout(4, 4, 4, None), Layout(4, 6, 2, 30), Layout(3, 4, 3, 7),
    Layout(4, 5, 2, 2), Layout(4, 5, 2, 6), Layout(4, 5, 2, 7), Layout(4, 5, 5, 11), Layout(5, 3, 2, 12),
], ids=str)
def test_each_key_that_is_seen_is_read_once(layout):
    length, own = 2 * layout.chunk * layout.devices, blocks_of(layout)
    t, s = np.arange(length)[:, None], np.arange(length)
    seen = (s <= t) & (s > t - (layout.window or length))
    ways = {
        "gathered": [(np.broadcast_to(own.reshape(1, -1, layout.block), (layout.devices, own.size // layout.block,
                                                                        layout.block)), gathered_pairs(layout))],
        "ring": [(np.roll(own, hop, axis=0), pairs) for hop, pairs in enumerate(ring_pairs(layout), 1)],
    }
    if layout.near:
        ways["near"] = [(sent(layout, own), fetched_pairs(layout))]
    for way, lots in ways.items():
        count, work = pairs_computed(layout, [(own, own_pairs(layout)), *lots])
        np.testing.assert_array_equal(count, seen, err_msg=way)
        if layout.window is None:  # the same work on every device
            assert len(set(work)) == 1, way


def test_a_window_moves_no_more_than_it_holds():
    layout = Layout(8, 1024, 128, 512)
    rows = sum(layout.blocks - message.first for message in messages(layout)) * layout.block
    assert rows == 2 * 512  # for each half of a device
