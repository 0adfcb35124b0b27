"""The fused head and cross-entropy against log_softmax, in value and gradient, on one device and split over meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels import cross_entropy as module
from maxtext.kernels.cross_entropy import Axes, Losses, cross_entropy, token_nll
from maxtext.parallel.collectives import vary
from maxtext.parallel.sharding import RULES, per_device, sharding
from tests.kernels.stablehlo import lowered_for_tpu, pairs_behind_barriers, tpu_mesh
from tests.tiny import MESHES, mesh_of

TOKENS, WIDTH, VOCAB = 48, 16, 64


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, WIDTH), dtype=np.float32)
    w = rng.standard_normal((WIDTH, VOCAB), dtype=np.float32)
    targets = rng.integers(0, VOCAB, TOKENS, dtype=np.int32)
    weights = rng.random(TOKENS, dtype=np.float32) * (rng.random(TOKENS) > 0.3)
    return x, w, targets, (weights / weights.sum()).astype(np.float32)


def plain(x, w, targets, weights, z_loss):
    logits = x @ w
    log_z = jax.nn.logsumexp(logits, -1)
    nll = log_z - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    return (weights * (nll + z_loss * log_z**2)).sum(), Losses((weights * nll).sum(), (weights * log_z**2).sum())


def exact(z_loss):
    x, w, targets, weights = arguments()
    with jax.enable_x64(True):
        double = [a.astype(np.float64) for a in (x, w)]
        return jax.value_and_grad(lambda x, w: plain(x, w, targets, weights.astype(np.float64), z_loss),
                                  argnums=(0, 1), has_aux=True)(*double)


def check(got, expected, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_value_and_gradient(chunk, z_loss):
    x, w, targets, weights = arguments()
    got = jax.value_and_grad(lambda x, w: cross_entropy(x, w, targets, weights, z_loss, chunk, Axes()),
                             argnums=(0, 1), has_aux=True)(x, w)
    check(got, exact(z_loss))


def test_the_order_that_tpus_are_told_changes_no_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "platform", lambda: "tpu")
    x, w, targets, weights = arguments()
    got = jax.value_and_grad(lambda x, w: cross_entropy(x, w, targets, weights, 1e-2, 16, Axes()),
                             argnums=(0, 1), has_aux=True)(x, w)
    check(got, exact(1e-2))


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 1)])
def test_a_tpu_scatters_the_gradient_of_the_head_before_the_other_is_used(shape):
    """Traced for the types of a mesh too, with JAX of either version; and no other platform is told."""
    axes = Axes(tokens=RULES["batch"] + RULES["sequence"], width=RULES["embed"], vocab="tensor")
    dims = (("batch", None), ("embed", "vocab"), ("batch",), ("batch",))

    def lowered(mesh):
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(mesh, *d))
                  for a, d in zip(arguments(), dims, strict=True)]

        def local(x, w, *tokens):
            x, *tokens = vary((x, *tokens), frozenset(axes.tokens))
            return cross_entropy(x, w, *tokens, 1e-2, 4, axes)[0]

        return lowered_for_tpu(jax.grad(per_device(local, dims, ()), argnums=(0, 1)), *arrays)

    with jax.sharding.use_abstract_mesh(tpu_mesh(mesh_of(shape))):
        pairs = pairs_behind_barriers(lowered(tpu_mesh(mesh_of(shape))))
    data, fsdp, tensor = shape
    x, w, *_ = arguments()
    assert pairs == [(f"tensor<{x.shape[0] // data // fsdp}x{x.shape[1]}xf32>",
                      f"tensor<{w.shape[0] // fsdp}x{w.shape[1] // tensor}xf32>")]
    with jax.set_mesh(mesh_of(shape)):
        assert "optimization_barrier" not in lowered(mesh_of(shape))


def test_the_gradient_scales_with_the_cotangent():
    x, w, targets, weights = arguments()
    def loss(x, scale):
        return scale * cross_entropy(x, w, targets, weights, 0.0, 16, Axes())[0]
    np.testing.assert_allclose(jax.grad(loss)(x, 3.0), 3 * jax.grad(loss)(x, 1.0), rtol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_target_in_another_slice_of_the_vocabulary_counts_as_0(monkeypatch: pytest.MonkeyPatch, platform: str):
    monkeypatch.setattr(module, "platform", lambda: platform)
    logits = np.arange(1, 21, dtype=np.float32).reshape(5, 4)
    targets = np.array([-1, 0, 3, 4, 2], np.int32)  # counted from the first of this slice
    found = module._target_logit(logits, targets, np.arange(4) == targets[:, None])
    np.testing.assert_array_equal(found, [0, 5, 12, 0, 19])


@pytest.mark.parametrize("shape", MESHES)
def test_split_over_a_mesh(shape):
    axes = Axes(tokens=RULES["batch"] + RULES["sequence"], width=RULES["embed"], vocab="tensor")
    dims = (("batch", None), ("embed", "vocab"), ("batch",), ("batch",))
    mesh = mesh_of(shape)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, sharding(mesh, *d)) for a, d in zip(arguments(), dims, strict=True)]

        def local(x, w, *tokens):
            x, *tokens = vary((x, *tokens), frozenset(axes.tokens))
            return cross_entropy(x, w, *tokens, 1e-2, 4, axes)

        fused = per_device(local, dims, ((), Losses((), ())))
        got = jax.jit(jax.value_and_grad(lambda x, w, t, c: fused(x, w, t, c), argnums=(0, 1), has_aux=True))(*placed)
        x, _, targets = placed[:3]
        head = jax.device_put(arguments()[1], sharding(mesh, None, "vocab"))
        of_tokens = per_device(lambda x, w, t: token_nll(x, w, t, 5, axes.vocab),
                               (dims[0], (None, "vocab"), dims[2]), dims[2])
        nll = jax.jit(of_tokens)(x, head, targets)
    check(got, exact(1e-2))
    x, w, targets, _ = arguments()
    expected = [-float(jax.nn.log_softmax(x[i] @ w)[targets[i]]) for i in range(TOKENS)]
    np.testing.assert_allclose(nll, expected, rtol=1e-5)


def test_logits_far_from_zero_do_not_overflow():
    x, w, targets, weights = arguments()
    total, _ = cross_entropy(1e3 * x, w, targets, weights, 0.0, 16, Axes())
    np.testing.assert_allclose(total, plain(1e3 * x, w, targets, weights, 0.0)[0], rtol=1e-5)


def test_bfloat16_logits_are_rounded_before_the_loss():
    """As the reference: a bfloat16 matmul, then float32."""
    x, w, targets, weights = arguments()
    logits = (jnp.asarray(x, jnp.bfloat16) @ jnp.asarray(w, jnp.bfloat16)).astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits)
    expected = -(weights * log_probs[np.arange(TOKENS), targets]).sum()
    total, _ = cross_entropy(jnp.asarray(x, jnp.bfloat16), w, targets, weights, 0.0, 16, Axes())
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_the_logits_of_all_tokens_never_exist():
    shapes = ((4096, 8), "f4"), ((8, 4096), "f4"), ((4096,), "i4"), ((4096,), "f4")
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    step = jax.jit(jax.grad(lambda x, w, t, c: cross_entropy(x, w, t, c, 1e-5, 128, Axes())[0], argnums=(0, 1)))
    memory = step.lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.25 * 4096 * 4096 * 4
