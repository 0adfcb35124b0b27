"""A model that is only read: a checkpoint of a run, an imported model, or a folder in another format."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import jax
from jax.sharding import Mesh

from maxtext.checkpoint.manager import Checkpoints
from maxtext.checkpoint.manifest import scan
from maxtext.config.load import ConfigError, find_config, load, to_yaml
from maxtext.config.runs import no_run
from maxtext.config.schema import CheckpointConfig, Config, MeshConfig, ModelConfig
from maxtext.config.validate import mesh_problems
from maxtext.data.tokenizer import find_tokenizer
from maxtext.model.decoder import Decoder, abstract_decoder

STEP_PREFIX = "step_"
WHAT_TO_GIVE = "give a run, <output_dir>/<run_name>, one of its checkpoints, an imported model or a transformers folder"
CONVERTED_TOKENIZER = "tokenizer"  # folder beside the checkpoints of an imported model


class NoModelError(ValueError):
    """What was named holds no model to read; the message says why and what to do."""


class Weights(Protocol):
    """A model in another format, opened.

    Attributes:
      cfg: a run config around it.
      tokenizer: its tokenizer.json or tokenizer.model, None when it has neither.
    """

    cfg: Config
    tokenizer: Path | None

    def params(self, model: ModelConfig, mesh: Mesh) -> Decoder:
        """Its weights on a mesh."""
        ...


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, opened.

    Attributes:
      where: its folder.
      step: of the run; None for a model in another format.
      config_text: the config that it was saved with.
      tokenizer: a tokenizer.json or tokenizer.model that came with it, None when neither did.
      params: its weights on a mesh.
    """

    where: str
    step: int | None
    config_text: str
    tokenizer: Path | None
    params: Callable[[ModelConfig, Mesh], Decoder]


@contextlib.contextmanager
def open_subject(path: str, step: int | None, open_transformers: Callable[[str], Weights]) -> Iterator[Subject]:
    """Opens what `path` names: a run, a folder of checkpoints, one step's, or a transformers folder.

    Args:
      step: of a run; None: that of the path, or the newest good one.
      open_transformers: opens a transformers folder. It comes from the caller, as conversion is no part of reading;
        its errors pass through.

    Raises:
      NoModelError, CheckpointError: there is no such model.
    """
    if is_transformers(path):
        if step is not None:
            raise NoModelError(f"{path} is a transformers folder, which has no steps; leave --step away")
        weights = open_transformers(path)
        yield Subject(os.path.abspath(path), None, to_yaml(weights.cfg), weights.tokenizer, weights.params)
        return
    folder, asked = find_checkpoints(path, step)
    checkpoints = Checkpoints(str(folder), CheckpointConfig(), writer=False)
    try:
        step = checkpoints.latest() if asked is None else asked
        if step is None:
            raise NoModelError(f"{path}: no good checkpoint in {folder}; {WHAT_TO_GIVE}")

        def params(model: ModelConfig, mesh: Mesh) -> Decoder:
            restored = checkpoints.restore({"params": abstract_decoder(model, mesh)}, step, partial=True)
            assert restored is not None
            return restored.state["params"]

        beside = (folder.parent if folder.name == "checkpoints" else folder) / CONVERTED_TOKENIZER
        yield Subject(str(folder), step, checkpoints.config_text(step), find_tokenizer(beside), params)
    finally:
        checkpoints.close()


def is_transformers(path: str) -> bool:
    """Whether a folder has the config.json of transformers, and no checkpoints of ours."""
    return os.path.isfile(os.path.join(path, "config.json")) and not os.path.isdir(os.path.join(path, "checkpoints"))


def find_checkpoints(path: str, step: int | None) -> tuple[Path, int | None]:
    """The folder of checkpoints and the step that `path` names. Raises NoModelError when it names none."""
    root = Path(os.path.abspath(path))
    if root.name.startswith(STEP_PREFIX) and root.name.removeprefix(STEP_PREFIX).isdigit():
        return root.parent, int(root.name.removeprefix(STEP_PREFIX)) if step is None else step
    if (root / "checkpoints").is_dir():
        return root / "checkpoints", step
    if not root.is_dir() or all(entry.status == "foreign" for entry in scan(str(root))):
        raise NoModelError(f"{no_run(path, 'checkpoint')}; {WHAT_TO_GIVE}")
    return root, step


def config_over(saved: str, overrides: Sequence[str], config: str | None = None) -> Config:
    """The config that a model was saved with, under another config, under the overrides. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "checkpoint.yml").write_text(saved)
        bases = [os.path.join(folder, "checkpoint.yml")]
        if config is not None:
            bases.append(os.path.abspath(find_config(config)))
        Path(folder, "evaluation.yml").write_text(f"base: {json.dumps(bases)}\n")
        try:
            return load(Path(folder, "evaluation.yml"), overrides)
        except ConfigError as error:  # of files that are gone when it is read
            raise ConfigError(text.replace(bases[0], "the model's own config") for text in error.problems) from None


def on_these_devices(cfg: Config, overrides: Sequence[str], note: Callable[[str], None] = print) -> Config:
    """The run's mesh where it fits or was asked for, else all devices on `fsdp`; nothing is divided as for training."""
    devices = jax.device_count()
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, global_batch=devices,
                                                             gradient_accumulation_steps=1))
    if cfg.mesh.auto:  # it chooses for training
        return dataclasses.replace(cfg, mesh=MeshConfig(data=1, fsdp=devices, tensor=1))
    asked = any(word.startswith("mesh.") for word in overrides)
    if asked or not mesh_problems(cfg, devices):
        return cfg
    note(f"the run's mesh does not fit {devices} devices; using all of them on mesh.fsdp")
    return dataclasses.replace(cfg, mesh=MeshConfig(data=1, fsdp=devices, tensor=1))
