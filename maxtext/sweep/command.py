"""`maxtext sweep CONFIG --over key=a,b,c --seeds N`: many small runs as one program."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from maxtext.config.arguments import Arguments
from maxtext.config.load import ConfigError, find_config
from maxtext.config.schema import Config, MeshConfig
from maxtext.config.show import print_problems
from maxtext.sweep.grid import Member, SweepError, groups_of, members_of, structural

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from maxtext.train.console import Console
    from maxtext.train.stop import Stopper

MEMORY_SHARE = 0.8  # of the free memory, for an estimate that knows nothing of the compiler's own


class How(NamedTuple):
    """How members share a program."""

    width: int | None
    memory_gib: float | None


def run(argv: Sequence[str]) -> int:
    """The verb; 0 done or stopped cleanly, 2 a mistake in what was asked for, 3 a member failed."""
    parser = Arguments(
        prog="maxtext sweep",
        description="Train every combination of some settings and seeds. Members that differ in numbers alone "
                    "(learning rate, weight decay, betas, warm-up, seed, ...) train as one program, which compiles "
                    "once; each has a run directory of its own below <output_dir>/<run_name>-sweep. The same command "
                    "continues a sweep.")
    parser.add_argument("config", help="a YAML, or its name in configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all members, such as train.steps=1000")
    parser.add_argument("--over", action="append", default=[], metavar="KEY=A,B,C",
                        help="values of one setting, such as optim.lr=1e-3,2e-3; may be given several times")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds of the weights for each combination")
    parser.add_argument("--width", type=int, metavar="N",
                        help="members that go through each operation together on a device; by default all on a GPU or "
                             "TPU, and 1 on a CPU, where they take turns")
    parser.add_argument("--memory", type=float, metavar="GIB",
                        help="memory of a device that the members may fill together; by default most of what is free")
    args = parser.parse_intermixed_args(list(argv))
    try:
        if args.width is not None and args.width < 1:
            raise SweepError(f"--width {args.width}: give 1 or more")
        if args.memory is not None and not args.memory > 0:
            raise SweepError(f"--memory {args.memory:g}: give some GiB")
        members = members_of(find_config(args.config), args.overrides, args.over, args.seeds)
    except ConfigError as error:
        return print_problems(error)
    except SweepError as error:
        print(error, file=sys.stderr)
        return 2
    return _train(members, How(args.width, args.memory))


def _train(members: list[Member], how: How) -> int:
    from maxtext.parallel.runtime import prepare_runtime

    prepare_runtime()
    import jax

    from maxtext.sweep.results import read_rows, table, write_results
    from maxtext.train.console import Console
    from maxtext.train.mistakes import mistakes
    from maxtext.train.stop import Stopper, TrainingError

    if jax.process_count() > 1:
        print("a sweep runs in one process; start it once, on one machine", file=sys.stderr)
        return 2
    console, folder, failed = Console(), members[0].cfg.output_dir, 0
    groups = groups_of(members)
    _say(console, members, groups)
    parted: dict[str, str] = {}
    try:
        with Stopper(time.monotonic(), members[0].cfg.train.max_seconds) as stopper:
            for group in groups:
                stopped_by, failures = _train_group(group, how, folder, console, stopper, parted)
                failed |= failures
                if stopped_by:
                    console.note(f"stopped by {stopped_by}; all is saved, and the same command continues from there")
                    break
    except mistakes() as error:
        print(error, file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"training stopped: {error}", file=sys.stderr)
        return 3
    rows = read_rows(members, parted)
    print(table(rows))
    try:
        print("sweep:", *write_results(folder, rows))
    except OSError as error:
        from maxtext.config.reason import placed

        print(f"warning: the table was not written: {placed(error)}", file=sys.stderr)
    return 3 if failed else 0


def _say(console: Console, members: Sequence[Member], groups: Sequence[Sequence[Member]]) -> None:
    keys = structural(members)
    console.note(f"sweep of {len(members)} members in {members[0].cfg.output_dir}")
    if len(groups) > 1:
        console.note(f"{' and '.join(keys)} {'changes' if len(keys) == 1 else 'change'} the program itself, so there "
                     f"are {len(groups)} programs, one after another")


def _train_group(group: list[Member], how: How, folder: str, console: Console, stopper: Stopper,
                 parted: dict[str, str]) -> tuple[str | None, int]:
    """Trains the members of a group; returns what stopped it, and whether one failed."""
    import jax

    from maxtext.model.choose_mesh import settled
    from maxtext.parallel.mesh import make_mesh
    from maxtext.parallel.network import network_of
    from maxtext.sweep.program import one_device
    from maxtext.sweep.together import train_together

    devices = jax.devices()
    cfg = group[0].cfg
    why = alone_because(cfg) or ("it is the only one of its program" if len(group) == 1 else None)
    if why:
        if len(group) > 1:
            console.note(f"the members train one after another: {why}")
        return _one_by_one(group, console, stopper)
    spread = cfg.mesh == MeshConfig() and len(devices) > 1
    over: list[jax.Device] = list(devices[: min(len(devices), len(group))]) if spread else []
    mesh: Mesh = one_device(devices[0]) if spread else make_mesh(settled(cfg, len(devices), network_of(devices))[0])
    room = _room(cfg, mesh, how.memory_gib)
    own_memory = devices[0].platform != "cpu"  # devices of a CPU share the host's
    at_once = len(group) if room is None else max(1, room) * (len(over) if over and own_memory else 1)
    if at_once < len(group):
        together = "one after another" if at_once == 1 else f"{at_once} at a time"
        console.note(f"{at_once} of {len(group)} members fit into memory, so they train {together}")
    if at_once == 1:
        return _one_by_one(group, console, stopper)
    for first in range(0, len(group), at_once):
        stopped_by, ours = train_together(group[first : first + at_once], mesh, over, how.width, folder, console,
                                         stopper)
        parted.update(ours)
        if stopped_by:
            return stopped_by, 0
    return None, 0


def alone_because(cfg: Config) -> str | None:
    """Why members of this config cannot share a program; None: they can."""
    train, optim, mesh = cfg.train, cfg.optim, cfg.mesh
    if train.determinism != "none":
        return f"train.determinism {train.determinism} promises the bits of a run by itself"
    if cfg.guard.compare_devices_every is not None:
        return "guard.compare_devices_every compares the devices of one run"
    if optim.offload != "none" or optim.offload_weights != "none":
        return "optim.offload and optim.offload_weights move one run's state"
    if cfg.quant.kind != "none":
        return f"quant.kind {cfg.quant.kind} has kernels for one run"
    if cfg.profile.steps is not None:
        return "profile.steps looks into one run"
    if cfg.checkpoint.snapshots:
        return "checkpoint.snapshots keeps the state of one run in memory"
    if train.take_over_at is not None:
        return "train.take_over_at takes over one run"
    for axis in ("pipeline", "context", "expert"):
        if getattr(mesh, axis) != 1:
            return f"mesh.{axis} {getattr(mesh, axis)} has messages of one run"
    return None


def _one_by_one(group: Sequence[Member], console: Console, stopper: Stopper) -> tuple[str | None, int]:
    from maxtext.train.loop import train
    from maxtext.train.stop import TrainingError

    failed = 0
    for member in group:
        if why := stopper.reason():
            return why, failed
        try:
            outcome = train(member.cfg, member.origins)
        except TrainingError as error:
            print(f"{member.name}: training stopped: {error}", file=sys.stderr)
            failed = 1
            continue
        if outcome.stopped_by and outcome.step < member.cfg.train.steps:
            return outcome.stopped_by, failed
    return None, failed


def _room(cfg: Config, mesh: Mesh, memory_gib: float | None) -> int | None:
    """How many members fit into the memory of a device of `mesh`, by estimate; None: that is not known."""
    from maxtext.model.cost import memory_per_device
    from maxtext.parallel.mesh import sizes_of

    device, free = mesh.devices.flat[0], None if memory_gib is None else memory_gib * 2**30
    if free is None and device.platform == "cpu":
        free = MEMORY_SHARE * _free_host_bytes()
    elif free is None:
        stats = device.memory_stats() or {}
        free = MEMORY_SHARE * (stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0))
    return None if math.isinf(free) else int(free // memory_per_device(cfg, sizes_of(mesh)).total)


def _free_host_bytes() -> float:
    """Memory that the system can give without swapping; infinite where it does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
    except OSError:
        return math.inf
    return math.inf if found is None else int(found[1]) * 1024
