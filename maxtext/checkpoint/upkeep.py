"""Upkeep of a directory of checkpoints: setting steps aside, deleting old ones, clearing what killed saves left."""

import logging
import os
import shutil
from collections.abc import Iterable

from maxtext.checkpoint import manifest

log = logging.getLogger("maxtext.checkpoint")


def set_aside(directory: str, name: str, why: str) -> str:
    """Rename a step's directory to the first free `<name>.<why>-N`; returns the new name."""
    number = 1
    while os.path.lexists(os.path.join(directory, f"{name}.{why}-{number}")):
        number += 1
    os.rename(os.path.join(directory, name), os.path.join(directory, f"{name}.{why}-{number}"))
    manifest.sync_dir(directory)
    return f"{name}.{why}-{number}"


def set_aside_after(directory: str, step: int) -> list[str]:
    """Set the good steps later than `step` aside as superseded; returns the new names."""
    later = [entry.name for entry in manifest.scan(directory)
             if entry.status == "good" and entry.step is not None and entry.step > step]
    return [set_aside(directory, name, "superseded") for name in later]


def delete(directory: str, steps: Iterable[int]) -> None:
    """Delete steps; only ever called once a newer one is committed and was read back."""
    for step in sorted(steps):
        # Renamed first: a deletion that is killed half-way must not look like a damaged step.
        name = os.path.join(directory, manifest.step_name(step))
        os.rename(name, f"{name}.deleted.tmp")
        remove([f"{name}.deleted.tmp"])


def clean_unfinished(directory: str) -> None:
    """Remove what saves and deletions that were killed, or that failed, left behind."""
    for entry in manifest.scan(directory):
        path = os.path.join(directory, entry.name)
        if entry.status == "deleted":
            remove([path])
        elif entry.status == "unfinished":
            log.warning("removed %s: %s", path, entry.reason)
            remove(manifest.leftovers(path, None))
            if not os.listdir(path):
                os.rmdir(path)
        elif entry.manifest is not None:
            remove(manifest.leftovers(path, entry.manifest.arrays))


def remove(paths: list[str], tolerant: bool = False) -> None:
    """Remove files and whole directories; `tolerant` of what cannot be removed now."""
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=tolerant)
        else:
            os.remove(path)
