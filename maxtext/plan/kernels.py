"""The custom kernels of a compiled program: their names, and the FLOPs that they declare or that follow from shapes."""

from __future__ import annotations

import math
import re

from maxtext.plan.hlo import Run, arrays

_KERNEL = re.compile(r'custom_call_target="([^"]*(?:tpu_custom_call|triton|mosaic|__cudnn\$|__cublas\$)[^"]*)"')


def kernel_name(run: Run) -> str | None:
    """What a custom kernel is called: by its author for Mosaic and Triton, by the library of NVIDIA; None of others."""
    found = _KERNEL.search(run.instruction.attributes) if run.instruction.opcode == "custom-call" else None
    if found is None:
        return None
    if found[1].startswith("__cu"):
        return found[1].removeprefix("__").replace("$", " ")
    return re.sub(r"([.\d]|\.(clone|remat\d*))+$", "", run.instruction.name) or found[1]


def is_attention(name: str) -> bool:
    """Whether a kernel of this name is one of attention: splash, flash or cuDNN's."""
    return re.search("splash|flash|fmha|attention", name) is not None


def kernel_flops(run: Run) -> int | None:
    """FLOPs of one execution of a custom kernel; None when they are not known, 0 when it is no kernel."""
    name, one = kernel_name(run), run.instruction
    if name is None:
        return 0
    # Where a kernel of another project declares none, ours stand in the name of the scope around it (`kernels.splash`).
    declared = (re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', one.attributes)
                or re.search(r'op_name="[^"]*kernel_flops_(\d+)', one.attributes))
    if declared:
        return int(declared[1])
    operands = [arrays(run.computation.instructions[operand].type) for operand in one.operands]
    if name.startswith("cublas"):
        dims = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', one.attributes)
        if dims is None:
            return None
        contracted = [operands[0][0][1][int(dim)] for dim in re.findall(r"\d+", dims[1])]
        return 2 * math.prod(arrays(one.type)[0][1]) * math.prod(contracted)
    scores = re.search(r'"intermediate_tensor_shape":\s*\{[^[]*"dimensions":\s*\[([^\]]*)\]', one.attributes)
    if not name.startswith("cudnn fmha") or scores is None:
        return None
    *rows, queries, keys = (int(dim) for dim in re.findall(r"\d+", scores[1]))
    window = re.search(r'"sliding_window_length":\s*"?([1-9]\d*)', one.attributes)
    pairs = queries * keys
    if window:
        seen = min(int(window[1]), keys)
        pairs = seen * queries - seen * (seen - 1) // 2
    elif re.search(r'"mask_type":\s*"\w*CAUSAL', one.attributes):
        pairs //= 2
    return 2 * (5 if name.endswith("Backward") else 2) * math.prod(rows) * pairs * operands[0][0][1][-1]
