"""The functions of `import maxtext as mt`: what the verbs of the command line do, with Python's values in and out.

Each raises what the command line tells as a line: ConfigError, DataError, MeshError, CheckpointError and so on, all
ValueErrors whose message says what to do; TrainingError and LaunchError are RuntimeErrors.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxtext.config.schema import Config
    from maxtext.convert.loaded import Loaded
    from maxtext.eval.completion import Completion
    from maxtext.eval.offline import Evaluation
    from maxtext.model.decoder import Decoder

Override = str | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run, where `train` left it.

    Attributes:
      run_dir: its folder, which `evaluate`, `generate` and `weights` open.
      step: updates done.
      stopped_by: what ended it before the last update, such as "SIGTERM"; None: it is complete.
      trained: whether anything was done; False: it was complete before.
    """

    run_dir: str
    step: int
    stopped_by: str | None
    trained: bool

    @functools.cached_property
    def metrics(self) -> list[dict[str, float]]:
        """One dict an update, by the names of metrics.jsonl, from the first update of the run on."""
        from maxtext.report.run_files import read_metrics

        return read_metrics(os.path.join(self.run_dir, "metrics.jsonl"))


def load(config: str | os.PathLike[str], *overrides: Override) -> Config:
    """A config, checked: `load("quickstart", "optim.lr=1e-3", {"train.steps": 20})`.

    Args:
      config: a YAML, or its name in configs/.
      overrides: `key=value` texts, as on the command line, or mappings of dotted keys to values.

    Raises:
      ConfigError: with every fault at once.
    """
    from maxtext.config import load as loading

    return loading.load(loading.find_config(config), _texts(overrides))


def train(cfg: Config, *, origins: dict[str, str] | None = None,
          listener: Callable[[int, Mapping[str, float]], None] | None = None) -> Trained:
    """Trains, or continues, a run on every device of the job; a complete run is left as it is.

    Args:
      cfg: the run.
      origins: where each value came from (`load_with_origins`), for the config that is written into the run directory.
      listener: is given the number and the metrics of each update, in every process of the job.

    Raises:
      LaunchError: the processes of the job cannot be joined.
      And what `maxtext.train.loop.train` raises.
    """
    from maxtext.parallel.launch import join_processes
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    found = join_processes()
    import jax

    from maxtext.train import loop

    outcome = loop.train(cfg, origins, found=found, listener=listener)
    wanted = cfg.log.report and jax.process_index() == 0
    if wanted and (outcome.trained or not os.path.exists(f"{cfg.run_dir}/report.html")):
        write_report(cfg.run_dir)
    return Trained(cfg.run_dir, outcome.step, outcome.stopped_by, outcome.trained)


def write_report(run_dir: str) -> None:
    """Writes report.html and loss.png. One that fails is a warning: the run itself is done and saved."""
    from maxtext.config.reason import placed
    from maxtext.report.write import ReportError
    from maxtext.report.write import write_report as write

    try:
        print("report:", *write(run_dir))
    except (ReportError, OSError) as error:
        print(f"warning: no report was written: {placed(error)}", file=sys.stderr)


def evaluate(model: str | os.PathLike[str], *overrides: Override, sets: Sequence[str] | None = None,
             tasks: Sequence[str] | None = None, step: int | None = None, config: str | None = None) -> Evaluation:
    """Held-out sets and downstream tasks on a model, which is only read.

    Args:
      model: a run, an imported model, a folder of checkpoints, one step's, or a transformers folder.
      overrides: over the model's own config, such as "eval.batch=64".
      sets, tasks: only these; None: all of its config, or none where the other is given.
      step: of a run; None: the newest good one.
      config: settings over its own, such as "eval/olmo3_downstream".

    Raises:
      ConfigError, ConvertError, EvaluationError, NoModelError, CheckpointError, DataError, TaskError, MeshError.
    """
    from maxtext.eval import offline
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    return offline.evaluate(os.fspath(model), open_transformers, overrides=_texts(overrides), step=step, config=config,
                            sets=sets, tasks=tasks)


def generate(model: str | os.PathLike[str], prompts: str | Sequence[str], *overrides: Override,
             **options: Any) -> list[Completion]:
    """What a model goes on with after each prompt: `generate("runs/mine", ["def "], tokens=20)[0].text`.

    Args:
      model: as of `evaluate`.
      prompts: a text, or several.
      overrides: over the model's own config, such as "train.compute_dtype=float32".
      options: step, tokens, temperature, top_k, top_p, seed, stop, context, tokenizer and eos, as of
        `maxtext.eval.ask.complete`.

    Raises:
      ConfigError, ConvertError, NoModelError, CheckpointError, DataError, MeshError.
    """
    from maxtext.eval import ask
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    texts = ask.read_prompts([prompts] if isinstance(prompts, str) else prompts, None)
    return ask.complete(os.fspath(model), texts, open_transformers, overrides=_texts(overrides), **options)[1]


def weights(model: str | os.PathLike[str], *overrides: Override, step: int | None = None) -> Decoder:
    """The float32 weights of a model on all devices: a tree of arrays that prints as a table of them.

    Args:
      model, overrides, step: as of `evaluate`.

    Raises:
      ConfigError, ConvertError, NoModelError, CheckpointError, MeshError.
    """
    from maxtext.eval.opened import config_over, on_these_devices, open_subject
    from maxtext.parallel.mesh import make_mesh
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    with open_subject(os.fspath(model), step, open_transformers) as subject:
        cfg = on_these_devices(config_over(subject.config_text, _texts(overrides)), _texts(overrides))
        return subject.params(cfg.model, make_mesh(cfg))


def open_transformers(path: str, note: Callable[[str], None] = print) -> Loaded:
    """Opens a transformers folder, for what takes one beside our own models. Raises ConvertError."""
    from maxtext.convert.loaded import Loaded

    return Loaded(path, note)


def _texts(overrides: Sequence[Override]) -> list[str]:
    """Overrides as the command line has them. Raises ConfigError for values that no config can hold."""
    from maxtext.config.dump import value_text
    from maxtext.config.load import ConfigError

    texts: list[str] = []
    problems: list[str] = []
    for one in overrides:
        if isinstance(one, str):
            texts.append(one)
            continue
        for key, value in one.items():
            try:
                texts.append(f"{key}={value_text(value)}")
            except TypeError as error:
                problems.append(f"{key}: {error}")
    if problems:
        raise ConfigError(problems)
    return texts
