"""The data as OLMo-core names it: its fingerprint of a data set and the state of its loader.

Source: OLMo-core `data/numpy_dataset.py` (fingerprint, version v2.0) and `data/data_loader.py` (state_dict).
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from maxtext.config.schema import DataConfig
from maxtext.data.documents import companion_hashes
from maxtext.data.tokens import ResolvedData

FINGERPRINT_VERSION = "v2.0"


def fingerprint(cfg: DataConfig, data: ResolvedData) -> str:
    """OLMo-core's sha256 of the class of data set, its settings, and the name and byte size of each file.

    The content of token files is not in it.
    """
    width = data.dtype.itemsize
    fields: dict[str, Any] = {"vocab_size": data.vocab_size, "pad_token_id": data.pad_id, "eos_token_id": data.eos_id,
                              "dtype": data.dtype.type}
    files = [(part.path, part.n_tokens * width) for part in data.parts]
    if data.packing is None:
        name = "NumpyFSLDataset"
        fields |= {"max_target_sequence_length": cfg.max_target_sequence_length, "bos_token_id": None}
        if cfg.mixture_tokens is not None:
            name = "NumpyFSLDatasetMixture"
            files = [(part.path, part.allotted * data.sequence_length * width) for part in data.parts]
    else:
        name = "NumpyPackedFSLDataset"
        fields |= {"long_doc_strategy": "truncate", "bos_token_id": None, "sequence_length": data.sequence_length}
        if cfg.packing != "best_fit":
            fields["packing"] = cfg.packing  # which the reference does not have: never the same as one of its own
        if cfg.packing_group > 1:
            fields["source_group_size"] = cfg.packing_group
        files = [files[i] for i in data.packing.file_order]
        if cfg.document_boundaries == "csv":
            paths = list(dict.fromkeys(path for path, _ in files))
            names = (os.path.basename(path) for path in paths)
            fields |= {"use_array_if_local": False,
                       "_metadata_fingerprint": tuple(zip(names, companion_hashes(paths), strict=True))}
    digest = hashlib.sha256(f"class={name}".encode())
    for key, value in fields.items():
        digest.update(f"{key}={value},".encode())
    for path, size in files:
        digest.update(f"path={os.path.basename(path)},size={size},".encode())
    return digest.hexdigest()


def loader_state(cfg: DataConfig, data: ResolvedData, batch: int, batches: int, epoch: int) -> dict[str, Any]:
    """The state that OLMo-core's loader saves after `batches` batches of `batch` instances of an epoch, from 1."""
    return {
        "dataset_fingerprint_version": FINGERPRINT_VERSION,
        "dataset_fingerprint": fingerprint(cfg, data),
        "batches_processed": batches,
        "tokens_processed": batches * batch * data.sequence_length,
        "seed": cfg.seed,
        "epoch": epoch,
        "dataset_type": "fsl",
        "sequence_length": data.sequence_length,
        "max_target_sequence_length": cfg.max_target_sequence_length,
    }
