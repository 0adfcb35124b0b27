"""`maxtext checkpoint ls | verify DIR`: what is saved in a directory, and whether it is whole."""

import argparse
import os
import sys
from collections.abc import Sequence

from maxtext.checkpoint import manifest
from maxtext.checkpoint.manifest import CheckpointError, Damaged, Entry
from maxtext.config.reason import placed

WHAT_TO_GIVE = "give the folder of a run, <output_dir>/<run_name>, or its checkpoints folder"


def run(argv: Sequence[str]) -> int:
    """The verb. Returns the exit status: 0 all is well, 1 a bad step or no step, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(prog="maxtext checkpoint", description=__doc__,
                                     epilog="maxtext checkpoint merge OUT RUN[@STEP] ... averages weights.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("ls", help="list the steps: time, size and status")
    verify = commands.add_parser("verify", help="read every byte and compare it with what was saved")
    for command in (listing, verify):
        command.add_argument("directory", help="a run's folder, or its checkpoints folder")
    verify.add_argument("--step", type=int, help="only this step")
    options = parser.parse_args(argv)
    directory = os.path.abspath(options.directory)
    if not os.path.isdir(directory):
        fault = "is no folder" if os.path.exists(directory) else "does not exist"
        print(f"error: {options.directory} {fault}; {WHAT_TO_GIVE}", file=sys.stderr)
        return 2
    if os.path.isdir(os.path.join(directory, "checkpoints")):
        directory = os.path.join(directory, "checkpoints")
    try:
        entries = manifest.scan(directory)
        if options.command == "ls":
            return _list(directory, entries)
        return _verify(directory, [entry for entry in entries if options.step in (None, entry.step)])
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _list(directory: str, entries: list[Entry]) -> int:
    """One line a name; the steps of other status than good are not used by a resume."""
    if not entries:
        print(f"no checkpoints in {directory}; {WHAT_TO_GIVE}", file=sys.stderr)
        return 1
    for entry in entries:
        if entry.manifest is None:
            print(f"{entry.name:<24} {'-':<25} {'-':>10}  {entry.status}: {entry.reason}")
            continue
        broken = [name for name, leaf in entry.manifest.leaves.items() if leaf.nonfinite]
        note = f"; NaN or infinite values in {', '.join(broken)}" if broken else ""
        print(f"{entry.name:<24} {entry.manifest.saved_at:<25} {_size(entry.manifest.nbytes):>10}  good{note}")
    return 0


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _verify(directory: str, entries: list[Entry]) -> int:
    """Every file's hash, then every leaf's fingerprint, for every step; a line each."""
    steps = [entry for entry in entries if entry.status in ("good", "damaged", "partial")]
    if not steps:
        print(f"no such checkpoints in {directory}", file=sys.stderr)
        return 1
    bad = 0
    for entry in steps:
        try:
            if entry.manifest is None:
                raise Damaged(entry.reason)
            manifest.check_files(os.path.join(directory, entry.name), entry.manifest)
            _verify_leaves(os.path.join(directory, entry.name), entry.manifest)
        except (Damaged, OSError) as error:
            bad += 1
            print(f"{entry.name}  BAD: {placed(error)}")
        else:
            print(f"{entry.name}  good: {len(entry.manifest.files)} files, {len(entry.manifest.leaves)} leaves")
    return 1 if bad else 0


def _verify_leaves(step_dir: str, saved: manifest.Manifest) -> None:
    """Damaged when a stored leaf lacks its fingerprint. One leaf at a time is in memory; no accelerator is touched."""
    import jax

    # A trainer may hold this machine's accelerator; nothing here needs one.
    jax.config.update("jax_platforms", "cpu")
    from maxtext.checkpoint import arrays, integrity

    for name, leaf in saved.leaves.items():
        if 0 in leaf.shape:
            continue
        try:
            array = arrays.read_leaf(os.path.join(step_dir, saved.arrays), name)
        except Exception as error:
            raise Damaged(f"leaf {name} cannot be read: {arrays.reason(error)}") from error
        words = leaf.shape if leaf.key_impl is None else array.shape
        dtype = leaf.dtype if leaf.key_impl is None else "uint32"
        if array.shape != words or str(array.dtype) != dtype:
            raise Damaged(f"leaf {name} is stored as {array.dtype}{list(array.shape)}, {leaf} was saved")
        if integrity.fingerprint_numpy(array) != leaf.fingerprint:
            raise Damaged(f"leaf {name} does not have the fingerprint that it was saved with")
