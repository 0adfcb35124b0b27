"""Draws the pictures of docs/parallelism.md from the code that they show: `python scripts/draw_parallelism.py`.

What each axis splits is read from `RULES`, who holds which chunk of a sequence from `parallel/sequence.py`; the
schedule of a pipeline is the arithmetic of `parallel/pipeline.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from maxtext.parallel.sequence import holder
from maxtext.parallel.sharding import RULES

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
COLOURS = ("#4477aa", "#ee9944", "#44aa88", "#cc6688", "#7788cc", "#bbaa33", "#66bbdd", "#999999")  # of devices
IDLE, WHOLE, LINE, INK = "#eeeeee", "#c9c9d4", "#ffffff", "#222233"
CELL = 22
AXES = ("data", "pipeline", "fsdp", "expert", "context", "tensor")


def text(x: float, y: float, said: str, size: int = 13, anchor: str = "start", colour: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{said}</text>'


def box(x: float, y: float, colour: str, said: str = "", width: float = CELL, height: float = CELL) -> str:
    shape = (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="{LINE}" '
             'stroke-width="1.5"/>')
    ink = INK if colour in (IDLE, WHOLE) else LINE
    return shape + (text(x + width / 2, y + height / 2 + 4, said, 11, "middle", ink) if said else "")


def grid(x: float, y: float, colours: Sequence[Sequence[str]]) -> str:
    return "".join(box(x + CELL * j, y + CELL * i, colour)
                   for i, row in enumerate(colours) for j, colour in enumerate(row))


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="sans-serif" role="img" aria-label="{title}">\n<title>{title}</title>\n'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n")


def mesh() -> str:
    """What two devices of each axis hold: their part of a batch, of a layer's matrix, of the layers, of the experts."""
    two, parts = COLOURS[:2], [text(20, 24, "colours: two devices of the axis; grey: each has all of it", 12)]
    heads = ("batch: sequences down, positions across", "a matrix at rest: width in down, out across", "layers",
             "experts")
    left = (110, 330, 560, 690)
    parts += [text(x, 46 + 14 * i, line, 11) for x, head in zip(left, heads, strict=True)
              for i, line in enumerate(head.split(": ") if ": " in head else [head])]
    for number, axis in enumerate(AXES):
        y = 74 + number * 112
        parts.append(text(20, y + 50, axis, 15))
        # Positions of the axis context lie as chunks of holder(); of tensor, between layers, in two runs.
        across = [two[holder(j, 2)[0]] for j in range(4)] if axis in RULES["sequence"] else \
                 [two[j // 2] for j in range(4)] if axis in RULES["residual"] else [WHOLE] * 4
        batch = [[two[i // 2]] * 4 if axis in RULES["batch"] else across for i in range(4)]
        matrix = [[two[i // 2] if axis in RULES["embed"] else two[j // 2] if axis in RULES["mlp"] else WHOLE
                   for j in range(4)] for i in range(4)]
        parts += [grid(left[0], y, batch), grid(left[1], y, matrix)]
        for i in range(4):
            layer = two[i // 2] if axis in RULES["stage"] else WHOLE
            expert = two[i // 2] if axis in RULES["expert"] else WHOLE
            parts.append(box(left[2], y + CELL * i, layer, str(i), 80))
            parts.append(box(left[3], y + CELL * i, expert, str(i), 80))
    return svg(800, 74 + len(AXES) * 112, "What the devices of each mesh axis share", parts)


def schedule(stages: int, rounds: int, micro_batches: int) -> list[list[int | None]]:
    """Stage -> tick -> the micro-batch that it computes, None while it waits; as `_ticks` of the pipeline counts."""
    passes = rounds * micro_batches
    return [[(tick - stage) % micro_batches if 0 <= tick - stage < passes else None
             for tick in range(passes + stages - 1)] for stage in range(stages)]


def pipeline(stages: int = 4, micro_batches: int = 4) -> str:
    """The same eight layers on four stages, in one round and in two."""
    parts, y = [], 30
    for rounds in (1, 2):
        table = schedule(stages, rounds, micro_batches)
        idle = (stages - 1) / (rounds * micro_batches + stages - 1)
        width = 44 // rounds  # of a cell: a tick of two rounds passes half as many layers
        parts.append(text(20, y, f"mesh.pipeline_rounds: {rounds}; forward pass, time to the right; idle {idle:.0%}"))
        for stage, row in enumerate(table):
            per_round = 8 // (stages * rounds)
            layers = [f"{first}" if per_round == 1 else f"{first}, {first + 1}" for first in
                      (turn * stages * per_round + stage * per_round for turn in range(rounds))]
            parts.append(text(20, y + 26 + stage * CELL, f"stage {stage}: layers {' and '.join(layers)}", 12))
            parts += [box(190 + tick * width, y + 11 + stage * CELL, IDLE if micro is None else COLOURS[micro],
                          "" if micro is None else str(micro), width) for tick, micro in enumerate(row)]
        y += 50 + stages * CELL
    return svg(560, y - 24, "Micro-batches in a pipeline of four stages", parts)


def context(devices: int = 4) -> str:
    """Pairs of chunks of a causal mask that each device computes."""
    chunks, size = 2 * devices, 26
    parts = [text(20, 24, "keys, in chunks of the sequence: from left to right", 12),
             text(20, 42, "queries: from top to bottom; colour: the device that holds them", 12)]
    work = [0.0] * devices
    for query in range(chunks):
        device = holder(query, devices)[0]
        work[device] += query + 0.5
        parts += [box(110 + key * size, 56 + query * size, COLOURS[device] if key <= query else IDLE,
                      "", size, size) for key in range(chunks)]
        parts.append(text(100, 74 + query * size, f"device {device}", 12, "end", COLOURS[device]))
    assert len(set(work)) == 1, work  # the point of the picture
    said = f"device i has chunks i and {chunks - 1} - i: each computes {work[0]:g} pairs of chunks"
    parts.append(text(20, 82 + chunks * size, said, 12))
    return svg(420, 96 + chunks * size, "Chunks of a sequence on the devices that share it", parts)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {"mesh.svg": mesh(), "pipeline.svg": pipeline(), "context.svg": context()}


def main() -> int:
    PICTURES.mkdir(exist_ok=True)
    for name, drawn in pictures().items():
        (PICTURES / name).write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
