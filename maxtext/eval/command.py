"""`maxtext eval` and `maxtext generate`: their command lines, and how they tell what came of it.

They import the parts that do the work (offline.py, ask.py) after the options are read, so that help and a wrong option
answer at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from maxtext.config.arguments import Arguments
from maxtext.config.load import ConfigError
from maxtext.config.show import print_problems

if TYPE_CHECKING:
    from maxtext.eval.completion import Completion
    from maxtext.eval.opened import Weights

Found = TypeVar("Found")


def run_eval(argv: Sequence[str], open_transformers: Callable[[str], Weights]) -> int:
    """`maxtext eval`. Returns the exit status: 0 done, 2 a mistake in what was asked for.

    Args:
      open_transformers: opens a transformers folder. It comes from the caller, as conversion is no part of evaluation;
        its errors pass through.
    """
    parser = _parser("eval", "Held-out sets and downstream tasks on a checkpoint, or on a transformers folder, which "
                     "is only read.", "eval.rows=truncated eval.batch=64 mesh.fsdp=8")
    parser.add_argument("--config", metavar="CONFIG", help="settings over the run's own, such as eval/olmo3_downstream")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="only these held-out sets (with --tasks alone: none)")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks (with --sets alone: none)")
    parser.add_argument("--output", metavar="FILE.json", help="where the numbers go (eval_<run>_<step>.json, or "
                        "eval_<folder>.json)")
    options = parser.parse_intermixed_args(argv)
    # `--tasks a b eval.batch=4`: an option that takes several words takes the overrides too.
    options.overrides += _take_overrides(options.sets) + _take_overrides(options.tasks)
    import jax

    from maxtext.eval.offline import evaluate, output_file, record, table
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    output = None

    def known(called: str) -> None:
        nonlocal output
        output = output_file(options.output, called)

    found = _told(lambda: evaluate(
        options.model, open_transformers, overrides=options.overrides, step=options.step, config=options.config,
        sets=options.sets, tasks=options.tasks, known=known))
    if found is None:
        return 2
    if jax.process_index() == 0:
        assert output is not None
        output.write_text(json.dumps(record(found), indent=1) + "\n")
        print(found.where if found.step is None else f"{found.where} update {found.step}")
        print(table(found.metrics))
        print(f"written to {output}")
    return 0


def run_generate(argv: Sequence[str], open_transformers: Callable[[str], Weights]) -> int:
    """`maxtext generate`. Returns the exit status: 0 done, 2 a mistake in what was asked for.

    Args:
      open_transformers: as of `run_eval`.
    """
    parser = _parser("generate", "Texts that a checkpoint, or a transformers folder, goes on from; the model is only "
                     "read.", "train.compute_dtype=float32 mesh.tensor=2")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="to go on from; repeatable")
    parser.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; in a .jsonl file each line is a "
                        "JSON string, or an object with a prompt")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="most tokens added to each (64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among this many likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample among the likeliest tokens that "
                        "together have this probability (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    parser.add_argument("--stop", action="append", default=[], metavar="ID_OR_TEXT", help="what ends a completion, "
                        "beside the end of a document; repeatable")
    parser.add_argument("--context", type=int, metavar="N", help="most tokens of a prompt and its completion (those "
                        "that the model was trained with)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json or a SentencePiece *.model; by default "
                        "that beside the weights, or of the run's data")
    parser.add_argument("--eos", metavar="TOKEN", help="end of a document, where the tokenizer does not say it")
    parser.add_argument("--json", action="store_true", help="one JSON object a line: prompt, text, ids, stopped")
    options = parser.parse_intermixed_args(argv)
    import jax

    from maxtext.eval.ask import complete, read_prompts
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    found = _told(lambda: complete(
        options.model, read_prompts(options.prompt, options.prompts_file), open_transformers,
        overrides=options.overrides, step=options.step, tokens=options.tokens, temperature=options.temperature,
        top_k=options.top_k, top_p=options.top_p, seed=options.seed, stop=options.stop, context=options.context,
        tokenizer=options.tokenizer, eos=options.eos, note=lambda text: print(text, file=sys.stderr)))
    if found is None:
        return 2
    if jax.process_index() == 0:
        seconds, completions = found
        _print(completions, options.json, seconds)
    return 0


def _parser(verb: str, description: str, example: str) -> argparse.ArgumentParser:
    """What both verbs are asked: which model, at which step, with which overrides."""
    parser = Arguments(prog=f"maxtext {verb}", description=description)
    parser.add_argument("model", metavar="MODEL", help="a run, an imported model, a folder of checkpoints, one step's, "
                        "or a transformers folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"over the model's own config, such as "
                        f"{example}")
    parser.add_argument("--step", type=int, help="this step; the newest good one by default")
    return parser


def _told(action: Callable[[], Found]) -> Found | None:
    """What an action gives; None after a mistake in what was asked for, which is told."""
    try:
        return action()
    except ConfigError as error:
        print_problems(error)
    except _mistakes() as error:
        print(error, file=sys.stderr)
    return None


def _mistakes() -> tuple[type[Exception], ...]:
    """What a person asked for wrongly; each message says what to do."""
    from maxtext.checkpoint.manager import CheckpointError
    from maxtext.data import DataError
    from maxtext.eval.catalogue import TaskError
    from maxtext.eval.offline import EvaluationError
    from maxtext.eval.opened import NoModelError
    from maxtext.parallel.mesh import MeshError

    return EvaluationError, NoModelError, CheckpointError, DataError, TaskError, MeshError


def _take_overrides(words: list[str] | None) -> list[str]:
    taken = [word for word in words or () if "=" in word]
    for word in taken:
        assert words is not None
        words.remove(word)
    return taken


def _print(completions: Sequence[Completion], as_json: bool, seconds: float) -> None:
    for i, one in enumerate(completions):
        if as_json:
            print(json.dumps({"prompt": one.prompt, "text": one.text, "ids": one.ids, "stopped": one.stopped}))
        else:
            print(*["-" * 20] * (i > 0), one.prompt + one.text, sep="\n")
    count = sum(len(one.ids) for one in completions)
    print(f"{count} tokens in {seconds:.1f} s, compilation included", file=sys.stderr)
