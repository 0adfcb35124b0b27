"""The tiny model of each family as a folder of transformers, made again from its committed trace without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from maxtext.convert import safetensors
from tests.convert.folders import ORACLES
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
    with safetensors.Writer(str(target / "model.safetensors"), {key: tuple(shape) for key, shape in shapes.items()},
                            np.dtype(np.float32)) as writer:
        for key, shape in shapes.items():
            writer.write(key, draw(key, shape, config["model_type"]))
    return target
