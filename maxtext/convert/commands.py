"""`maxtext convert import | export | trace | verify`: weights of other formats in and out, and proof that they fit.

Only the command lines are here, so that help and a wrong option answer at once; convert/actions.py does the work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import get_args

from maxtext.config.reason import placed
from maxtext.config.schema import Dtype
from maxtext.convert import ConvertError


def run(argv: Sequence[str]) -> int:
    """The verb. Returns the exit status: 0 done, 1 not the same model (verify), 2 a mistake in what was asked for."""
    options = _parser().parse_args(argv)
    from maxtext.convert import actions

    return _told(lambda: getattr(actions, options.action)(options))


def run_merge(argv: Sequence[str]) -> int:
    """`maxtext checkpoint merge`. Returns the exit status: 0 done, 2 a mistake in what was asked for, or a bad one."""
    parser = argparse.ArgumentParser(prog="maxtext checkpoint merge", description="The plain average of the weights of "
                                     "several checkpoints, as a new one.")
    parser.add_argument("out", metavar="OUT", help="new folder; train.init_from, eval and export open it")
    parser.add_argument("checkpoints", metavar="RUN[@STEP]", nargs="+",
                        help="a run, a converted model or one step's folder; the newest good step by default")
    options = parser.parse_args(argv)
    from maxtext.convert import actions

    return _told(lambda: actions.merge_checkpoints(options))


def _told(action: Callable[[], int]) -> int:
    """The exit status of an action; a mistake is a line."""
    from maxtext.checkpoint.manager import CheckpointError

    try:
        return action()
    except (ConvertError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:  # a disk that is full, a folder that cannot be written
        print(placed(error), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="maxtext convert", description="Weights of other formats in and out, and "
                                     "proof that they fit.")
    commands = parser.add_subparsers(required=True, metavar="import | export | trace | verify")
    add = commands.add_parser("import", help="a transformers folder, or a checkpoint of OLMo-core, to one of ours")
    add.set_defaults(action="import_model")
    add.add_argument("source", help="folder with config.json and weights, or step folder of OLMo-core")
    add.add_argument("out", help="new folder; train.init_from, eval and export open it")
    add.add_argument("--config", help="OLMo-core only: our config of the same run; then OUT is a run to be continued")
    add.add_argument("--allow-nonfinite", action="store_true", help="take NaN and infinite values over as they are")
    give = commands.add_parser("export", help="a checkpoint of ours to a folder that transformers loads")
    give.set_defaults(action="export_model")
    give.add_argument("checkpoint", help="a run, a converted model, or one step's folder")
    give.add_argument("out", metavar="hf_dir", help="new folder")
    give.add_argument("--step", type=int, help="this step; the newest good one by default")
    give.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as imported, or float32")
    give.add_argument("--shard-gb", type=float, default=5.0, help="largest weight file, in 10^9 bytes (5)")
    give.add_argument("--keep-padding", action="store_true", help="write all rows of a padded vocabulary")
    record = commands.add_parser("trace", help="what each module of transformers computes on a text, as one file")
    record.set_defaults(action="trace_model")
    record.add_argument("hf_dir", help="the transformers folder")
    record.add_argument("out", metavar="FILE.npz", help="new file; verify --trace replays it, without torch")
    _add_text(record, rows=1, length=128)
    check = commands.add_parser("verify", help="run both sides on the same tokens and report every difference")
    check.set_defaults(action="verify_model")
    check.add_argument("checkpoint", help="a run, a converted model, or one step's folder")
    check.add_argument("hf_dir", nargs="?", help="the transformers folder; with --trace or --golden it may be left out")
    check.add_argument("--step", type=int, help="this step; the newest good one by default")
    saved = check.add_mutually_exclusive_group()
    saved.add_argument("--trace", metavar="FILE.npz",
                       help="of maxtext convert trace: names the first part that is wrong, and the likely cause")
    saved.add_argument("--golden", metavar="FILE.npz", help="input_ids, logits, hidden_states instead of transformers")
    check.add_argument("--save-golden", metavar="FILE.npz", help="keep what transformers computes as a golden")
    _add_text(check, rows=4, length=512)
    check.add_argument("--dtype", choices=get_args(Dtype), default="float32", help="of our computation (float32)")
    check.add_argument("--report", metavar="DIR", help="where parity.json and parity.md go (the checkpoint's folder)")
    return parser


def _add_text(parser: argparse.ArgumentParser, rows: int, length: int) -> None:
    parser.add_argument("--text", metavar="FILE", help="text to compare on; a text of Python's own help by default")
    parser.add_argument("--rows", type=int, default=rows, help=f"rows of tokens ({rows})")
    parser.add_argument("--length", type=int, default=length, help=f"tokens in a row ({length})")
