"""`maxtext plan CONFIG`: what a run would need and do on a machine that is not here."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext.config.load import ConfigError, find_config, load
from maxtext.config.reason import placed
from maxtext.config.schema import Config
from maxtext.config.show import print_problems
from maxtext.config.validate import AXES, mesh_problems
from maxtext.plan.topology import PlanError, Target, compiler_flags, make_devices, prepare_process, read_target

if TYPE_CHECKING:
    from maxtext.plan.program import Program, Refusal

# What decides the compiled step: these parts of a config, and the code below these folders.
SECTIONS = ("seed", "model", "data", "optim", "schedule", "train", "mesh")
CODE = ("data", "kernels", "model", "parallel", "plan", "train")


def run(argv: list[str]) -> int:
    """The verb; 0 the run fits, 1 it does not, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(
        prog="maxtext plan",
        description="Compile a run's train step for a machine that is not here, and tell memory, FLOPs, collectives "
                    "and an estimated speed. Exit code: 0 it fits, 1 it does not, 2 a mistake.")
    parser.add_argument("config", help="a YAML, or its name in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.remat.mode=full")
    parser.add_argument("--topology", metavar="CHIP:SHAPE",
                        help="tpu7x:4x4x4, v5p:4x4x8, v6e:16x16, v5e:16x16 (all need libtpu: "
                             "pip install 'maxtext[tpu]') or cpu:8; by default the CPU with the config's mesh")
    parser.add_argument("--json", metavar="FILE", help="write the same numbers as JSON; - is standard output")
    parser.add_argument("--cache", metavar="DIR", help="where compiled results are kept; an empty name keeps none")
    args = parser.parse_intermixed_args(argv)
    try:
        cfg = load(find_config(args.config), args.overrides)
        target = read_target(args.topology or _local(cfg))
        wrong = mesh_problems(cfg, target.n_devices)
        if wrong:
            raise PlanError("\n".join(f"{key}: {message}" for key, message in wrong))
        if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
            raise PlanError(f"--json {args.json}: its folder does not exist; make it first")
        program, cached = compiled(cfg, target, cache_folder(args.cache))
        _show(cfg, target, program, cached, args.json)
    except ConfigError as error:
        return print_problems(error)
    except (PlanError, OSError) as error:
        print(placed(error), file=sys.stderr)
        return 2
    from maxtext.plan.verdict import judge

    return 0 if judge(cfg, target, program).fits else 1


def _local(cfg: Config) -> str:
    """Virtual CPU devices for the config's own mesh; an axis of -1 takes one."""
    return f"cpu:{math.prod(max(1, getattr(cfg.mesh, axis)) for axis in AXES)}"


def _show(cfg: Config, target: Target, program: Program | Refusal, cached: bool, json_file: str | None) -> None:
    from maxtext.plan.program import Refusal
    from maxtext.plan.report import make_plan, refusal_json, refusal_rows, to_json, to_rows
    from maxtext.train.console import Console

    if isinstance(program, Refusal):
        rows, tree = refusal_rows(cfg, target, program), refusal_json(cfg, target, program)
    else:
        plan = make_plan(cfg, target, program)
        rows, tree = to_rows(plan, cached), to_json(plan)
    if json_file != "-":
        Console().table(f"Plan of {cfg.run_name}: compiled, not run", rows)
    if json_file is None:
        return
    text = json.dumps(tree, indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        Path(json_file).write_text(text)


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
    tree = dataclasses.asdict(cfg)
    parts: dict[str, Any] = {name: tree[name] for name in SECTIONS}
    parts |= {"topology": target.name, "flags": compiler_flags()}
    parts["versions"] = [_version(package) for package in ("jax", "jaxlib", "libtpu", "flax", "optax")]
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
