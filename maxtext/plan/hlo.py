"""Reads the text of a compiled XLA program: computations, instructions, how often each runs, and what it costs.

Everything is of one device. A loop body counts as often as the loop turns. Where the text does not tell a trip count
the body counts once and the loop is listed in `Walk.unknown_loops`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

# Bits of one number; what is not listed (token, opaque) takes no memory.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32,
         "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{\s*$")
_END = re.compile(r"^\}(, execution_thread=\"[^\"]*\")?\s*$")
_START = re.compile(r"^\s+(ROOT )?%?[\w.\-]+ = ")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses: of a constant its value, of a parameter its number
    attributes: str
    root: bool

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-<>]+)", self.attributes)
        return found[1] if found else None


@dataclasses.dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(one for one in self.instructions.values() if one.root)

    def parameter(self, number: int) -> Instruction:
        wanted = str(number)
        return next(one for one in self.instructions.values() if one.opcode == "parameter" and one.literal == wanted)


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction, how often a step runs it, and whether other work may run meanwhile."""

    instruction: Instruction
    computation: Computation
    times: int
    asynchronous: bool
    outer: str | None  # of an instruction inside a fusion: the computation that the fusion stands in

    @property
    def fused(self) -> bool:
        """Inside a fusion, whose own line carries what XLA estimates for all of it."""
        return self.outer is not None


@dataclasses.dataclass
class Module:
    computations: dict[str, Computation]
    entry: str


def arrays(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each array of a type; a tuple has several."""
    return [(dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
            for dtype, sizes in _ARRAY.findall(type_text)]


def byte_size(type_text: str) -> int:
    """Bytes of all arrays of a type, without padding."""
    return sum(math.prod(shape) * (8 if dtype.startswith("f8") else _BITS.get(dtype, 0)) for dtype, shape
               in arrays(type_text)) // 8


def parse(text: str) -> Module:
    """The computations of a module's text."""
    computations: dict[str, Computation] = {}
    current, entry, lines = None, "", list[str]()
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head:
                current = computations[head[2]] = Computation(head[2])
                entry = head[2] if head[1] else entry
        elif _END.match(line):
            _add(current, lines)
            current, lines = None, []
        elif _START.match(line) or not lines:
            _add(current, lines)
            lines = [line]
        else:  # what a kernel says of itself may hold line breaks
            lines.append(line)
    if not entry:
        raise ValueError("the text holds no ENTRY computation: it is not an HLO module")
    return Module(computations, entry)


def _add(computation: Computation, lines: list[str]) -> None:
    line = " ".join(lines)
    if " = " in line:
        instruction = _instruction(line)
        computation.instructions[instruction.name] = instruction


def _instruction(line: str) -> Instruction:
    left, right = line.strip().split(" = ", 1)
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    rest = right[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1:closing]
    opcode = rest[:opening].strip()
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(inside))
    return Instruction(left.removeprefix("ROOT ").lstrip("%"), right[:end], opcode, operands, inside.strip(),
                       rest[closing + 1:], left.startswith("ROOT "))


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[opening:]):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return opening + found.start()
    raise ValueError(f"parentheses do not match in {text[:80]!r}")


class Walk:
    """Every instruction that a step runs, with how often.

    Attributes:
      unknown_loops: names of the loops whose trip count the text does not tell.
      named_loops: those that depend on the data and count as the scope around them says (`kernels.grouped_matmul`).
      branches: number of conditionals; all their branches are counted, so costs are an upper bound there.
    """

    def __init__(self, module: Module):
        self.module, self.unknown_loops, self.named_loops, self.branches = module, list[str](), list[str](), 0
        self.runs = list(self._walk(module.entry, 1, False, None))

    def _walk(self, name: str, times: int, asynchronous: bool, outer: str | None) -> Iterator[Run]:
        computation = self.module.computations[name]
        for one in computation.instructions.values():
            started = asynchronous or one.opcode.endswith("-start")
            yield Run(one, computation, times, started, outer)
            if one.opcode == "while":
                trips = self._trips(one, computation)
                for attribute in ("condition", "body"):
                    yield from self._walk(one.called(attribute) or "", times * trips, asynchronous, outer)
            elif one.opcode == "conditional":
                self.branches += 1
                for branch in _branches(one):
                    yield from self._walk(branch, times, asynchronous, outer)
            elif one.opcode in ("fusion", "call", "call-start", "async-start", "custom-call-start"):
                inner = one.called("calls") or one.called("to_apply") or _offloaded(one)
                if inner is not None:
                    inside = outer or (name if one.opcode == "fusion" else None)
                    yield from self._walk(inner, times, started, inside)

    def _trips(self, loop: Instruction, computation: Computation) -> int:
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        trips = int(known[1]) if known else counted_trips(self.module, loop, computation)
        if trips is not None:
            return trips
        named = re.search(r'op_name="[^"]*loop_trips_(\d+)/while"', loop.attributes)
        (self.named_loops if named else self.unknown_loops).append(loop.name)
        return int(named[1]) if named else 1


def _offloaded(one: Instruction) -> str | None:
    """What a custom call starts on another core, such as the SparseCore of a TPU."""
    found = re.search(r"called_computations=\{%?([\w.\-]+)\}", one.attributes)
    return found[1] if found else None


def _branches(one: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
    if listed:
        return _NAME.findall(listed[1])
    return [name for name in (one.called("true_computation"), one.called("false_computation")) if name]


def counted_trips(module: Module, loop: Instruction, computation: Computation) -> int | None:
    """Trips of `for (i = start; i < end; i += step)`, when condition, body and start show constants; else None."""
    condition = module.computations[loop.called("condition") or ""]
    compare, scope = _compare(module, condition)
    if compare is None:
        return None
    sides = [scope.get(name) for name in compare.operands]
    ends = [_constant(side) for side in sides]
    direction = re.search(r"direction=(\w+)", compare.attributes)
    if direction is None or sum(end is not None for end in ends) != 1:
        return None
    at = 0 if ends[0] is None else 1
    counter, end = sides[at], ends[1 - at]
    if counter is None or counter.opcode != "get-tuple-element" or (direction[1], at) not in (("LT", 0), ("GT", 1)):
        return None
    index = int(re.search(r"index=(\d+)", counter.attributes)[1])  # type: ignore[index]
    start = _element(computation, loop.operands[0], index)
    step = _step(module, module.computations[loop.called("body") or ""], index)
    assert end is not None
    return None if start is None or not step else max(0, -(-(end - start) // step))


def _compare(module: Module, condition: Computation) -> tuple[Instruction | None, dict[str, Instruction]]:
    """The comparison that a condition ends in, and what its operands are; a fusion around it is looked into."""
    root = condition.root
    while root.opcode in ("copy", "bitcast"):
        root = condition.instructions[root.operands[0]]
    if root.opcode == "compare":
        return root, condition.instructions
    if root.opcode != "fusion":
        return None, {}
    inner = module.computations[root.called("calls") or ""]
    if inner.root.opcode != "compare":
        return None, {}
    scope = dict(inner.instructions)
    for one in inner.instructions.values():
        if one.opcode == "parameter":
            scope[one.name] = condition.instructions[root.operands[int(one.literal)]]
    return inner.root, scope


def _constant(one: Instruction | None) -> int | None:
    if one is None or one.opcode != "constant" or not re.fullmatch(r"-?\d+", one.literal):
        return None
    return int(one.literal)


def _element(computation: Computation, name: str, index: int) -> int | None:
    """The constant that element `index` of a tuple holds, or None."""
    one = computation.instructions.get(name)
    if one is not None and one.opcode == "tuple":
        one = computation.instructions.get(one.operands[index])
        while one is not None and one.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            one = computation.instructions.get(one.operands[0])
        return _constant(one)
    return None


def _step(module: Module, body: Computation, index: int) -> int | None:
    """What a body adds to element `index` of its tuple: a constant, or None."""
    one = body.instructions.get(body.root.operands[index]) if body.root.opcode == "tuple" else None
    while one is not None and one.opcode in ("copy", "bitcast"):
        one = body.instructions.get(one.operands[0])
    scope = body.instructions
    if one is not None and one.opcode == "fusion":
        inner = module.computations[one.called("calls") or ""]
        outer = one
        one, scope = inner.root, dict(inner.instructions)
        for part in inner.instructions.values():
            if part.opcode == "parameter":
                scope[part.name] = body.instructions[outer.operands[int(part.literal)]]
    if one is None or one.opcode != "add":
        return None
    added = [value for value in (_constant(scope.get(name)) for name in one.operands) if value is not None]
    return added[0] if len(added) == 1 else None


def matmul_flops(run: Run) -> int:
    """Multiplications and additions of one execution of a dot or convolution, 0 of anything else."""
    one, scope = run.instruction, run.computation.instructions
    if one.opcode == "dot":
        (_, left), = arrays(scope[one.operands[0]].type)
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        contracted = [left[int(dim)] for dim in dims[1].split(",") if dim] if dims else []
        return 2 * math.prod(arrays(one.type)[0][1]) * math.prod(contracted)
    if one.opcode == "convolution":
        return _convolution_flops(one, arrays(scope[one.operands[0]].type)[0][1],
                                  arrays(scope[one.operands[1]].type)[0][1])
    if one.opcode == "custom-call" and "__onednn$matmul" in one.attributes:
        left = arrays(scope[one.operands[0]].type)[0][1]
        return 2 * math.prod(arrays(one.type)[0][1]) * left[-1]
    return 0


def _convolution_flops(one: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """XLA for TPU writes matmuls as convolutions, batch dims too; only the positions that meet real input count."""
    output = arrays(one.type)[0][1]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    assert labels is not None, one.attributes[:200]
    window = re.search(r"window=\{([^}]*)\}", one.attributes)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    spatial = len(labels[1]) - 2

    def setting(name: str, dim: int, default: str = "1") -> int:
        each = settings[name].split("x") if name in settings else [default] * spatial
        return int(each[dim].split("_")[0])

    valid = 1
    for dim in range(spatial):
        sizes = (shape[label.index(str(dim))] for shape, label in zip((left, right, output), labels.groups(),
                                                                      strict=True))
        valid *= _valid_positions(*sizes, setting("pad", dim, "0"), setting("stride", dim), setting("lhs_dilate", dim),
                                  setting("rhs_dilate", dim))
    features = output[labels[3].index("b")] * output[labels[3].index("f")] * right[labels[2].index("i")]
    return 2 * valid * features


@functools.lru_cache(maxsize=4096)
def _valid_positions(inputs: int, kernel: int, outputs: int, low: int, stride: int, dilate: int, spread: int) -> int:
    """How many pairs of an output position and a kernel position read an input and not padding or a hole."""
    if inputs == 1 and dilate == 1:  # the position 0 alone
        reached = low - np.arange(kernel, dtype=np.int64) * spread
        return int(((reached >= 0) & (reached % stride == 0) & (reached // stride < outputs)).sum())
    position = np.arange(outputs, dtype=np.int64)[:, None] * stride - low + np.arange(kernel)[None] * spread
    real = (position >= 0) & (position % dilate == 0) & (position // dilate < inputs)
    return int(real.sum())


def holds_matmul(module: Module, one: Instruction) -> bool:
    """Whether an instruction is a matmul, or a fusion with one inside."""
    if one.opcode != "fusion":
        return one.opcode in ("dot", "convolution")
    inner = module.computations[one.called("calls") or ""]
    return any(holds_matmul(module, part) for part in inner.instructions.values())


def estimated_cycles(run: Run) -> int:
    """XLA's own estimate for one execution, of TPU programs; 0 where there is none."""
    found = re.search(r'"estimated_cycles":"(\d+)"', run.instruction.attributes)
    cycles = int(found[1]) if found else 0
    return cycles if cycles < 1 << 62 else 0  # the largest number stands for "not known"
