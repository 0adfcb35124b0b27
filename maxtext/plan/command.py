"""`maxtext plan CONFIG`: what a run would need and do on a machine that is not here."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.config.arguments import Arguments
from maxtext.config.load import ConfigError, find_config, load
from maxtext.config.reason import placed
from maxtext.config.schema import Config
from maxtext.config.show import print_problems
from maxtext.config.validate import least_devices, mesh_problems
from maxtext.config.wording import with_key
from maxtext.plan.topology import (
    PlanError,
    Target,
    compiler_flags,
    make_devices,
    prepare_process,
    read_target,
    stay_on_cpu,
)

if TYPE_CHECKING:
    from maxtext.plan.program import Program, Refusal

# What decides the compiled step: all of a config but these parts, these packages, and the code below these folders.
ASIDE = ("description", "run_name", "output_dir", "checkpoint", "eval", "generate", "log")
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax")
CODE = ("data", "kernels", "model", "parallel", "plan", "train")


def run(argv: list[str]) -> int:
    """The verb; 0 the run fits, 1 it does not, 2 a mistake in what was asked for."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    try:
        cfg = load(find_config(args.config), args.overrides)
        target = read_target(args.topology or f"cpu:{least_devices(cfg.mesh)}", args.slices)
        stay_on_cpu()
        why: tuple[str, ...] = ()
        if cfg.mesh.auto:
            cfg, why = _settled(cfg, target)
        wrong = mesh_problems(cfg, target.n_devices)
        if wrong:
            raise PlanError("\n".join(with_key(*problem) for problem in wrong))
        for option in ("json", "plot"):
            file = getattr(args, option)
            if file not in (None, "-") and not Path(file).absolute().parent.is_dir():
                raise PlanError(f"--{option} {file}: its folder does not exist; make it first")
        _check_options(args, target)
        return _answer(cfg, target, args, why)
    except ConfigError as error:
        return print_problems(error)
    except (PlanError, OSError) as error:
        print(placed(error), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Arguments(
        prog="maxtext plan",
        description="Compile a run's train step for a machine that is not here, and tell memory, FLOPs, collectives "
                    "and an estimated speed. Exit code: 0 it fits, 1 it does not, 2 a mistake.")
    parser.add_argument("config", help="a YAML, or its name in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.remat.mode=full")
    parser.add_argument("--topology", metavar="CHIP:SHAPE",
                        help="tpu7x:4x4x4, v5p:4x4x8, v6e:16x16, v5e:16x16 (these need libtpu: "
                             "pip install 'maxtext[tpu]'), h100:8x8, h200:8x8, b200:8x8, gb200:2x72 (nodes x GPUs; "
                             "pip install 'maxtext[cuda]') or cpu:8; by default the CPU with the config's mesh")
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="so many slices of a TPU's topology")
    parser.add_argument("--estimate", action="store_true", help="compile nothing: estimate from shapes alone")
    parser.add_argument("--search", action="store_true",
                        help="try remat, accumulation and mesh, and rank what fits by step time")
    parser.add_argument("--heads", action="store_true", help="with --search: other head shapes too (another model)")
    parser.add_argument("--limit", type=int, default=4, metavar="N", help="with --search: most compiles (4)")
    parser.add_argument("--scale", type=int, metavar="N",
                        help="what up to N replicas of this machine would take, joined by the data centre's network")
    parser.add_argument("--same-batch", action="store_true", help="with --scale: the batch does not grow")
    parser.add_argument("--plot", metavar="FILE", help="with --scale: draw cost over devices, .svg or .png")
    parser.add_argument("--json", metavar="FILE", help="write the same numbers as JSON; - is standard output")
    parser.add_argument("--cache", metavar="DIR", help="where compiled results are kept; an empty name keeps none")
    return parser


def _settled(cfg: Config, target: Target) -> tuple[Config, tuple[str, ...]]:
    from maxtext.model.choose_mesh import settled
    from maxtext.parallel.mesh import MeshError

    try:
        return settled(cfg, target.n_devices, target.network)
    except MeshError as error:
        raise PlanError(str(error)) from error


def _check_options(args: argparse.Namespace, target: Target) -> None:
    for option, needs in (("heads", "search"), ("same_batch", "scale"), ("plot", "scale")):
        if getattr(args, option) and not getattr(args, needs):
            raise PlanError(f"--{option.replace('_', '-')} only goes with --{needs}")
    if args.search and (args.estimate or args.scale is not None):
        raise PlanError("--search compiles and ranks one machine; leave out --estimate and --scale")
    if args.limit < 1 or (args.scale is not None and args.scale < 1):
        raise PlanError("--limit and --scale take 1 or more")
    if args.scale is not None and target.chip is None:
        raise PlanError(f"--scale: nothing is published of {target.name}; give the --topology of a TPU or GPU")


def _answer(cfg: Config, target: Target, args: argparse.Namespace, why: tuple[str, ...]) -> int:
    """Does what was asked for, prints it and returns the exit code."""
    from maxtext.plan import answers

    folder = cache_folder(args.cache)

    def compile_one(one: Config) -> Program | Refusal:
        return compiled(one, target, folder)[0]

    if args.search:
        made = answers.searched(cfg, target, args.limit, compile_one, args.heads)
    elif args.estimate:
        made = answers.estimated(cfg, target)
    else:
        made = answers.planned(cfg, target, *compiled(cfg, target, folder))
    if args.scale is not None:
        answers.add_scale(made, cfg, target, args.scale, args.same_batch, args.plot)
    made.tree |= {"config": args.config, "overrides": args.overrides}  # so that a record can be made again
    if why:
        made.rows.insert(1, ("mesh: auto", "; ".join(why)))
        made.tree["mesh_auto"] = list(why)
    answers.show(made, args.json)
    return 0 if made.fits else 1


def cache_folder(given: str | None) -> Path | None:
    """The folder of compiled results: the one given, none for an empty name, else one in the user's cache."""
    if given is not None:
        return Path(given) if given else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
    return Path(base, "maxtext", "plan")


def compiled(cfg: Config, target: Target, folder: Path | None) -> tuple[Program | Refusal, bool]:
    """The compiled step's numbers, or that it was refused; and whether that came from the cache."""
    path = None if folder is None else folder / f"{cache_key(cfg, target)}.json"
    if path is not None and path.exists():
        from maxtext.plan.program import Program, Refusal

        try:
            tree = json.loads(path.read_text())
            return (Refusal(**tree["refusal"]) if "refusal" in tree else Program.from_json(tree)), True
        except (ValueError, KeyError, TypeError):
            pass  # cut off or of another version: it is written anew
    prepare_process(target)
    from maxtext.plan.program import compile_program

    program = compile_program(cfg, make_devices(target))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(program.to_json()))
        scratch.replace(path)
    return program, False


def cache_key(cfg: Config, target: Target) -> str:
    """A name that changes with everything that decides the compiled step: config, target, code, versions and flags."""
    parts: dict[str, Any] = {name: part for name, part in dataclasses.asdict(cfg).items() if name not in ASIDE}
    parts |= {"topology": target.name, "flags": compiler_flags()}
    parts["versions"] = [_version(package) for package in COMPILERS]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    package = Path(__file__).resolve().parents[1]
    for part in CODE:
        for path in sorted((package / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
