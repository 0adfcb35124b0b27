"""The command line, `maxtext VERB ...` (`USAGE` lists the verbs). A verb imports what it needs.

Exit codes: 0 done, or stopped cleanly; 1 a plan that does not fit; 2 a mistake in what was asked for (config, data,
devices, saved state); 3 training failed, or what nobody foresaw, whose trace goes into a file that is named; 75 a run
ended itself and may be tried again (it hung, or workers kept dying).
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxtext.config.schema import Config

USAGE = """usage: maxtext VERB ...

verbs
  train CONFIG [key=value ...] [--dry-run]   train, or continue, a run
  sweep CONFIG --over KEY=A,B [--seeds N]    many small runs as one program: every combination of settings and seeds
  launch local CONFIG --workers N [...]      a run on several processes that goes on when some die
  launch ray | gke | slurm CONFIG [...]      a run as a job of Ray Train, of GKE (JobSet, Pathways) or of SLURM
  plan CONFIG --topology CHIP:SHAPE [...]    memory, FLOPs and estimated speed on a machine that is not here
  compare A [B] [--b key=value] [...]        whether two configs or commits compute the same numbers
  config list | show CONFIG [key=value ...]  configs, and the resolved values with their origins
  data prepare [...]                         text to a tokenizer and token files; also called data tokenize
  data inspect CONFIG --step N [--row R]     the text, documents and mask of a batch, without devices
  data stats DIR | overlap DIR [...]         lengths, shares, duplicates and leaks of a prepared data set
  data audit RUN                             whether each update saw its own batch, and none what is held out
  checkpoint ls | verify | scrub RUN         what is saved, and whether it is whole; scrub sets aside what is not
  checkpoint diff RUN[@STEP] RUN[@STEP]      in which arrays and settings two checkpoints differ
  checkpoint merge OUT RUN[@STEP] ...        the average of the weights of several checkpoints
  convert import | export | verify | trace   weights of transformers and OLMo-core in and out, and proof that they fit
  eval MODEL [--sets ...] [--tasks ...]      held-out sets and tasks on a checkpoint or a transformers folder
  generate MODEL --prompt TEXT [...]         what a checkpoint or a transformers folder goes on with
  report RUN                                 write report.html and loss.png of a run
  watch RUN                                  follow a run in the terminal
  runs [DIR]                                 the runs below a folder: state, update, loss, last seen

`maxtext VERB --help` says more. `python train.py` is `maxtext train`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    verbs: dict[str, Callable[[list[str]], int]] = {
        "train": train, "sweep": _sweep, "launch": _launch, "plan": _plan, "compare": _compare, "config": _config,
        "data": _data, "checkpoint": _checkpoint, "convert": _convert, "eval": _eval, "generate": _generate,
        "report": _report, "watch": _watch, "runs": _runs,
    }
    if argv[0] not in verbs:
        import difflib

        near = difflib.get_close_matches(argv[0], verbs, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        print(f"maxtext: unknown verb {argv[0]!r}{hint} The verbs are {', '.join(verbs)}.", file=sys.stderr)
        return 2
    try:
        return verbs[argv[0]](argv[1:])
    except Exception as error:
        return _unforeseen(error, f"maxtext {argv[0]}")


def train(argv: Sequence[str] | None = None) -> int:
    """`python train.py CONFIG [key=value ...]`."""
    from maxtext.config.arguments import Arguments
    from maxtext.config.load import CONFIGS, ConfigError, find_config, list_configs, load_with_origins
    from maxtext.config.show import print_problems

    parser = Arguments(
        prog="train.py",
        description="Train, or continue, the run that a YAML describes. Without arguments: list the configs.",
    )
    parser.add_argument("config", nargs="?", help="a YAML, or its name in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optim.lr=3e-4 train.steps=1000")
    parser.add_argument("--dry-run", action="store_true", help="print what the run would be; allocate nothing")
    parser.add_argument("--devices", type=int, metavar="N", help="with --dry-run: plan for N devices")
    args = parser.parse_intermixed_args(sys.argv[1:] if argv is None else list(argv))
    if args.config is None:
        rows = list_configs(CONFIGS)
        width = max((len(name) for name, _ in rows), default=0)
        print("usage: python train.py CONFIG [key=value ...] [--dry-run]\n\nconfigs:")
        print("\n".join(f"  {name:<{width}}  {description}".rstrip() for name, description in rows))
        return 0
    try:
        cfg, origins = load_with_origins(find_config(args.config), args.overrides)
    except ConfigError as error:
        return print_problems(error)
    if args.devices is not None and not args.dry_run:
        parser.error("--devices only goes with --dry-run; a run uses every device of the machine")
    if args.devices is not None and args.devices < 1:
        parser.error(f"--devices {args.devices}: give 1 or more")
    return _dry_run(cfg, args.devices) if args.dry_run else _run(cfg, origins)


def _dry_run(cfg: Config, n_devices: int | None) -> int:
    from maxtext.config.validate import AXES, mesh_problems, resolve_mesh
    from maxtext.config.wording import with_key
    from maxtext.model.choose_mesh import settled
    from maxtext.parallel.mesh import MeshError
    from maxtext.parallel.network import network_of
    from maxtext.train.console import Console
    from maxtext.train.summary import device_rows, model_rows, run_rows

    sizes = [getattr(cfg.mesh, axis) for axis in AXES]
    why: tuple[str, ...] = ()
    if cfg.mesh.auto or (n_devices is None and -1 in sizes):
        import jax

        here = n_devices is None
        found = jax.device_count(), f"{jax.devices()[0].device_kind}; --devices N for another number"
        n_devices, kind = found if here else (n_devices, "planned")
        network = network_of(jax.devices())
        try:
            cfg, why = settled(cfg, n_devices, network if here else dataclasses.replace(network, domain=n_devices))
        except MeshError as error:
            return _mistake(error)
    else:
        n_devices, kind = (math.prod(sizes) if n_devices is None else n_devices), "planned"
    problems = mesh_problems(cfg, n_devices)
    if problems:
        return _mistake("\n".join(with_key(*problem) for problem in problems))
    shape = resolve_mesh(cfg.mesh, n_devices)
    rows = model_rows(cfg) + run_rows(cfg) + device_rows(cfg, shape, kind, why)
    Console().table(f"Dry run of {cfg.run_name}: nothing is allocated, read or written", rows)
    return 0


def _run(cfg: Config, origins: dict[str, str] | None, listener: Callable[[int, Mapping[str, float]], None] | None = None
         ) -> int:
    """Trains as `maxtext.train` does, and tells a mistake in a line."""
    from maxtext import api
    from maxtext.parallel.launch import LaunchError
    from maxtext.train.mistakes import mistakes
    from maxtext.train.stop import TrainingError

    try:
        api.train(cfg, origins=origins, listener=listener)
    except (LaunchError, *mistakes()) as error:
        return _mistake(error)
    except TrainingError as error:
        print(f"training stopped: {error}", file=sys.stderr)
        return 3
    except Exception as error:
        return _unforeseen(error, "training", cfg.run_dir)
    return 0


def _unforeseen(error: Exception, what: str, folder: str | None = None) -> int:
    from maxtext.config.trace import no_devices, unforeseen

    if told := no_devices(error):
        return _mistake(told)
    print(unforeseen(error, what, folder), file=sys.stderr)
    return 3


def _mistake(error: object) -> int:
    print(error, file=sys.stderr)
    return 2


def _launch(argv: list[str]) -> int:
    where = argv[0] if argv else ""
    if where == "local":
        from maxtext.api import write_report
        from maxtext.elastic.launch import run

        return run(argv[1:], write_report)
    if where == "ray":
        from maxtext.cli import train_text  # under this name, by which Ray's workers find it, however this was started
        from maxtext.launch.ray import run as run_on_ray

        return run_on_ray(argv[1:], train_text)
    if where == "gke":
        from maxtext.launch.gke import run as run_on_gke

        return run_on_gke(argv[1:])
    if where == "slurm":
        from maxtext.launch.slurm import run as run_on_slurm

        return run_on_slurm(argv[1:])
    told = sys.stdout if where in ("-h", "--help") else sys.stderr
    print("usage: maxtext launch local | ray | gke | slurm CONFIG [key=value ...]; each has --help", file=told)
    return 0 if where in ("-h", "--help") else 2


def train_text(text: str, listener: Callable[[int, Mapping[str, float]], None]) -> int:
    """Trains the run of a config's text, as `maxtext train` does; for launchers that send it to their workers."""
    import tempfile

    from maxtext.config.load import ConfigError, load_with_origins
    from maxtext.config.show import print_problems

    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        file.write(text)
        file.flush()
        try:
            cfg, _ = load_with_origins(file.name)
        except ConfigError as error:
            return print_problems(error)
    return _run(cfg, None, listener)


def _sweep(argv: list[str]) -> int:
    from maxtext.sweep.command import run

    return run(argv)


def _plan(argv: list[str]) -> int:
    from maxtext.plan.command import run

    return run(argv)


def _compare(argv: list[str]) -> int:
    from maxtext.compare.command import run

    return run(argv)


def _config(argv: list[str]) -> int:
    from maxtext.config.load import load
    from maxtext.config.show import run

    code = run(argv)
    if code == 0 and argv[:1] == ["show"] and not {"-h", "--help"} & {*argv}:
        cfg = load(argv[1], argv[2:])
        if cfg.mesh.auto:
            _explain_mesh(cfg)
    return code


def _explain_mesh(cfg: Config) -> None:
    """What `mesh: auto` means on the devices of this machine, as a comment of the YAML."""
    import jax

    from maxtext.model.choose_mesh import settled
    from maxtext.parallel.mesh import MeshError
    from maxtext.parallel.network import network_of

    devices = jax.devices()
    try:
        why = settled(cfg, len(devices), network_of(devices))[1]
    except MeshError as error:
        why = (str(error),)
    print(f"# mesh: auto on {len(devices)} x {devices[0].device_kind}: {'; '.join(why)}")


def _data(argv: list[str]) -> int:
    from maxtext.data import command

    if argv[:1] == ["audit"]:
        from maxtext.train.audit import run as audit

        return audit(argv[1:])
    if argv[:1] == ["inspect"]:
        return command.run_inspect(argv[1:])
    if argv[:1] == ["stats"]:
        return command.run_stats(argv[1:])
    if argv[:1] == ["overlap"]:
        return command.run_overlap(argv[1:])
    if argv[:1] not in (["prepare"], ["tokenize"]):
        print("usage: maxtext data prepare (or tokenize) | inspect | stats | overlap | audit [...]; each has --help",
              file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    return command.run_prepare(argv[1:])


def _checkpoint(argv: list[str]) -> int:
    if argv[:1] == ["merge"]:
        from maxtext.convert.commands import run_merge

        return run_merge(argv[1:])
    from maxtext.checkpoint.inspect import run

    return run(argv)


def _convert(argv: list[str]) -> int:
    from maxtext.convert.commands import run

    return run(argv)


def _eval(argv: list[str]) -> int:
    from maxtext.api import open_transformers
    from maxtext.convert import ConvertError
    from maxtext.eval.command import run_eval

    try:
        return run_eval(argv, open_transformers)
    except ConvertError as error:
        return _mistake(error)


def _generate(argv: list[str]) -> int:
    from maxtext.api import open_transformers
    from maxtext.convert import ConvertError
    from maxtext.eval.command import run_generate

    try:
        return run_generate(argv, lambda path: open_transformers(path, lambda text: print(text, file=sys.stderr)))
    except ConvertError as error:
        return _mistake(error)


def _watch(argv: list[str]) -> int:
    from maxtext.watch.command import watch

    return watch(argv)


def _runs(argv: list[str]) -> int:
    from maxtext.watch.command import runs

    return runs(argv)


def _report(argv: list[str]) -> int:
    from maxtext.report.write import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
