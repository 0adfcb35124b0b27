"""`maxtext checkpoint ls | verify | scrub | diff`: what is saved in a directory, and whether it is whole."""

import argparse
import os
import sys
from collections.abc import Sequence

from maxtext.checkpoint import manifest, upkeep
from maxtext.checkpoint.manifest import CheckpointError, Damaged, Entry
from maxtext.config.reason import placed
from maxtext.config.runs import no_run

WHAT_TO_GIVE = "give the folder of a run, <output_dir>/<run_name>, or its checkpoints folder"


def run(argv: Sequence[str]) -> int:
    """The verb. Returns the exit status: 0 all is well, 1 a bad step or no step, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(prog="maxtext checkpoint", description=__doc__,
                                     epilog="maxtext checkpoint merge OUT RUN[@STEP] ... averages weights.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("ls", help="list the steps: time, size and status")
    verify = commands.add_parser("verify", help="read every byte and compare it with what was saved")
    scrub = commands.add_parser("scrub", help="as verify, and set bad steps aside, so that no resume meets them")
    differ = commands.add_parser("diff", help="in which arrays and settings two checkpoints differ")
    for name in ("first", "second"):
        differ.add_argument(name, metavar="RUN[@STEP]", help="a run's folder and a step; by default the newest")
    for command in (listing, verify, scrub):
        command.add_argument("directory", help="a run's folder, or its checkpoints folder")
    for command in (verify, scrub):
        command.add_argument("--step", type=int, help="only this step")
    options = parser.parse_args(argv)
    try:
        if options.command == "diff":
            from maxtext.checkpoint import diff  # with numpy, which nothing else here needs

            (first, a), (second, b) = _with_step(options.first), _with_step(options.second)
            return diff.run((_checkpoints(first), _checkpoints(second)), (a, b))
        directory = _checkpoints(options.directory)
        entries = manifest.scan(directory)
        if options.command == "ls":
            return _list(directory, entries)
        chosen = [entry for entry in entries if options.step in (None, entry.step)]
        return _verify(directory, chosen, set_aside=options.command == "scrub")
    except NotADirectoryError as error:
        print(f"{error.strerror}; {WHAT_TO_GIVE}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2 if options.command == "diff" else 1  # 1 of diff means that two steps differ


def _with_step(text: str) -> tuple[str, int | None]:
    """`RUN@STEP` in two."""
    path, mark, step = text.rpartition("@")
    return (path, int(step)) if mark and step.isdigit() else (text, None)


def _checkpoints(given: str) -> str:
    """The folder of checkpoints that is meant; NotADirectoryError, with what to say, when there is none."""
    directory = os.path.abspath(given)
    if not os.path.isdir(directory):
        raise NotADirectoryError(0, no_run(given, "checkpoint"))
    inside = os.path.join(directory, "checkpoints")
    return inside if os.path.isdir(inside) else directory


def _list(directory: str, entries: list[Entry]) -> int:
    """One line a name; the steps of other status than good are not used by a resume."""
    if all(entry.status == "foreign" for entry in entries):
        print(f"{no_run(directory, 'checkpoint')}; {WHAT_TO_GIVE}", file=sys.stderr)
        return 1
    for entry in entries:
        if entry.manifest is None:
            print(f"{entry.name:<24} {'-':<25} {'-':>10}  {entry.status}: {entry.reason}")
            continue
        broken = [name for name, leaf in entry.manifest.leaves.items() if leaf.nonfinite]
        note = f"; NaN or infinite values in {', '.join(broken)}" if broken else ""
        print(f"{entry.name:<24} {entry.manifest.saved_at:<25} {_size(entry.manifest.nbytes):>10}  good{note}")
    return int(any(entry.status in ("damaged", "partial") for entry in entries))


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _verify(directory: str, entries: list[Entry], set_aside: bool) -> int:
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
            aside = f"; {_set_aside(directory, entry)}" if set_aside else ""
            print(f"{entry.name}  BAD: {placed(error)}{aside}")
        else:
            print(f"{entry.name}  good: {len(entry.manifest.files)} files, {len(entry.manifest.leaves)} leaves")
    return 1 if bad else 0


def _set_aside(directory: str, entry: Entry) -> str:
    """Renames a bad step, unless it is another one by now; returns what was done."""
    again = next((one for one in manifest.scan(directory) if one.name == entry.name), None)
    if again is None or entry.status == "partial" or again.manifest != entry.manifest:
        return "left in place, because it may be a copy or a save under way"
    return f"set aside as {upkeep.set_aside(directory, entry.name, 'bad')}"


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
