"""The tiny model of each family as a folder of transformers, made again from its committed trace without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.convert.folders import ORACLES, write_weights
from tests.oracles.families.draw import draw

FOLDER = ORACLES / "families"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.npz")))


def trace_of(name: str) -> Path:
    return FOLDER / f"{name}.npz"


def write_folder(name: str, target: Path) -> Path:
    """config.json and model.safetensors, as transformers wrote them."""
    with np.load(trace_of(name)) as file:
        config, shapes = (json.loads(str(file[text])) for text in ("config", "shapes"))
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    write_weights(target, {key: draw(key, shape, config["model_type"]) for key, shape in shapes.items()})
    return target
