"""`maxtext data audit RUN`: whether a run trained on what it should have, each batch once, and on nothing held out.

What each update should have seen is worked out anew from the token files, the config and the journal of the run, and
compared with the fingerprint of the batch that the update logged when it was computed on the devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from maxtext.config.load import ConfigError, load
from maxtext.config.reason import placed
from maxtext.config.runs import no_run
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.data.documents import document_bounds
from maxtext.data.journal import Journal, data_step
from maxtext.data.preflight import read_tokens
from maxtext.data.reader import Reader, make_reader
from maxtext.data.staged_order import make_order
from maxtext.data.tokens import ResolvedData, read_documents, resolve
from maxtext.report.run_files import read_metrics

AHEAD = 64  # batches beyond the last update that a wrong one is also looked for in
SHORTEST = 16  # tokens of a held-out document that is looked for; shorter ones are the same by chance
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Findings:
    """What is wrong with a run, in words, and how many updates were compared."""

    compared: int
    lines: list[str]


def run(argv: Sequence[str]) -> int:
    """The verb; returns 0 when all is well, 1 when something was found, 2 for a mistake in what was asked for."""
    parser = argparse.ArgumentParser(prog="maxtext data audit", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    folder = parser.parse_args(argv).run
    if not os.path.isfile(os.path.join(folder, "config.yml")):
        print(f"{no_run(folder, 'file config.yml')}; give the folder of a run, <output_dir>/<run_name>",
              file=sys.stderr)
        return 2
    try:
        cfg = load(os.path.join(folder, "config.yml"))
        logged = {record["step"]: int(record["data/fingerprint"])
                  for record in read_metrics(os.path.join(folder, "metrics.jsonl")) if "data/fingerprint" in record}
        data = resolve(cfg)
        found = audit(cfg, data, logged, Journal(folder))
    except (ConfigError, DataError, ValueError, OSError) as error:
        print(f"the run cannot be audited: {placed(error)}", file=sys.stderr)
        return 2
    well = f"{folder}: {found.compared:,} updates, each trained on its own batch, and on nothing held out"
    print("\n".join(found.lines[:_SHOWN]) or well)
    if len(found.lines) > _SHOWN:
        print(f"and {len(found.lines) - _SHOWN:,} more findings")
    return 1 if found.lines else 0


def audit(cfg: Config, data: ResolvedData, logged: dict[int, int], journal: Journal) -> Findings:
    """Compares the fingerprints that updates logged with those of the batches that they should have seen."""
    order = make_order(cfg, data)
    reader = make_reader(data)
    last = max(logged, default=0)
    expected: dict[int, set[int]] = {}
    for update in range(1, last + AHEAD + 1):
        ids = order.instance_ids(data_step(update, journal.jumps))
        expected[update] = set(_fingerprints(reader, ids, journal))
    lines = [*_wrong(logged, expected), *_skipped(logged, expected, last)]
    if missing := [update for update in range(1, last + 1) if update not in logged]:
        lines.append(f"no record of {_ranges(missing)}")
    seen = {int(instance) for update in logged
            for instance in order.instance_ids(data_step(update, journal.jumps))} - journal.masked.keys()
    return Findings(len(logged), [*lines, *_held_out(data, reader, seen)])


def _fingerprints(reader: Reader, ids: np.ndarray, journal: Journal) -> Iterator[int]:
    """Of a batch as the files have it now; and, where it holds instances that were left out one day, without them."""
    from maxtext.data.pipeline import fingerprint_numpy  # here, because it imports jax, which takes seconds

    masked = np.isin(ids, list(journal.masked)) if journal.masked else np.zeros(len(ids), bool)
    whole = []
    for one in ids:
        try:
            whole.append(reader.read(np.array([one])))
        except DataError:
            whole.append(reader.blank())
    tokens = np.concatenate(whole)
    yield int(fingerprint_numpy(tokens))
    if masked.any():
        tokens[masked] = reader.blank()
        yield int(fingerprint_numpy(tokens))


def _wrong(logged: dict[int, int], expected: dict[int, set[int]]) -> Iterator[str]:
    """A line for each stretch of updates that trained on the batch of another one, or on none that there is."""
    place = {fingerprint: update for update in sorted(expected, reverse=True) for fingerprint in expected[update]}
    stretch: list[int] = []
    gap: int | None = None

    def told() -> Iterator[str]:
        if stretch and gap is None:
            yield (f"{_ranges(stretch)} trained on a batch that is none of this run's: its files, or how they are cut, "
                   f"have changed")
        elif stretch and gap is not None:
            there = _ranges([update + gap for update in stretch])
            yield f"{_ranges(stretch)} trained on the batch of {there}{': repeated' if gap < 0 else ''}"

    for update, fingerprint in sorted(logged.items()):
        right = fingerprint in expected[update]
        now = place[fingerprint] - update if fingerprint in place else None
        if stretch and (right or now != gap or update != stretch[-1] + 1):
            yield from told()
            stretch = []
        if not right:
            stretch, gap = [*stretch, update], now
    yield from told()


def _skipped(logged: dict[int, int], expected: dict[int, set[int]], last: int) -> Iterator[str]:
    """The batches that should have been seen by now and were not."""
    trained = set(logged.values())
    skipped = [update for update in range(1, last + 1) if update in logged and not expected[update] & trained]
    if skipped:
        yield f"the batch of {_ranges(skipped)} was trained on by no update: skipped"


def _held_out(data: ResolvedData, reader: Reader, seen: set[int]) -> Iterator[str]:
    """A line for each held-out document that stands in an instance which was trained on."""
    digests: dict[bytes, tuple[str, int]] = {}
    for name, paths in data.eval_sets.items():
        for number, document in enumerate(read_documents(paths, data.dtype, data.eos_id), 1):
            if len(document) >= SHORTEST:
                digests.setdefault(_digest(document), (name, number))
    pieces: dict[str, list[tuple[int, int]]] = {}
    for instance in seen if digests else ():
        for path, start, length in reader.pieces(instance):
            pieces.setdefault(path, []).append((start, start + length))
    counts = {part.path: part.n_tokens for part in data.parts}
    for path, ranges in sorted(pieces.items()):
        begins, ends = np.array(sorted(ranges), np.int64).T
        bounds = document_bounds(path, data.dtype, counts[path], data.eos_id)  # none ends in a file of one long text
        for start, length in zip(bounds[:-1], np.diff(bounds), strict=True):
            first = int(np.searchsorted(ends, start, side="right"))  # the first piece that ends after its first token
            if length < SHORTEST or first == len(begins) or begins[first] >= start + length:
                continue
            where = digests.get(_digest(read_tokens(path, data.dtype, int(start), int(length))))
            if where is not None:
                yield (f"document {where[1]} of the held-out set {where[0]} was trained on: it stands in {path} at "
                       f"token {start}")


def _digest(document: np.ndarray) -> bytes:
    return hashlib.blake2b(document.tobytes(), digest_size=16).digest()


def _ranges(updates: Sequence[int]) -> str:
    """`update 3`, or `updates 3 to 5, 9`, at most five of them."""
    found: list[list[int]] = []
    for update in updates:
        if found and update == found[-1][1] + 1:
            found[-1][1] = update
        else:
            found.append([update, update])
    words = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in found[:5]]
    more = f" and {len(found) - 5} more stretches" if len(found) > 5 else ""
    return f"update{'s' if len(updates) > 1 else ''} {', '.join(words)}{more}"
