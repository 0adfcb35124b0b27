"""What a person asked for wrongly when a run starts or goes on: told in a line, with exit status 2."""

from __future__ import annotations


def mistakes() -> tuple[type[Exception], ...]:
    """The errors of `train.loop.train` whose message says what to do; all but TrainingError, which is no mistake."""
    from maxtext.checkpoint.manager import CheckpointError
    from maxtext.data import DataError
    from maxtext.eval.catalogue import TaskError
    from maxtext.kernels.choice import KernelError
    from maxtext.parallel.mesh import MeshError
    from maxtext.train.lock import RunInUseError
    from maxtext.train.resume import ResumeError
    from maxtext.train.trackers import TrackerError

    return DataError, TaskError, MeshError, KernelError, CheckpointError, ResumeError, RunInUseError, TrackerError
