"""transformers goes on from a trained model as we do. Needs torch and transformers: TORCH=1 scripts/test.sh."""

from __future__ import annotations

import json

import pytest

from maxtext.cli import main
from maxtext.data.tokenizer import load_tokenizer
from maxtext.train.loop import Outcome, train
from tests.materials import imported
from tests.runs import Runs, some_devices

torch, transformers = imported("torch"), imported("transformers")
TOKENS = 22  # with the prompts past the window of 8, and almost all of the 32 that it was trained with


def test_an_exported_run_goes_on_with_the_same_tokens(runs: Runs, capsys: pytest.CaptureFixture):
    cfg = runs.config("run", "train.steps=200", "schedule.total_steps=200", "eval.every=null", "checkpoint.every=null")
    assert train(cfg, devices=some_devices(1)) == Outcome(200)
    target = str(runs.folder / "hf")
    assert main(["convert", "export", cfg.run_dir, target]) == 0
    capsys.readouterr()
    asked = ["--prompt", "The list", "--prompt", "def ", "--tokens", str(TOKENS), "--json"]
    assert main(["generate", cfg.run_dir, *asked]) == 0
    ours = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["generate", target, "--tokenizer", str(next(runs.prepared.glob("*.model"))), *asked]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ours
    assert ours[0]["ids"] != ours[1]["ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = load_tokenizer(next(runs.prepared.glob("*.model")))
    for one in ours:
        ids = torch.tensor([tokenizer.encode(one["prompt"])])
        new = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
                              eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
        assert new[0, ids.shape[1] :].tolist() == one["ids"]
        assert len(one["ids"]) == TOKENS
