"""`maxtext data stats` and `maxtext data overlap`: what a prepared data set holds, and what it shares with other text.

An n-gram is n words, lower-cased and without punctuation, of the decoded text; 13 of them are what GPT-3 and most since
call contamination (Brown et al. 2020, appendix C). They are compared by 64-bit hashes.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.data.corpus import open_source, read_source
from maxtext.data.manifest import Prepared, TokenFile, load_prepared
from maxtext.data.tokenizer import Tokenizer, load_tokenizer
from maxtext.data.tokens import read_documents

LENGTH_BINS = [0, *(1 << i for i in range(4, 21))]
WORD = re.compile(r"\w+")


def ngrams(text: str, n: int) -> np.ndarray:
    """Hashes of the n-grams of a text, each once; uint64. A text of fewer words has none."""
    words = WORD.findall(text.lower())
    grams = {" ".join(words[i:i + n]) for i in range(len(words) - n + 1)}
    return np.array(sorted(int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big")
                           for gram in grams), np.uint64)


def places(grams: np.ndarray, every: np.ndarray) -> np.ndarray:
    """Where in `every`, ascending, those of the n-grams stand that are in it. (numpy.isin would sort `every` anew.)"""
    found = np.searchsorted(every, grams)
    inside = found < len(every)
    return found[inside][every[found[inside]] == grams[inside]]


def documents(data: Prepared, tokenizer: Tokenizer, files: Iterable[TokenFile]) -> Iterator[tuple[int, str]]:
    """Number of tokens and text of each document."""
    for ids in read_documents([file.path for file in files], data.dtype, data.eos_id):
        yield len(ids), tokenizer.decode(ids.tolist())


def measure(folder: str | Path, n: int) -> dict[str, Any]:
    """Lengths, shares, duplicates, and what held-out text shares with training text, of a prepared data set.

    Memory is some 40 bytes for each n-gram of the training text.

    Raises:
      DataError: the folder cannot be read.
    """
    data = load_prepared(folder)
    tokenizer = load_tokenizer(data.tokenizer)
    domains: dict[str, Any] = {}
    seen_texts: Counter[bytes] = Counter()
    grams_of: list[np.ndarray] = []
    for name, files in data.train.items():
        lengths = []
        for length, text in documents(data, tokenizer, files):
            lengths.append(length)
            seen_texts[hashlib.sha256(text.encode()).digest()] += 1
            grams_of.append(ngrams(text, n))
        counts = np.histogram(lengths, [*LENGTH_BINS, np.inf])[0].tolist()
        domains[name] = {"documents": len(lengths), "tokens": sum(lengths), "longest": max(lengths, default=0),
                         "median": int(np.median(lengths)) if lengths else 0, "lengths": counts}
    total = sum(domain["tokens"] for domain in domains.values())
    for domain in domains.values():
        domain["share"] = domain["tokens"] / max(1, total)
    every = np.concatenate([np.zeros(0, np.uint64), *grams_of])
    train, count = np.unique(every, return_counts=True)
    repeated = train[count > 1]
    return {
        "folder": str(folder), "n": n, "length_bins": LENGTH_BINS, "domains": domains,
        "exact_duplicates": sum(count - 1 for count in seen_texts.values()),
        "ngram_duplicates": sum(2 * len(places(grams, repeated)) >= len(grams) > 0 for grams in grams_of),
        "heldout": {name: shared((text for _, text in documents(data, tokenizer, files)), train, n)
                    for name, files in data.heldout.items()},
    }


def shared(texts: Iterable[str], train: np.ndarray, n: int) -> dict[str, Any]:
    """Of texts: how many there are, have an n-gram at all, and share one with the hashes of the training text."""
    result = {"documents": 0, "with_ngrams": 0, "overlapping": 0, "ngrams": 0, "ngrams_shared": 0}
    for text in texts:
        grams = ngrams(text, n)
        hits = len(places(grams, train))
        for key, value in zip(result, (1, len(grams) > 0, hits > 0, len(grams), hits), strict=True):
            result[key] += int(value)
    return result


def overlap_with(folder: str | Path, tasks: dict[str, str], key: str, n: int) -> dict[str, Any]:
    """For each task, a source of texts: what of it stands in the training text of a prepared data set.

    Raises:
      DataError: the folder or a task's file cannot be read.
    """
    data = load_prepared(folder)
    tokenizer = load_tokenizer(data.tokenizer)
    sources = {name: open_source(name, path, key) for name, path in tasks.items()}
    wanted = {name: [ngrams(document.text, n) for document in read_source(source)] for name, source in sources.items()}
    # Only the tasks' n-grams are kept, so that the training text may be of any size.
    every = np.unique(np.concatenate([np.zeros(0, np.uint64), *(g for group in wanted.values() for g in group)]))
    found = np.zeros(len(every), bool)
    hits: dict[str, int] = dict.fromkeys(data.train, 0)
    for name, files in data.train.items():
        for _, text in documents(data, tokenizer, files):
            hit = places(ngrams(text, n), every)
            hits[name] += len(hit) > 0
            found[hit] = True
    rows = {}
    for name, group in wanted.items():
        marks = [found[np.searchsorted(every, grams)] for grams in group]
        rows[name] = {"documents": len(group), "with_ngrams": sum(len(mark) > 0 for mark in marks),
                      "overlapping": sum(bool(mark.any()) for mark in marks), "ngrams": sum(map(len, marks)),
                      "ngrams_shared": sum(int(mark.sum()) for mark in marks),
                      "which": [place for place, mark in enumerate(marks, 1) if mark.any()]}
    return {"folder": str(folder), "n": n, "tasks": rows, "training_documents": hits}


def show(found: dict[str, Any]) -> str:
    """The statistics for a person."""
    lines = [f"{'source':<16}{'documents':>12}{'tokens':>16}{'share':>8}{'median':>9}{'longest':>10}"]
    lines += [f"{name:<16}{row['documents']:>12,}{row['tokens']:>16,}{row['share']:>8.1%}{row['median']:>9,}"
              f"{row['longest']:>10,}" for name, row in found["domains"].items()]
    lines.append(f"{found['exact_duplicates']:,} exact duplicates; {found['ngram_duplicates']:,} training documents "
                 f"whose {found['n']}-grams stand to half or more in others")
    return "\n".join([*lines, *(shared_line(f"held out {name}", row, found["n"])
                                for name, row in found["heldout"].items())])


def shared_line(name: str, row: dict[str, Any], n: int) -> str:
    shorter = row["documents"] - row["with_ngrams"]
    return (f"{name}: {row['overlapping']:,} of {row['with_ngrams']:,} documents with {n}-grams share one with "
            f"training text ({row['ngrams_shared']:,} of {row['ngrams']:,} {n}-grams; {shorter:,} documents are "
            "shorter)")


def page(found: dict[str, Any]) -> str:
    """The statistics as one HTML page with a histogram of lengths for each source."""
    parts = []
    for name, row in found["domains"].items():
        most = max([1, *row["lengths"]])
        bins = zip(found["length_bins"], row["lengths"], strict=True)
        style = "background:#48c;height:1em;width:"
        bars = "".join(f"<tr><td>{low:,}</td><td><div style='{style}{300 * count / most:.0f}px'></div></td>"
                       f"<td>{count:,}</td></tr>" for low, count in bins if count)
        parts.append(f"<h2>{html.escape(name)}: {row['share']:.1%} of the tokens</h2><table><tr><th>tokens from</th>"
                     f"<th></th><th>documents</th></tr>{bars}</table>")
    return ("<!doctype html><meta charset='utf-8'><title>Data</title><style>body{font-family:sans-serif;margin:2em}"
            f"td{{padding-right:1em}}</style><h1>{html.escape(found['folder'])}</h1><pre>{html.escape(show(found))}</pre>"
            + "".join(parts) + "\n")
