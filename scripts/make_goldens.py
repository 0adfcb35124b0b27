"""Copy what the tests need of the reference's training cases into tests/oracles/cases, in compact form.

    python scripts/make_goldens.py FOLDER_OF_CASES

FOLDER_OF_CASES holds the cases as the reference wrote them; any test run can also read it whole
(`pytest tests/oracles --oracle-cases FOLDER_OF_CASES`).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from maxtext.convert.safetensors import read_header

OUT = Path(__file__).parents[1] / "tests" / "oracles" / "cases"
CASES = ("a1_fp32", "b1_bf16_fsdp", "c1_skip_r32_gqa", "c2_skip_r128", "d_instance_filter_u16", "e_midtrain",
         "f1_docmask_fsl", "f2_packed_yarn", "g_moe_dropless", "h_fp32_2ranks")
SHARES_TOKENS = ("b1_bf16_fsdp", "h_fp32_2ranks")  # those of a1
ROUTER = re.compile(r"train/block \d+/(load imbalance|load balancing loss unscaled|router Z loss unscaled)")
METRICS = ("train/CE loss", "train/Z loss unscaled", "optim/total grad norm", "optim/LR (group 0)",
           "optim/step skipped", "train/masked labels (%)", "train/masked instances (%)")
STEP_KEYS = ("step", "instance_indices", "doc_lens", "instance_mask_kept")
POSITION_STRIDE = 4  # of the final logits every fourth position is kept


def compact(source: Path, target: Path) -> None:
    name = source.name
    target.mkdir(parents=True)
    shutil.copy(source / "config.json", target)
    record = json.loads((source / "record.json").read_text())
    lines = ",\n".join(json.dumps(_step(step), separators=(",", ":")) for step in record["steps"])
    evals = json.dumps(record["evals"])
    (target / "record.json").write_text(f'{{"steps": [\n{lines}\n],\n"evals": {evals}}}\n')
    for rank in source.glob("record_rank*.json"):
        shutil.copy(rank, target)
    logits = np.load(source / "logits.npz")
    positions = np.arange(0, logits["fixed_input_ids"].shape[1], POSITION_STRIDE)
    parted = "tolerance" in json.loads((source / "config.json").read_text())  # the final weights are not the same
    kept = {} if parted else {"positions": positions, "final": logits["final"][:, positions]}
    np.savez_compressed(target / "logits.npz", fixed_input_ids=logits["fixed_input_ids"], **kept)
    if (source / "init_hf").exists():  # without the weights: tests draw them from the seed as torch does
        (target / "init_hf").mkdir()
        shutil.copy(source / "init_hf" / "config.json", target / "init_hf")
    if name not in SHARES_TOKENS:
        shutil.copytree(source / "tokens", target / "tokens")
        if (source / "tokens_val").exists():
            shutil.copytree(source / "tokens_val", target / "tokens_val")
    before = json.loads((source / "config.json").read_text())["init_from"]
    if before is not None:
        weights = read_all(source.parent / before / "final_hf" / "model.safetensors")
        moments = {tensor: _rounded(x) for tensor, x in read_all(source / "init_optim.safetensors").items()}
        np.savez_compressed(target / "start.npz", **weights, **moments)


def read_all(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in read_header(str(path)).items()}


def _rounded(x: np.ndarray) -> np.ndarray:
    """Adam's moments to 16 bits of mantissa: a change of 1e-5 of an update, and a quarter less to store."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x80) & np.uint32(0xFFFFFF00)).view(np.float32)


def _step(step: dict[str, Any]) -> dict[str, Any]:
    kept = {key: step[key] for key in STEP_KEYS if key in step}
    metrics = {name: value for name, value in step["metrics"].items() if name in METRICS or ROUTER.fullmatch(name)}
    return kept | {"metrics": metrics}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    shutil.rmtree(OUT, ignore_errors=True)
    for name in CASES:
        compact(Path(sys.argv[1]) / name, OUT / name)
        size = sum(file.stat().st_size for file in (OUT / name).rglob("*") if file.is_file())
        print(f"{name}: {size / 1e6:.2f} MB")
