"""The attention kernels of TPUs and GPUs against the plain blocked one, in value and gradient; and the choice between.

Splash runs interpreted, cuDNN's arguments go to JAX's own plain form: nothing here needs an accelerator.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from maxtext.config.architecture import MoeConfig
from maxtext.config.schema import KernelConfig
from maxtext.kernels import cudnn, splash
from maxtext.kernels.attention import causal_attention
from maxtext.kernels.choice import KernelError, Problem, choose_attention, choose_grouped_matmul
from maxtext.kernels.splash import Blocks, padded_length
from maxtext.parallel.sharding import per_device, sharding
from maxtext.train.summary import kernels_in_use
from tests.kernels.stablehlo import lowered_for_tpu, pairs_behind_barriers
from tests.tiny import mesh_of, tiny_config

BLOCKS = Blocks(128, 256, 256, 128)
PLAIN = Problem("bfloat16", 128, 128, documents=False, sinks=False)


def arguments(length, heads, group, width, value_width, documents=False, sinks=False):
    rng = np.random.default_rng(0)
    q, k, v, weight = (rng.standard_normal(shape, dtype=np.float32) for shape in [
        (1, length, heads, group, width), (1, length, heads, width), (1, length, heads, value_width),
        (1, length, heads, group, value_width)])
    segments = np.cumsum(rng.random((1, length)) < 0.02, axis=1, dtype=np.int32) if documents else None
    scores = rng.standard_normal((heads, group), dtype=np.float32) if sinks else None
    return (q, k, v, segments, scores), weight


def value_and_gradients(attend, arrays, weight, **settings):
    moving = (0, 1, 2) if arrays[4] is None else (0, 1, 2, 4)

    def total(*arrays):
        return (attend(*arrays, **settings) * weight).sum()

    value, grads = jax.jit(jax.value_and_grad(total, argnums=moving))(*arrays)
    return value, *grads


def assert_same(attend, arrays, weight, **settings):
    got, expected = (value_and_gradients(each, arrays, weight, **settings) for each in (attend, causal_attention))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("shape", "settings"), [
    pytest.param({"length": 260, "heads": 2, "group": 2, "width": 16, "value_width": 16}, {}, id="groups"),
    pytest.param({"length": 300, "heads": 1, "group": 2, "width": 24, "value_width": 16, "documents": True},
                 {"window": 140, "scale": 0.3}, id="window, documents and narrow values"),
    pytest.param({"length": 129, "heads": 2, "group": 1, "width": 8, "value_width": 8, "sinks": True}, {}, id="sinks"),
])
def test_splash_equals_the_plain_form(shape, settings):
    """At lengths that no block divides."""
    assert_same(functools.partial(splash.causal_attention, blocks=BLOCKS, interpret=True), *arguments(**shape),
                **settings)


@pytest.mark.one_pass
def test_splash_is_traced_inside_a_mesh_for_every_axis():
    """JAX's kernels were written without types that tell of the mesh. Shapes only: no CPU runs them."""
    mesh = mesh_of((2, 1, 1))
    (q, k, v, _, sinks), _ = arguments(64, 2, 1, 16, 16, sinks=True)
    with jax.set_mesh(mesh):
        dims = (("batch", None, None, None, None), *(("batch", None, None, None),) * 2, (None, None))
        arrays = [jax.device_put(np.concatenate([x, x]) if x.ndim > 2 else x, sharding(mesh, *each))
                  for x, each in zip((q, k, v, sinks), dims, strict=True)]
        run = per_device(lambda q, k, v, sinks: splash.causal_attention(q, k, v, None, sinks), dims, dims[0])
        grads = jax.eval_shape(jax.grad(lambda *xs: run(*xs).sum(), argnums=(0, 1, 2, 3)), *arrays)
    assert [grad.shape for grad in grads] == [x.shape for x in arrays]


def test_splash_cuts_out_one_log_partition_before_its_output_is_used():
    """The kernel writes it 128 times; the backward pass shall keep it once."""
    (q, k, v, _, _), weight = arguments(256, 2, 2, 128, 128)

    def total(q, k, v):
        return (splash.causal_attention(q, k, v) * weight).sum()

    text = lowered_for_tpu(jax.grad(total, argnums=(0, 1, 2)), q, k, v)
    assert pairs_behind_barriers(text) == [("tensor<1x4x256x128xf32>", "tensor<1x4x256xf32>")]


@pytest.mark.parametrize(("length", "padded"), [(8192, 8192), (1, 128), (1025, 1280), (2049, 2304), (8193, 9216)])
def test_lengths_grow_by_little_to_whole_blocks(length, padded):
    assert padded_length(length, splash.BLOCKS) == padded


def test_a_policy_may_keep_what_the_backward_pass_needs(capsys):
    """With the output and the log of the sum kept, the forward kernel need not run again."""
    (q, k, v, _, _), _ = arguments(128, 1, 2, 8, 8)
    run = jax.checkpoint(functools.partial(splash.causal_attention, blocks=BLOCKS),
                         policy=jax.checkpoint_policies.save_only_these_names(splash.SAVED))
    jax.ad_checkpoint.print_saved_residuals(run, q, k, v)
    kept = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "named" in line]
    assert sorted(kept) == ["f32[1,2,128,8]", "f32[1,2,128]"]


@pytest.mark.parametrize("window", [None, 7])
def test_what_is_asked_of_cudnn_is_causal_attention(window):
    assert_same(functools.partial(cudnn.causal_attention, implementation="xla"), *arguments(20, 2, 2, 8, 8),
                window=window, scale=0.4)


@pytest.mark.parametrize(("platform", "problem", "kind"), [
    ("cpu", PLAIN, "blocked"),
    ("tpu", PLAIN, "splash"),
    ("tpu", Problem("float32", 192, 128, documents=True, sinks=True), "splash"),
    ("gpu", PLAIN, "cudnn"),
    ("gpu", PLAIN._replace(documents=True), "blocked"),
    ("gpu", PLAIN._replace(sinks=True), "blocked"),
    ("gpu", PLAIN._replace(dtype="float32"), "blocked"),
    ("gpu", PLAIN._replace(width=192), "blocked"),
    ("metal", PLAIN, "blocked"),
])
def test_auto_takes_what_can_do_it(platform, problem, kind):
    choice = choose_attention("auto", platform, problem)
    assert choice.kind == kind
    assert choice.reason
    assert choose_attention("blocked", platform, problem).kind == "blocked"


@pytest.mark.parametrize(("wanted", "platform", "problem", "says"), [
    ("splash", "cpu", PLAIN, "runs on TPUs, and this is cpu"),
    ("cudnn", "tpu", PLAIN, "runs on NVIDIA GPUs, and this is tpu"),
    ("cudnn", "gpu", PLAIN._replace(documents=True), "no mask of documents"),
    ("cudnn", "gpu", PLAIN._replace(width=320, value_width=320), "not 320 with values of 320"),
])
def test_a_kernel_that_cannot_do_it_is_refused(wanted, platform, problem, says):
    with pytest.raises(KernelError, match=rf"kernels\.attention={wanted}: .*{says}.*write kernels\.attention=auto"):
        choose_attention(wanted, platform, problem)


def test_grouped_matmul_is_chosen_by_platform():
    assert [choose_grouped_matmul("auto", each).kind for each in ("cpu", "tpu", "gpu")] == [
        "blocked", "megablox", "blocked"]
    assert choose_grouped_matmul("auto", "rocm").kind == "ragged_dot"
    assert choose_grouped_matmul("ragged_dot", "cpu").kind == "ragged_dot"
    with pytest.raises(KernelError, match="megablox: it runs on TPUs, and this is cpu"):
        choose_grouped_matmul("megablox", "cpu")


def test_the_start_table_names_the_kernels():
    cfg = tiny_config(compute_dtype="bfloat16")
    assert kernels_in_use(cfg, "tpu") == "attention splash (the Pallas kernel of TPUs)"
    assert kernels_in_use(cfg, "gpu") == "attention cudnn (the fused kernel of NVIDIA GPUs)"
    packed = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, document_masking=True),
                                 model=dataclasses.replace(cfg.model, moe=MoeConfig(experts=4, d_expert=8)))
    assert kernels_in_use(packed, "gpu").startswith("attention blocked (no cudnn: it has no mask of documents")
    assert kernels_in_use(packed, "cpu").endswith(", experts blocked (plain JAX)")
    with pytest.raises(KernelError, match="splash: it runs on TPUs, and this is cpu"):
        kernels_in_use(dataclasses.replace(cfg, kernels=KernelConfig(attention="splash")), "cpu")
