"""What transformers' own modules take in and give out on a text, recorded once, so that a replay needs no torch.

A trace is one .npz: `input_ids`, `logits`, the arrays of all modules, each stored once (what one module gives out, the
next takes in), and JSON texts that say which array is which. `verify` replays it on our side, block by block.

Dims: B batch, T position, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.config.reason import reason
from maxtext.convert import ConvertError

FORMAT = "maxtext-trace-1"
LAYERS, EMBED, NORM, HEAD = "model.layers", "model.embed_tokens", "model.norm", "lm_head"
# The embedding, each layer, its parts, the norms inside of these, the final norm and the head.
RECORDED = re.compile(r"model\.embed_tokens|model\.norm|lm_head|model\.layers\.\d+(\.\w+(\.\w*norm\w*)?)?")


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one side computes.

    Attributes:
      tokens_BT: int32 ids.
      logits_BTV: float32.
      hidden: float32 (B, T, D) of the embedding, then after each layer; the last one is after the final norm, as in
        transformers. None when the golden has none.
      modules: what each module of transformers took in and gave out, by its name there; empty when not recorded.
      config: the config.json of the model; empty when not recorded.
    """

    tokens_BT: np.ndarray
    logits_BTV: np.ndarray
    hidden: list[np.ndarray] | None
    modules: Mapping[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def load_model(path: str, dtype: str = "float32") -> Any:
    """transformers' model of a folder, on CPU, with plain attention. Raises ConvertError when it is not installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]  optional
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConvertError(f"running the other side needs torch and transformers ({error}); pip install torch "
                           "transformers, or compare with a saved trace or golden: --trace or --golden FILE.npz"
                           ) from None
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager").eval()


def record(path: str, tokens_BT: np.ndarray, dtype: str = "float32", modules: bool = True) -> Trace:
    """Runs transformers' own model of a folder; without `modules` only logits and hidden states are kept."""
    model = load_model(path, dtype)
    import torch  # pyright: ignore[reportMissingImports]

    rows: list[dict[str, tuple[np.ndarray, np.ndarray]]] = []
    wanted = [(name, module) for name, module in model.named_modules() if modules and RECORDED.fullmatch(name)]
    for name, module in wanted:
        module.register_forward_hook(_recorder(name, rows), with_kwargs=True)
    logits, hidden = [], []
    with torch.no_grad():
        for row in tokens_BT:  # one row at a time: plain attention keeps all scores
            rows.append({})
            out = model(torch.from_numpy(row[None].astype(np.int64)), output_hidden_states=True, use_cache=False)
            logits.append(_host(out.logits))
            hidden.append([_host(state) for state in out.hidden_states])
    states = [np.concatenate(layer) for layer in zip(*hidden, strict=True)]
    seen = {name: (np.concatenate([row[name][0] for row in rows]), np.concatenate([row[name][1] for row in rows]))
            for name, _ in wanted}
    config = json.loads(Path(path, "config.json").read_text()) if modules else {}
    return Trace(tokens_BT.astype(np.int32), np.concatenate(logits), states, seen, config)


def _recorder(name: str, rows: list[dict[str, tuple[np.ndarray, np.ndarray]]]) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        rows[-1][name] = _host(given), _host(output[0] if isinstance(output, tuple) else output)

    return hook


def _host(tensor: Any) -> np.ndarray:
    return tensor.detach().float().numpy().copy()


def save(path: str, trace: Trace, **texts: Any) -> None:
    """Writes a trace, or a golden when there are no modules. `texts` are further JSON values. May raise OSError."""
    arrays: dict[str, np.ndarray] = {"input_ids": trace.tokens_BT}
    if not trace.modules:
        hidden = {} if trace.hidden is None else {"hidden_states": np.stack(trace.hidden)}
        _write(path, arrays | {"logits": trace.logits_BTV} | hidden)
        return
    known: dict[bytes, str] = {}

    def place(array: np.ndarray) -> str:
        key = str(array.shape).encode() + array.tobytes()
        if key not in known:
            known[key] = f"array_{len(known)}"
            arrays[known[key]] = array
        return known[key]

    arrays["logits"] = trace.logits_BTV
    known[str(trace.logits_BTV.shape).encode() + trace.logits_BTV.tobytes()] = "logits"
    index = {name: [place(given), place(out)] for name, (given, out) in trace.modules.items()}
    texts = {"format": FORMAT, "index": index, "config": dict(trace.config), **texts}
    _write(path, arrays | {name: np.array(json.dumps(value)) for name, value in texts.items()})


def _write(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    with open(path, "wb") as file:  # given a name, numpy would add .npz to it
        np.savez_compressed(file, **arrays)


def load(path: str) -> Trace:
    """A trace, or a golden: input_ids (B, T), logits (B, T, V) and perhaps hidden_states (layers + 1, B, T, D)."""
    try:
        with open(path, "rb") as opened, zipfile.ZipFile(opened), np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConvertError(f"{path}: cannot be read as .npz: {reason(error)}") from None
    missing = [name for name in ("input_ids", "logits") if name not in found]
    if missing:
        raise ConvertError(f"{path}: has no {' and no '.join(missing)}; it has {', '.join(found)}")
    ids, logits, hidden = found["input_ids"].astype(np.int32), found["logits"].astype(np.float32), None
    if ids.ndim != 2 or logits.shape[:2] != ids.shape or logits.ndim != 3:
        raise ConvertError(f"{path}: input_ids {ids.shape} and logits {logits.shape} must be (B, T) and (B, T, V)")
    if "index" not in found:
        if "hidden_states" in found:
            hidden = [state.astype(np.float32) for state in found["hidden_states"]]
        return Trace(ids, logits, hidden)
    try:
        index, config = (json.loads(str(found[name])) for name in ("index", "config"))
        modules = {name: (found[given], found[out]) for name, (given, out) in index.items()}
        layers = 1 + max(int(name.split(".")[2]) for name in modules if name.startswith(f"{LAYERS}."))
        hidden = [modules[f"{LAYERS}.{layer}"][0] for layer in range(layers)] + [modules[NORM][1]]
    except (KeyError, ValueError, TypeError) as error:
        raise ConvertError(f"{path}: is not a trace that maxtext convert trace wrote ({error!r})") from None
    return Trace(ids, logits, hidden, modules, config)
