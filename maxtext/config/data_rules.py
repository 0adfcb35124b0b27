"""Rules between fields of the data section; `validate.py` collects them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from maxtext.config.schema import Config, SourceConfig
from maxtext.config.wording import Problem, default_of, division, either, multiples

TOKEN_TYPE_SIZES = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32}
# Setting -> the kinds of packing that read it.
PACKING_SETTINGS = {"packing_group": ("best_fit", "first_fit"), "packing_ties": ("best_fit",),
                    "packing_seed": ("best_fit", "first_fit", "padded"),
                    "document_boundaries": ("best_fit", "first_fit", "padded")}
RATIO_TOLERANCE = 1e-5  # of the sum of a mixture's ratios, as numpy.allclose has it


def _sources(cfg: Config) -> Iterator[Problem]:
    data = cfg.data
    if data.prepared is None and not data.sources and data.stream.kind == "none":
        yield "data.sources", ("no training data: give data.prepared (a folder of `maxtext data prepare`) or "
                               "data.sources with token files")
    for name, source in data.sources.items():
        yield from _source(f"data.sources.{name}", source, data.prepared is not None)


def _source(key: str, source: SourceConfig, prepared: bool) -> Iterator[Problem]:
    if source.paths and source.mix is not None:
        yield f"{key}.mix", f"{key}.paths and {key}.mix are both set; give one of them"
    if not source.paths and source.mix is None:
        if not prepared:
            yield key, f"no token files: give {key}.paths or {key}.mix, or data.prepared that holds this source"
        elif source.root:
            yield f"{key}.root", f"{key}.root is set, but the files of this source come from data.prepared; remove it"
    if source.mix is None and source.tokenizer_placeholder != default_of(source, "tokenizer_placeholder"):
        yield f"{key}.tokenizer_placeholder", f"only a mix file has a placeholder, but {key}.mix is null; remove it"


def _stream(cfg: Config) -> Iterator[Problem]:
    data, stream = cfg.data, cfg.data.stream
    if stream.kind == "none":
        for name in ("paths", "key", "tokenizer", "tail"):
            if getattr(stream, name) != default_of(stream, name):
                yield f"data.stream.{name}", (f"data.stream.{name} is set, but data.stream.kind is none; write kind: "
                                              "hf or ray, or remove it")
        return
    if not stream.paths:
        yield "data.stream.paths", f"data.stream.kind {stream.kind} reads no file; give data.stream.paths"
    if stream.tokenizer is None and data.prepared is None:
        yield "data.stream.tokenizer", "no tokenizer: give data.stream.tokenizer, or data.prepared that has one"
    if data.sources:
        yield "data.sources", (f"data.sources and data.stream.kind {stream.kind} both say what is trained on; remove "
                               "one of them")
    if data.packing not in ("chunk", "padded"):
        yield "data.packing", (f"data.packing {data.packing} must know all documents, but a stream is read once, in "
                               "order; write chunk or padded")
    for name, why in (("max_target_sequence_length", "cuts files into blocks"), ("workers", "are of token files"),
                      ("packing_seed", "permutes files"), ("document_boundaries", "are of token files"),
                      ("bad_instances", "are of token files")):
        if getattr(data, name) != default_of(data, name):
            yield f"data.{name}", (f"data.{name} {getattr(data, name)}: these {why}, but data.stream.kind is "
                                   f"{stream.kind}; remove one of them")


def _mixture(cfg: Config) -> Iterator[Problem]:
    data = cfg.data
    ratios = {name: source.ratio for name, source in data.sources.items() if source.ratio is not None}
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        if source.ratio is None:
            if ratios and not source.weights:
                yield f"{key}.ratio", (f"{key}.ratio is null, but {', '.join(ratios)} give one; give it for every "
                                       "source, or for none")
            for limit in ("max_repetition", "max_source_fraction"):
                bounded = limit == "max_repetition" and source.weights
                if getattr(source, limit) != default_of(source, limit) and not bounded:
                    yield f"{key}.{limit}", (f"{key}.{limit} {getattr(source, limit)} bounds a ratio, but {key}.ratio "
                                             "is null; set it, or remove the bound")
        elif source.repeat != default_of(source, "repeat"):
            yield f"{key}.repeat", (f"{key}.repeat {source.repeat} and {key}.ratio {source.ratio} both say how often "
                                    "the source is seen; remove one of them")
    total = sum(ratios.values())
    if len(ratios) == len(data.sources) and ratios and abs(total - 1) > RATIO_TOLERANCE:
        yield "data.sources", f"the ratios {' + '.join(f'{ratio}' for ratio in ratios.values())} = {total:g} are not 1"
    if ratios and data.mixture_tokens is None:
        yield "data.mixture_tokens", "the sources give ratios, but of how many tokens? set data.mixture_tokens"
    if not ratios and data.mixture_tokens is not None:
        yield "data.mixture_tokens", (f"data.mixture_tokens {data.mixture_tokens} is divided by the sources' ratios, "
                                      "but they give none; give each a ratio, or remove it")
    if ratios and data.packs_documents:
        yield "data.packing", (f"data.packing {data.packing} packs whole files, but a ratio takes a part of them; "
                               "write data.packing: chunk, or repeat instead of ratio")


def _weights(cfg: Config) -> Iterator[Problem]:
    data, stages = cfg.data, cfg.data.mixture_steps
    if not data.weighted:
        if stages != default_of(data, "mixture_steps"):
            yield "data.mixture_steps", (f"data.mixture_steps {list(stages)} begin stages of weights, but no source "
                                         "gives weights; give them, or remove it")
        return
    if not stages or stages[0] != 1 or any(a >= b for a, b in itertools.pairwise(stages)):
        yield "data.mixture_steps", (f"data.mixture_steps {list(stages)} must begin with 1 and ascend: they are the "
                                     "updates at which stages begin")
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        if len(source.weights) != len(stages):
            yield f"{key}.weights", (f"{key}.weights has {len(source.weights)} values, but data.mixture_steps has "
                                     f"{len(stages)} stages; give one for each")
        for other in ("ratio", "repeat"):
            if source.weights and getattr(source, other) != default_of(source, other):
                yield f"{key}.{other}", (f"{key}.{other} {getattr(source, other)} and {key}.weights both say how "
                                         "much of the source is seen; remove one of them")
    if all(len(source.weights) == len(stages) for source in data.sources.values()):
        for place, step in enumerate(stages):
            weights = [source.weights[place] for source in data.sources.values()]
            if abs(sum(weights) - 1) > RATIO_TOLERANCE:
                yield "data.sources", (f"the weights from update {step} on, {' + '.join(map(str, weights))} = "
                                       f"{sum(weights):g}, are not 1")
    if data.packs_documents:
        yield "data.packing", (f"data.packing {data.packing} packs documents of several files, but weights take "
                               "instances of one source; write data.packing: chunk, or repeat instead of weights")
    if data.max_target_sequence_length is not None:
        yield "data.max_target_sequence_length", (
            f"data.max_target_sequence_length {data.max_target_sequence_length} keeps blocks of instances together, "
            "but weights take single ones; remove one of them")


def _packing(cfg: Config) -> Iterator[Problem]:
    data = cfg.data
    for name, readers in PACKING_SETTINGS.items():
        value = getattr(data, name)
        if data.packing not in readers and value != default_of(data, name):
            yield f"data.{name}", (f"data.{name} {value} is read by data.packing {either(list(readers))} only, but "
                                   f"it is {data.packing}; remove one of them")
    if not data.packs_documents:
        return
    if data.max_target_sequence_length is not None:
        yield "data.max_target_sequence_length", (
            f"data.max_target_sequence_length {data.max_target_sequence_length} cuts files into blocks, but "
            f"data.packing {data.packing} packs documents; remove one of them")
    for name, source in data.sources.items():
        if source.repeat != int(source.repeat):
            yield f"data.sources.{name}.repeat", (
                f"data.sources.{name}.repeat {source.repeat} asks for a part of each file, but data.packing "
                f"{data.packing} packs whole files; write {either([str(n) for n in _around(source.repeat)])}")


def _around(number: float) -> list[int]:
    return [n for n in (math.floor(number), math.ceil(number)) if n]


def _longest_instance(cfg: Config) -> Iterator[Problem]:
    longest, length = cfg.data.max_target_sequence_length, cfg.data.sequence_length
    if longest is not None and longest % length:
        yield "data.max_target_sequence_length", (
            f"data.max_target_sequence_length {longest} is not a multiple of data.sequence_length {length} "
            f"{division(longest, length)}; set it to {multiples(longest, length)}")


def _instance_filter(cfg: Config) -> Iterator[Problem]:
    rule = cfg.data.instance_filter
    if rule.min_period > rule.max_period:
        yield "data.instance_filter.min_period", (
            f"data.instance_filter.min_period {rule.min_period} is above data.instance_filter.max_period "
            f"{rule.max_period}, so no period is left")


def _vocabulary(cfg: Config) -> Iterator[Problem]:
    data = cfg.data
    if data.prepared is None:
        for name in ("vocab_size", "eos_id", "pad_id"):
            if getattr(data, name) is None:
                yield f"data.{name}", f"data.{name} is null; only data.prepared can supply it, so give its number"


def _vocabulary_sizes(cfg: Config) -> Iterator[Problem]:
    data = cfg.data
    if data.vocab_size is not None and data.vocab_size > cfg.model.vocab_size:
        yield "model.vocab_size", (f"model.vocab_size {cfg.model.vocab_size} has no row for the last ids of "
                                   f"data.vocab_size {data.vocab_size}; set model.vocab_size to at least "
                                   f"{data.vocab_size}")


def _special_ids(cfg: Config) -> Iterator[Problem]:
    data = cfg.data
    for name in ("eos_id", "pad_id"):
        value = getattr(data, name)
        if value is not None and data.vocab_size is not None and value >= data.vocab_size:
            yield f"data.{name}", (f"data.{name} {value} is not below data.vocab_size {data.vocab_size}; ids are "
                                   "counted from 0")


def _token_type(cfg: Config) -> Iterator[Problem]:
    data = cfg.data
    if data.dtype == "auto" or data.vocab_size is None:
        return
    size = TOKEN_TYPE_SIZES[data.dtype]
    if data.vocab_size > size:
        yield "data.dtype", (f"data.dtype {data.dtype} holds ids 0 to {size - 1}, but data.vocab_size "
                             f"{data.vocab_size} needs {data.vocab_size - 1}; write data.dtype: auto")


DATA_RULES: tuple[Callable[[Config], Iterable[Problem]], ...] = (
    _sources, _stream, _mixture, _weights, _packing, _longest_instance, _instance_filter, _vocabulary,
    _vocabulary_sizes, _special_ids, _token_type)
