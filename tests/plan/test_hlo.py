"""Reading compiled programs: trip counts, FLOPs, groups and bytes, on small texts and on programs compiled here."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from maxtext.plan.collectives import axes_of, bytes_sent, replica_groups, traffic
from maxtext.plan.hlo import Module, Walk, arrays, byte_size, estimated_cycles, matmul_flops, parse
from maxtext.plan.kernels import kernel_flops, kernel_name
from tests.tiny import mesh_of

LOOP = """HloModule m, is_scheduled=true

%compare.1 (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%condition (p.1: (s32[], f32[4,8])) -> pred[] {
  %p.1 = (s32[], f32[4,8]{1,0:T(8,128)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %other = s32[] constant(900)
  %end = s32[] constant(END)
  ROOT %less = pred[] fusion(%i.1, %end), kind=kLoop, calls=%compare.1
}

%body (p.2: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p.2 = (s32[], f32[4,8]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %x = f32[4,8] get-tuple-element(%p.2), index=1
  %step = s32[] constant(STEP)
  %next = s32[] add(%i.2, %step)
  %w = f32[8,8] constant({...})
  %y = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="a (b"}
  ROOT %t = (s32[], /*index=1*/f32[4,8]) tuple(%next, %y)
}

ENTRY %main (x.1: f32[4,8]) -> (s32[], f32[4,8]) {
  %x.1 = f32[4,8] parameter(0)
  %start = s32[] constant(START)
  %first = (s32[], f32[4,8]) tuple(%start, %x.1)
  ROOT %loop = (s32[], f32[4,8]) while(%first), condition=%condition, body=%body
}
"""


def loop_text(start: object, end: object, step: object) -> str:
    return LOOP.replace("START", str(start)).replace("END", str(end)).replace("STEP", str(step))


def flops(walk: Walk) -> int:
    return sum(run.times * matmul_flops(run) for run in walk.runs)


@pytest.mark.parametrize(("start", "end", "step", "trips"), [(0, 6, 1, 6), (2, 6, 1, 4), (1, 8, 3, 3), (6, 2, 1, 0)])
def test_trips_of_a_loop_are_read_from_its_condition(start: int, end: int, step: int, trips: int):
    walk = Walk(parse(loop_text(start, end, step)))
    assert flops(walk) == trips * 2 * 4 * 8 * 8
    assert walk.unknown_loops == []


def test_a_trip_count_that_xla_knows_is_taken():
    known = 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    assert flops(Walk(parse(loop_text(0, 6, 1).replace("body=%body", known)))) == 5 * 512


@pytest.mark.parametrize(("old", "new"), [
    ("%start = s32[] constant(0)", "%start = s32[] custom-call()"),
    ("%end = s32[] constant(6)", "%end = s32[] get-tuple-element(%p.1), index=0"),
    ("%next = s32[] add", "%next = s32[] multiply"),
    ("direction=LT", "direction=NE"),
])
def test_a_loop_of_unknown_length_counts_once_and_is_named(old: str, new: str):
    text = loop_text(0, 6, 1)
    assert old in text
    walk = Walk(parse(text.replace(old, new)))
    assert (flops(walk), walk.unknown_loops) == (512, ["loop"])


def test_a_loop_that_ends_with_the_data_counts_as_its_scope_says():
    """The last scope before the loop; what lies around it or inside is another's."""
    unknown = loop_text(0, 6, 1).replace("%start = s32[] constant(0)", "%start = s32[] custom-call()")
    named = 'body=%body, metadata={op_name="jit(f)/SCOPE/while"}'
    walk = Walk(parse(unknown.replace("body=%body", named.replace("SCOPE", "loop_trips_9"))))
    assert (flops(walk), walk.unknown_loops, walk.named_loops) == (9 * 512, [], ["loop"])
    walk = Walk(parse(unknown.replace("body=%body", named.replace("SCOPE", "loop_trips_9/while/body"))))
    assert (flops(walk), walk.unknown_loops, walk.named_loops) == (512, ["loop"], [])


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule m")


def test_sizes_of_types():
    assert arrays("(f32[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[], s4[7])") == [
        ("f32", (2, 3)), ("pred", ()), ("s4", (7,))]
    assert byte_size("(bf16[2,3]{1,0:T(8,128)}, f8e4m3fn[5], s4[4], token[])") == 12 + 5 + 2


def one(line: str, *operands: str) -> Walk:
    """A program of one instruction over parameters of these types."""
    lines = [f"  %p{i} = {kind} parameter({i})" for i, kind in enumerate(operands)]
    return Walk(parse("\n".join(["ENTRY %main () -> f32[] {", *lines, f"  ROOT {line}", "}"])))


def test_flops_of_matmuls_that_xla_for_tpu_writes_as_convolutions():
    """Batch dims become window dims with padding or holes, at which nothing is computed."""
    heads = one("%c = f32[8,256,4,3,32] convolution(%p0, %p1), window={size=1x4x3 pad=0_0x3_3x2_2 rhs_reversal=0x1x1}, "
                "dim_labels=0bf12_i12o0->0b12f", "bf16[8,256,128,1,1]", "bf16[128,4,3,32,1]")
    assert flops(heads) == 2 * (8 * 256) * 128 * (4 * 3 * 32)
    scores = one("%c = f32[8,4,64,127] convolution(%p0, %p1), window={size=8x4 stride=7x3 lhs_dilate=8x4}, "
                 "dim_labels=01bf_01oi->01bf", "f32[8,4,64,32]", "f32[8,4,127,32]")
    assert flops(scores) == 2 * (8 * 4) * 64 * 127 * 32
    outside = one("%c = f32[1,1,4] convolution(%p0, %p1), window={size=3 pad=5_1}, dim_labels=bf0_io0->bf0",
                  "f32[1,1,1]", "f32[1,1,3]")
    assert flops(outside) == 2  # the one input lies at the last position of the output, under the last of the kernel
    plain = one("%c = f32[4,16] convolution(%p0, %p1), dim_labels=bf_io->bf", "f32[4,8]", "f32[8,16]")
    assert flops(plain) == 2 * 4 * 8 * 16


def test_flops_of_kernels_are_what_they_declare():
    line = '%k = f32[4] custom-call(%p0), custom_call_target="TARGET", backend_config={"custom_call_config":{CONFIG}}'
    declared = line.replace("CONFIG", '"cost_estimate":{"flops":123,"bytes_accessed":"7"}')
    (run,) = (run for run in one(declared.replace("TARGET", "tpu_custom_call"), "f32[4]").runs if run.instruction.root)
    assert kernel_flops(run) == 123
    (run,) = (run for run in one(line.replace("TARGET", "tpu_custom_call"), "f32[4]").runs if run.instruction.root)
    assert kernel_flops(run) is None
    scoped = line.replace("TARGET", "tpu_custom_call") + ', metadata={op_name="jit(f)/while/kernel_flops_45/splash"}'
    (run,) = (run for run in one(scoped, "f32[4]").runs if run.instruction.root)
    assert kernel_flops(run) == 45
    (run,) = (run for run in one(declared.replace("TARGET", "Sharding"), "f32[4]").runs if run.instruction.root)
    assert kernel_flops(run) == 0


def test_an_instruction_may_go_over_several_lines():
    """As that of a Mosaic kernel does, whose own words end in a brace at the start of a line."""
    text = """ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  %splash_fwd.2 = f32[4] custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"custom_call_config": {
"xprof_metadata":"{\\"block_q\\": 1024, \\"x = y\\": 1}"
}}, metadata={op_name="jit(f)/kernel_flops_45/splash_fwd/pallas_call"}
  ROOT %r = f32[4] add(%splash_fwd.2, %p)
}, execution_thread="main"

%after (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4] parameter(0)
}
"""
    assert set(parse(text).computations) == {"main", "after"}
    runs = Walk(parse(text)).runs
    assert [run.instruction.name for run in runs] == ["p", "splash_fwd.2", "r"]
    assert kernel_flops(runs[1]) == 45
    assert kernel_name(runs[1]) == "splash_fwd"


CUDA = """ENTRY %main (q: bf16[1,1024,4,128]) -> bf16[1,4,1024,128] {
  %q = bf16[1,1024,4,128]{3,2,1,0} parameter(0)
  %a.5 = (bf16[1,4,1024,128]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config": {"algorithm": {"tuning_knobs": {"17": "1"}}, "intermediate_tensor_shape": \
{"element_type": "BF16", "dimensions": ["1", "4", "1024", "1024"], "tuple_shapes": []}, "mask_type": "MASK"}}
  %x = bf16[1024,512]{1,0} bitcast(%q)
  %g = bf16[1024,64]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm", backend_config={ \
"gemm_backend_config": {"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}}}
  ROOT %r = bf16[1,4,1024,128]{3,1,2,0} get-tuple-element(%a.5), index=0
}
"""


@pytest.mark.parametrize(("target", "mask", "matmuls"), [
    ("__cudnn$fmhaSoftmax", "NO_MASK", 4), ("__cudnn$fmhaSoftmax", "CAUSAL", 2),
    ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 5), ("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL", 5),
])
def test_flops_of_cudnns_attention_follow_from_the_shape_of_its_scores(target: str, mask: str, matmuls: int):
    text = CUDA.replace("__cudnn$fmhaSoftmax", target).replace('"MASK"', f'"{mask}"')
    run = next(run for run in Walk(parse(text)).runs if run.instruction.name == "a.5")
    assert kernel_flops(run) == matmuls * 4 * 1024 * 1024 * 128
    assert kernel_name(run) == target.replace("__", "").replace("$", " ")


def test_cudnns_attention_inside_a_window_sees_no_more_than_the_window():
    text = CUDA.replace('"MASK"', '"CAUSAL", "sliding_window_length": 256')
    run = next(run for run in Walk(parse(text)).runs if run.instruction.name == "a.5")
    assert kernel_flops(run) == 4 * 4 * (256 * 1024 - 256 * 255 // 2) * 128


def test_flops_of_cublas_follow_from_its_operands():
    run = next(run for run in Walk(parse(CUDA)).runs if run.instruction.name == "g")
    assert kernel_flops(run) == 2 * 1024 * 64 * 512


def test_cycles_that_xla_does_not_know_are_none():
    for cycles, counted in (("8992", 8992), (str(2**63 - 1), 0)):
        walk = one('%f = f32[4] add(%p0, %p0), backend_config={"window_config":{"estimated_cycles":"' + cycles + '"}}',
                   "f32[4]")
        assert [estimated_cycles(run) for run in walk.runs] == [0, counted]


ROWS, COLUMNS = [(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(("text", "groups"), [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", ROWS),
    ("replica_groups=[2,4]<=[8]", ROWS),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", COLUMNS),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ROWS),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", COLUMNS),
    ("replica_groups=mesh['x'=8] {'x':(1)2}", COLUMNS),
    ("replica_groups=mesh['x'=8] {'x':(2)4}", ROWS),
    ("replica_groups={}", [tuple(range(8))]),
    ("source_target_pairs={{0,4},{1,5},{2,6},{3,7}}", COLUMNS),
    ("replica_groups=@something", None),
])
def test_groups_in_each_notation(text: str, groups: list[tuple[int, ...]] | None):
    assert replica_groups(f"channel_id=1, {text}, use_global_device_ids=true", 8) == groups


def test_groups_are_named_after_the_axes_of_the_mesh():
    mesh = {"data": 2, "fsdp": 4, "expert": 1, "tensor": 1}
    assert axes_of(ROWS, mesh) == ("fsdp", 4)
    assert axes_of(COLUMNS, mesh) == ("data", 2)
    assert axes_of([tuple(range(8))], mesh) == ("data+fsdp", 8)
    assert axes_of([(0, 1), (2, 3), (4, 5), (6, 7)], mesh) == ("fsdp in part", 2)
    assert axes_of([(i,) for i in range(8)], mesh)[1] == 1


def test_bytes_that_a_ring_sends():
    assert bytes_sent("all-gather", 100, 8) == 700
    assert bytes_sent("reduce-scatter", 800, 8) == 700
    assert bytes_sent("all-reduce", 800, 8) == 1400
    assert bytes_sent("all-to-all", 800, 8) == 700
    assert bytes_sent("collective-permute", 800, 8) == 800


ASYNC = """HloModule m

%wrapped (p: bf16[4,8]) -> bf16[32,8] {
  %p = bf16[4,8] parameter(0)
  ROOT %g = bf16[32,8] all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

ENTRY %main (x: bf16[4,8]) -> f32[] {
  %x = bf16[4,8] parameter(0)
  %a = ((bf16[4,8]), bf16[32,8], u32[]) async-start(%x), async_execution_thread="sparsecore", calls=%wrapped
  %o = ((), (), s32[1]) custom-call-start(), async_execution_thread="sparsecore", called_computations={%wrapped}
  %b = (bf16[4,8], bf16[32,8]) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %c = bf16[4,8] all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%sum
  %d = bf16[32,8] all-gather-done(%b)
  ROOT %e = bf16[4,8] all-reduce(%x), replica_groups={}, to_apply=%sum
}
"""


def test_collectives_that_start_and_finish_apart_are_asynchronous():
    """Also those that stand inside what another core runs. A group of one device moves nothing."""
    rows = traffic(Walk(parse(ASYNC)).runs, {"data": 1, "fsdp": 8})
    assert [(row.kind, row.axes, row.asynchronous, row.count, row.bytes_sent) for row in rows] == [
        ("all-gather", "fsdp", True, 3, 3 * 7 * 64), ("all-reduce", "fsdp", False, 1, 2 * 7 * 64 // 8)]


FUSED = """HloModule m

%start (p.1: bf16[4,8]) -> bf16[32,8] {
  %p.1 = bf16[4,8] parameter(0)
  ROOT %g.1 = bf16[32,8] all-gather(%p.1), channel_id=7, GROUPS, frontend_attributes={chain_id="CHAIN"}
}

%async_collective_fusion.1 (p.2: bf16[4,8]) -> f32[4,4] {
  %p.2 = bf16[4,8] parameter(0)
  %g.2 = bf16[32,8] all-gather(%p.2), channel_id=7, GROUPS, frontend_attributes={chain_id="CHAIN"}
  %w = bf16[8,4] constant({...})
  ROOT %c = f32[4,4] dot(%p.2, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%done (p.3: bf16[4,8]) -> bf16[32,8] {
  %p.3 = bf16[4,8] parameter(0)
  ROOT %g.3 = bf16[32,8] all-gather(%p.3), channel_id=7, GROUPS, frontend_attributes={chain_id="CHAIN"}
}

%all-reduce-scatter.2 (p.4: f32[16,8]) -> f32[2,8] {
  %p.4 = f32[16,8] parameter(0)
  %r = f32[16,8] all-reduce(%p.4), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %i = s32[] constant(0)
  ROOT %s = f32[2,8] dynamic-slice(%r, %i, %i), dynamic_slice_sizes={2,8}
}

ENTRY %main (x: bf16[4,8], y: f32[16,8]) -> f32[2,8] {
  %x = bf16[4,8] parameter(0)
  %y = f32[16,8] parameter(1)
  %async-collective-start = bf16[32,8] fusion(%x), kind=kCustom, calls=%start
  %between = f32[4,4] fusion(%x), kind=kCustom, calls=%async_collective_fusion.1
  %async-collective-done = bf16[32,8] fusion(%x), kind=kCustom, calls=%done
  ROOT %scattered = f32[2,8] fusion(%y), kind=kCustom, calls=%all-reduce-scatter.2
}
"""


def test_collectives_that_tpu_programs_hide_in_fusions():
    """The three fusions of one gather are one gather, and the matmul between counts; another chain is another one."""
    def rows(text: str) -> list[tuple[str, bool, int, int]]:
        walk = Walk(parse(text.replace("GROUPS", "replica_groups=mesh['data'=1,'fsdp'=8] {'fsdp'}")))
        assert flops(walk) == 2 * 4 * 8 * 4
        return [(row.kind, row.asynchronous, row.count, row.bytes_sent)
                for row in traffic(walk.runs, {"data": 1, "fsdp": 8})]

    scattered = ("reduce-scatter", False, 1, 16 * 8 * 4 * 7 // 8)
    assert rows(FUSED.replace("CHAIN", "0")) == [("all-gather", True, 1, 64 * 7), scattered]
    two = FUSED.replace("CHAIN", "0", 2).replace("CHAIN", "1")
    assert rows(two) == [("all-gather", True, 2, 2 * 64 * 7), scattered]


def test_a_compiled_loop_over_gathered_weights_costs_what_a_hand_counts():
    """Five turns, each an all-gather of (16, 32) float32 over 4 devices and a matmul of (8, 16) with it."""
    mesh = mesh_of((2, 4, 1))

    def run(w_LDF: jax.Array, x_BD: jax.Array) -> jax.Array:
        def turn(x_BD: jax.Array, w_DF: jax.Array) -> tuple[jax.Array, None]:
            whole_DF = jax.lax.all_gather(w_DF, "fsdp", axis=0, tiled=True)
            y_BF = jnp.tanh(x_BD @ whole_DF)
            return jax.lax.dynamic_slice_in_dim(y_BF, 3, 16, 1), None

        return jax.lax.scan(turn, x_BD, w_LDF)[0]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(None, "fsdp"), P("data")), out_specs=P("data"), check_vma=False)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec))
              for shape, spec in (((5, 16, 32), P(None, "fsdp")), ((16, 16), P("data")))]
    with jax.set_mesh(mesh):
        walk = Walk(parse(jax.jit(mapped).lower(*shapes).compile().as_text()))
    assert flops(walk) == 5 * 2 * 8 * 16 * 32
    (gathers,) = traffic(walk.runs, dict(mesh.shape))
    assert (gathers.kind, gathers.axes, gathers.devices, gathers.count) == ("all-gather", "fsdp", 4, 5)
    assert gathers.bytes_sent == 5 * math.prod((16, 32)) * 4 * 3 // 4


def test_every_branch_of_a_conditional_counts():
    text = loop_text(0, 6, 1).replace("while(%first), condition=%condition, body=%body",
                                      "conditional(%start, %first, %first), branch_computations={%body, %body}")
    module = parse(text)
    assert isinstance(module, Module)
    walk = Walk(module)
    assert (flops(walk), walk.branches) == (2 * 512, 1)
