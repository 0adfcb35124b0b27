"""`dataset.json`: what a folder written by `maxtext data prepare` holds."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.config.reason import reason
from maxtext.data import DataError

FORMAT = "maxtext-tokens"
VERSION = 1
NAME = "dataset.json"
DTYPES = {"uint8": np.dtype("<u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """One headerless token file of a prepared data set; `path` is absolute or relative to the working directory."""

    path: str
    tokens: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared data set; `special_tokens` is the policy for their names inside texts."""

    folder: Path
    vocab_size: int
    eos_id: int
    pad_id: int
    dtype: np.dtype
    train: dict[str, tuple[TokenFile, ...]]
    heldout: dict[str, tuple[TokenFile, ...]]
    token_bytes: np.ndarray
    tokenizer: Path
    bos_id: int | None = None
    special_tokens: str = "literal"

    def tokens_of(self) -> dict[str, int]:
        """Number of tokens by path, of all files."""
        groups = [*self.train.values(), *self.heldout.values()]
        return {file.path: file.tokens for group in groups for file in group}

    def source(self, name: str) -> tuple[TokenFile, ...]:
        """Training files of one source.

        Raises:
          DataError: there is no such source; names the nearest.
        """
        if name not in self.train:
            near = difflib.get_close_matches(name, self.train, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; name those, or drop it with data.sources.{name}=null"
            raise DataError(f"data.sources.{name}: gives no paths and {self.folder / NAME} has only "
                            f"{', '.join(self.train)}{hint}")
        return self.train[name]


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned type that holds vocab_size - 1 (OLMo's rule)."""
    for dtype in DTYPES.values():
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise DataError(f"vocab_size {vocab_size} is above 2^32")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The JSON of a prepared folder.

    Raises:
      DataError: there is none, or it is not of this format and version.
    """
    path = Path(folder, NAME)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: not found; write it with `maxtext data prepare --out {folder}`") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read ({reason(error)})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: not a data set of `maxtext data prepare`")
    if manifest.get("version") != VERSION:
        raise DataError(f"{path}: format version {manifest.get('version')}; this program reads version {VERSION}; "
                        f"run `maxtext data prepare --out {folder} --force` again")
    return manifest


def load_prepared(folder: str | Path) -> Prepared:
    """Reads a prepared folder's manifest and token byte lengths.

    Raises:
      DataError: the manifest is missing, of another version or incomplete.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        dtype = DTYPES[manifest["dtype"]]
        split = {
            part: {name: tuple(TokenFile(str(folder / file["path"]), int(file["tokens"]), file["sha256"])
                               for file in source[part]["files"])
                   for name, source in manifest["sources"].items()}
            for part in ("train", "heldout")
        }
        prepared = Prepared(
            folder=folder, vocab_size=int(manifest["vocab_size"]), eos_id=int(manifest["eos_id"]),
            pad_id=int(manifest["pad_id"]), dtype=dtype, train=split["train"],
            heldout={name: files for name, files in split["heldout"].items() if files},
            token_bytes=np.load(folder / "token_bytes.npy"), tokenizer=folder / manifest["tokenizer"]["file"],
            bos_id=manifest["bos_id"], special_tokens=manifest.get("special_tokens", "literal"))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / NAME}: incomplete: {error!r}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'token_bytes.npy'}: cannot read ({reason(error)})") from error
    if prepared.token_bytes.shape != (prepared.vocab_size,):
        raise DataError(f"{folder / 'token_bytes.npy'}: has shape {prepared.token_bytes.shape}, but vocab_size is "
                        f"{prepared.vocab_size}")
    return prepared
