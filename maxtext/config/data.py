"""The data section of the configuration: sources and their mixture, packing, order, and streams."""

from __future__ import annotations

import dataclasses
from typing import Literal

from maxtext.config.field import field

Packing = Literal["chunk", "best_fit", "first_fit", "padded"]
PackingTies = Literal["numpy", "stable"]
DocumentBoundaries = Literal["eos", "csv"]
TokenDtype = Literal["auto", "uint8", "uint16", "uint32"]
StreamKind = Literal["none", "hf", "ray"]
Tail = Literal["drop", "pad", "raise"]


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One named training source: token files and how often each epoch passes over them."""

    paths: tuple[str, ...] = field("Token files (or globs, sorted by name) in data-set order.", ())
    mix: str | None = field("A file of `label,path` lines instead of paths; `{TOKENIZER}` in a path is replaced.", None)
    root: str = field("Folder or URL that relative paths start from.", "")
    tokenizer_placeholder: str = field("What `{TOKENIZER}` in the mix file stands for.", "allenai/dolma3-tokenizer")
    repeat: float = field("Passes over this source in one epoch; 2.5 is two passes and the first half of each file.",
                          1.0, also=("weight",), above=0)
    ratio: float | None = field("Share of data.mixture_tokens that this source gives, instead of `repeat`.", None,
                                also=("target_ratio",), above=0, maximum=1)
    weights: tuple[float, ...] = field("Share of every batch that this source gives, in each stage of "
                                       "data.mixture_steps, instead of `repeat`.", (), minimum=0, maximum=1)
    max_repetition: float = field("With ratio or weights: most passes over this source.", 1.0,
                                  also=("max_repetition_ratio",), minimum=1)
    max_source_fraction: float = field("With ratio: largest part of this source that may be used.", 1.0, above=0,
                                       maximum=1)


@dataclasses.dataclass(frozen=True)
class InstanceFilterConfig:
    """Which instances are left out of the loss because they repeat themselves; they stay in the batch."""

    enabled: bool = field("Whether instances with long repetitions get no loss.", False)
    min_period: int = field("Shortest repeated pattern, in tokens.", 1, also=("repetition_min_period",), minimum=1)
    max_period: int = field("Longest repeated pattern, in tokens.", 13, also=("repetition_max_period",), minimum=1)
    max_count: int = field("An instance with this many repetitions in a row is rejected.", 32,
                           also=("repetition_max_count",), minimum=3)
    count_rejected: bool = field("Whether the loss is divided also by the tokens of rejected instances, as in the "
                                 "reference; false: by real targets only.", True)


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """Text files that a library streams: never all in memory, in the order of the files, tokenized while training."""

    kind: StreamKind = field("hf = Hugging Face datasets (maxtext[datasets]); ray = Ray Data (maxtext[ray]); none = "
                             "data.sources.", "none")
    paths: tuple[str, ...] = field("Files (or globs, sorted by name): all .parquet, or all .jsonl (.gz).", ())
    key: str = field("Column of the text, or of lists of ids.", "text")
    tokenizer: str | None = field("A tokenizer's file; null: that of data.prepared.", None)
    tail: Tail = field("At the end of the files, when less than a batch is left: drop = left out; pad = filled up with "
                       "padding, which has no weight in the loss; raise = an error.", "drop")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Training data: token files in OLMo's format and the order in which they are seen."""

    sequence_length: int = field("Tokens in one instance.", also=("max_target_length", "seq_len", "max_seq_len"),
                                 minimum=2)
    sources: dict[str, SourceConfig] = field("Named sources, in data-set order.", {})
    prepared: str | None = field(
        "A folder written by `maxtext data prepare`; it supplies paths, vocabulary, eos, pad and held-out sets.", None)
    vocab_size: int | None = field("Ids of the tokenizer; every token must be below it. null: from `prepared`.", None,
                                   minimum=1)
    eos_id: int | None = field("End-of-document id. null: from `prepared`.", None, minimum=0)
    pad_id: int | None = field("Padding id. null: from `prepared`.", None, minimum=0)
    dtype: TokenDtype = field("Integer type of the token files; auto is the smallest that holds vocab_size - 1.",
                              "auto")
    seed: int = field("Seed of the global shuffle (epoch e uses seed + e, counted from 1).", 0, minimum=0)
    document_masking: bool = field("Whether attention stays inside each document of an instance.", False,
                                   also=("generate_doc_lengths", "intra_document_masking"))
    document_boundaries: DocumentBoundaries = field(
        "Packed documents only, where they end: eos = after each end-of-document id; csv = as the .csv.gz file beside "
        "each token file says.", "eos", also=("use_array_if_local",))
    packing: Packing = field("chunk = each file is cut every sequence_length tokens; best_fit, first_fit = whole "
                             "documents, longest or in order first, and padding; padded = one document each.", "chunk")
    packing_group: int = field("best_fit and first_fit: consecutive files whose documents are packed together.", 8,
                               also=("source_group_size",), minimum=1)
    packing_seed: int | None = field("Packed documents only: seed of the order of files; null: as listed.",
                                     None, also=("source_permutation_seed",), minimum=0)
    packing_ties: PackingTies = field(
        "best_fit only, documents of equal length: numpy = as its argsort leaves them, which is the reference but "
        "differs between kinds of CPU; stable = in the order of the files.", "numpy")
    instance_filter: InstanceFilterConfig = field("Leaving repetitive instances out.", InstanceFilterConfig,
                                                  also=("instance_filter_config",))
    max_target_sequence_length: int | None = field(
        "Longest instance that the same data order must serve later: files are cut and shuffled in blocks of it. "
        "null: sequence_length.", None, minimum=2)
    mixture_tokens: int | None = field("Tokens in one epoch of a mixture, whose sources give a ratio.", None,
                                       also=("requested_tokens",), minimum=1)
    mixture_steps: tuple[int, ...] = field("Update, from 1, at which each stage of the sources' weights begins.", (1,),
                                           minimum=1)
    stream: StreamConfig = field("Text that is read and tokenized while training, instead of token files.",
                                 StreamConfig)
    bad_instances: float = field("Share of a run's instances that may be unreadable or hold ids beyond vocab_size: "
                                 "they are left out of the loss and written down; one more ends the run.", 1e-6,
                                 minimum=0, maximum=1)
    prefetch: int = field("Batches read ahead of the step.", 4, minimum=0)
    workers: int = field("Reader processes; 0 reads in threads of this process. The order does not depend on it.", 0,
                         minimum=0)

    @property
    def packs_documents(self) -> bool:
        """Whether instances are whole documents and padding, and not pieces of files."""
        return self.packing != "chunk"

    @property
    def pads(self) -> bool:
        """Whether instances may end in padding, or be nothing else."""
        return self.packs_documents or (self.stream.kind != "none" and self.stream.tail == "pad")

    @property
    def weighted(self) -> bool:
        """Whether every batch is made up by the sources' weights."""
        return any(source.weights for source in self.sources.values())
