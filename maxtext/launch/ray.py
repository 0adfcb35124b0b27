"""`maxtext launch ray CONFIG --workers N`: a run as a job of Ray Train's JaxTrainer.

Ray reserves the machines (an intact slice, with TPUs), joins the processes and starts all of them again when one dies,
as often as its FailureConfig allows; the run then goes on from its newest checkpoint. Workers must see `output_dir` and
the data under the same paths, and have this package installed.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext.config.arguments import Arguments
from maxtext.launch import job

# Trains the run of a config's text in this process, and gives each update's metrics to a listener; the exit status of
# `maxtext train`.
Work = Callable[[str, Callable[[int, Mapping[str, float]], None]], int]


def run(argv: Sequence[str], work: Work) -> int:
    """Runs the verb. Exit status: 0 done, 2 a mistake in what was asked for, 3 training failed, 75 try again.

    Args:
      work: what each worker does. Ray finds it by its name, so it must be a function of a module.
    """
    options = _options(argv)
    devices = {"cpu": lambda: options.workers * options.devices_per_worker,
               "gpu": lambda: options.workers * options.gpus_per_worker,
               "tpu": lambda: math.prod(map(int, options.topology.split("x")))}[options.kind]()
    found = job.loaded(options.config, options.overrides, devices)
    if isinstance(found, int):
        return found
    cfg, text = found
    asked = scaling(options)
    if options.dry_run:
        print(json.dumps({"scaling_config": asked, "failure_config": {"max_failures": options.retries},
                          "worker_environment": worker_environment(options), "run_directory": cfg.run_dir}, indent=1))
        return 0
    try:
        import ray.train
        import ray.train.v2.jax  # noqa: F401
    except ImportError as error:
        return job.mistake(f"maxtext launch ray needs Ray Train ({error}); install it with: pip install 'maxtext[ray]'")
    return _fit(options, asked, {"config": text, "work": work, "folder": os.getcwd(), "every": options.report_every,
                                 "run_directory": cfg.run_dir})


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = Arguments(
        prog="maxtext launch ray", description="Train a run as a job of Ray Train: one worker a machine with TPUs, or "
        "a worker for some GPUs or CPUs. Ray starts the job again when a worker dies, and the run continues exactly.")
    job.add_config(parser, "train.steps=1000")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="processes of the job")
    parser.add_argument("--topology", metavar="AxB", help="of the TPU slice that the job takes whole, such as 4x4")
    parser.add_argument("--accelerator", metavar="TYPE", help="with --topology: such as TPU-V6E")
    parser.add_argument("--gpus-per-worker", type=int, metavar="K", help="GPUs of each worker")
    parser.add_argument("--cpu", action="store_true", help="train on CPUs")
    parser.add_argument("--devices-per-worker", type=int, metavar="K", help="with --cpu: virtual devices of each; 1")
    parser.add_argument("--retries", type=int, default=3, metavar="N", help="attempts after the first one (3)")
    parser.add_argument("--report-every", type=int, default=100, metavar="N", help="updates between reports of metrics "
                        "to Ray (100), each a barrier of all workers; the last update is always reported")
    parser.add_argument("--address", help="of the Ray cluster; by default RAY_ADDRESS, or a new one on this machine")
    parser.add_argument("--dry-run", action="store_true", help="print what Ray would be asked for")
    options = parser.parse_intermixed_args(list(argv))
    kinds = {"tpu": options.topology is not None or options.accelerator is not None,
             "gpu": options.gpus_per_worker is not None, "cpu": options.cpu}
    if sum(kinds.values()) != 1:
        parser.error("give one of --topology with --accelerator, --gpus-per-worker and --cpu")
    options.kind = next(kind for kind, asked in kinds.items() if asked)
    if options.kind == "tpu" and (options.topology is None or options.accelerator is None):
        parser.error("--topology and --accelerator go together, such as --topology 4x4 --accelerator TPU-V6E")
    if options.kind == "tpu" and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", options.topology):
        parser.error(f"--topology {options.topology}: give sizes such as 4x4 or 2x2x4")
    if options.devices_per_worker is not None and options.kind != "cpu":
        parser.error("--devices-per-worker only goes with --cpu")
    if options.devices_per_worker is None:
        options.devices_per_worker = 1
    job.check_lowest(parser, options, workers=1, gpus_per_worker=1, devices_per_worker=1, report_every=1, retries=0)
    return options


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of Ray Train's ScalingConfig."""
    if options.kind == "tpu":
        return {"num_workers": options.workers, "use_tpu": True, "topology": options.topology,
                "accelerator_type": options.accelerator}
    if options.kind == "gpu":
        return {"num_workers": options.workers, "use_gpu": True,
                "resources_per_worker": {"GPU": options.gpus_per_worker}}
    return {"num_workers": options.workers, "resources_per_worker": {"CPU": 1}}


def worker_environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables that are set in each worker."""
    if options.kind == "cpu":
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": job.virtual_devices(os.environ, options.devices_per_worker)}
    return {"JAX_PLATFORMS": {"tpu": "tpu,cpu", "gpu": "cuda,cpu"}[options.kind]}


def _fit(options: argparse.Namespace, asked: dict[str, Any], work: dict[str, Any]) -> int:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run tells nobody what it does, unless asked to
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError
    from ray.train.v2.jax import JaxTrainer
    from ray.train.v2.jax.config import JaxConfig

    try:
        scaling_config = ScalingConfig(**asked)
    except ValueError as error:
        return job.mistake(f"Ray Train refuses this job: {error}")
    if options.kind == "tpu" and (wrong := _no_whole_slice(options)):
        return job.mistake(wrong)
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=options.address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            return job.mistake(f"no Ray cluster at {options.address or 'RAY_ADDRESS'}: {error}; start one with `ray "
                               "start`, or leave --address away")
    try:
        trainer = JaxTrainer(
            train_on_worker, train_loop_config=work, scaling_config=scaling_config,
            # JaxTrainer joins its workers when they have accelerators; on what JAX_PLATFORMS says, which is cpu here.
            jax_config=JaxConfig(use_tpu=options.kind == "tpu", use_gpu=options.kind != "tpu"),
            run_config=RunConfig(name=f"{Path(work['run_directory']).name}-{os.getpid()}",
                                 storage_path=os.path.abspath(os.path.join(work["run_directory"], "ray")),
                                 failure_config=FailureConfig(max_failures=options.retries),
                                 worker_runtime_env={"env_vars": worker_environment(options)}))
        result = trainer.fit()
    except TrainingFailedError as error:
        last = str(error).strip().splitlines()[-1]
        print(f"training stopped: Ray gave up after {options.retries} more attempts (--retries): {last}. The same "
              f"command goes on from the newest checkpoint.", file=sys.stderr)
        return job.TRY_AGAIN
    finally:
        if started:
            ray.shutdown()
    return int(result.return_value or 0)


def _no_whole_slice(options: argparse.Namespace) -> str | None:
    """Why the workers are not those of one whole slice, or None."""
    from ray.util.tpu import get_tpu_worker_resources

    hosts, _ = get_tpu_worker_resources(topology=options.topology, accelerator_type=options.accelerator, num_slices=1)
    if hosts == options.workers:
        return None
    return (f"--workers {options.workers}: a slice {options.topology} of {options.accelerator} has {hosts} machines, "
            f"and a job takes one whole slice; give --workers {hosts}")


def train_on_worker(work: dict[str, Any]) -> int:
    """What Ray Train calls in each worker, where the processes are joined already. The exit status of rank 0 is told.

    A mistake or failed training returns its status: another attempt would meet it again. What else ends a worker, a
    lost machine or a hang, Ray takes for a failure and starts the job again.
    """
    import ray.train
    from ray.train import Checkpoint, CheckpointUploadMode

    try:
        os.chdir(work["folder"])  # Ray starts workers elsewhere, where relative paths of the config lead nowhere
    except OSError:
        return job.mistake(f"{work['folder']} is not on {os.uname().nodename}: start the job from a folder that all "
                           "machines share, or that their image has")
    logging.getLogger("absl").setLevel(logging.WARNING)  # Ray shows INFO, of which Orbax has pages for each save
    last: dict[str, float] = {}

    def report(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal last
        last = {"step": step, **metrics}
        if step % work["every"] == 0:
            # Not waited for: Ray's controller fetches a report every two seconds.
            ray.train.report(last, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    code = work["work"](work["config"], report)
    if code == 0 and last:
        # Ray keeps metrics with checkpoints alone: the last ones with a file that says where the run's own are.
        with tempfile.TemporaryDirectory() as folder:
            pointer = None
            if ray.train.get_context().get_world_rank() == 0:
                Path(folder, "run.json").write_text(json.dumps({"run_directory": work["run_directory"]}) + "\n")
                pointer = Checkpoint.from_directory(folder)
            ray.train.report(last, checkpoint=pointer)
    return code
