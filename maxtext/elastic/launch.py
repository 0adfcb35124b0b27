"""`maxtext launch local CONFIG --workers N`: an elastic run on this machine."""

from __future__ import annotations

import glob
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence

from maxtext.config.arguments import Arguments
from maxtext.config.schema import Config
from maxtext.config.validate import resolve_mesh
from maxtext.launch import job
from maxtext.launch.job import virtual_devices


def run(argv: Sequence[str], write_report: Callable[[str], None]) -> int:
    """Runs the verb; `write_report` is given the run directory at the end.

    Exit codes: 0 done or stopped and saved, 2 a mistake in what was asked for, 3 training failed, 75 try again."""
    parser = Arguments(
        prog="maxtext launch local", description="Start the workers of a run on this machine's CPU, and keep the run "
        "going while workers die, hang and come back.")
    job.add_config(parser, "elastic.policy=pause")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="processes of the job")
    parser.add_argument("--devices-per-worker", type=int, default=1, metavar="K", help="virtual devices of each; 1")
    parser.add_argument("--peer-copies", action="store_true",
                        help="keep a second copy of each worker's snapshots at the next worker")
    args = parser.parse_intermixed_args(list(argv))
    job.check_lowest(parser, args, workers=1, devices_per_worker=1)
    found = job.loaded(args.config, args.overrides, args.workers * args.devices_per_worker)
    if isinstance(found, int):
        return found
    cfg, text = found
    code = _supervise(cfg, text, args.workers, args.devices_per_worker, args.peer_copies)
    if code == 0 and cfg.log.report and os.path.exists(f"{cfg.run_dir}/metrics.jsonl"):
        write_report(cfg.run_dir)
    return code


def _supervise(cfg: Config, config_text: str, workers: int, devices: int, peer: bool) -> int:
    import signal

    from maxtext.checkpoint.tiers import memory_folder, memory_prefix
    from maxtext.elastic.supervisor import Supervisor, signals_to
    from maxtext.train.console import table_text
    from maxtext.train.lock import RunInUseError, machine_lock

    parent, prefix = memory_folder(), memory_prefix(cfg.run_dir)
    try:
        with machine_lock(cfg.run_dir):
            for folder in glob.glob(f"{glob.escape(os.path.join(parent, prefix))}*"):
                shutil.rmtree(folder, ignore_errors=True)  # whoever wrote it held the lock, and is gone
            root = tempfile.mkdtemp(prefix=prefix, dir=parent)
            print(table_text(f"Elastic run {cfg.run_name}", rows(cfg, workers, devices, peer, root)), flush=True)
            supervisor = Supervisor(cfg, config_text, workers, devices, root, peer,
                                    worker_environment(os.environ, devices))
            before = signals_to(supervisor)
            try:
                code = supervisor.run()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
    except RunInUseError as error:
        return job.mistake(error)
    return code


def rows(cfg: Config, workers: int, devices: int, peer: bool, root: str) -> list[tuple[str, str]]:
    """What a person should know of the launch: who runs, what happens at a death, and what each tier survives."""
    from maxtext.elastic.policy import survival

    elastic, total = cfg.elastic, workers * devices
    replicas = 1 if cfg.mesh.auto else resolve_mesh(cfg.mesh, total)["data"]
    share = math.gcd(replicas, workers) if replicas < workers else workers
    pause = f", after waiting {elastic.pause_seconds:g} s for replacements" if elastic.policy == "pause" else ""
    return [
        ("workers", f"{workers} with {devices} virtual CPU device{'s' if devices > 1 else ''} each; global batch "
                    f"{cfg.train.global_batch} at any number of them"),
        ("a death", f"policy {elastic.policy}: the workers that are left go on from the newest snapshot{pause}; a "
                    f"replacement joins when it is ready; at most {elastic.regroups_per_hour} times an hour"),
        ("a hang", f"no sign of life, or an update without end, for {elastic.hang_seconds:g} s"),
        *((f"tier: {tier}", what) for tier, what in survival(workers, share, peer, cfg.checkpoint.snapshot_every,
                                                            cfg.checkpoint.every is not None,
                                                            cfg.checkpoint.gradient_log)),
        ("files", f"{cfg.run_dir}/elastic.jsonl tells what happened, {cfg.run_dir}/workers/ has the workers' logs; "
                  f"snapshots lie in {root}"),
    ]


def worker_environment(environment: Mapping[str, str], devices: int) -> dict[str, str]:
    """The variables of a worker with so many virtual CPU devices."""
    # A collective whose peer died is left behind and never ends; XLA would end the whole process for it.
    flags = [virtual_devices(environment, devices), "--xla_cpu_collective_call_terminate_timeout_seconds=1000000",
             "--xla_cpu_collective_timeout_seconds=1000000"]
    alone = {name: value for name, value in environment.items()
             if name not in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "PJRT_NPROC")}
    return alone | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1",
                    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "no_grpc_proxy": "127.0.0.1"}
