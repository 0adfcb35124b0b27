"""Every command of docs/reproduce_olmo3.md, run as it stands there, on the tiny twin of what it names.

The page is the source: a config becomes its tiny twin, a number of updates a small one, `$BUCKET` a temporary folder,
and the authors' files small ones at the same places. The chain in small that ends the page runs in test_stages.
"""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maxtext.config.load import find_config, load
from maxtext.config.schema import Config
from tests.convert.folders import HF, golden
from tests.oracles.downstream import make
from tests.page_commands import at_full_size, in_small, mentioned, reason_not_to_run, run, shown, words

TWINS = {"olmo3_7b": "stage1", "olmo3_7b_stage1b": "stage1b", "olmo3_7b_stage2": "stage2", "olmo3_7b_long": "long",
         "olmo3_32b": "stage1", "olmo3_32b_stage2": "stage2", "olmo3_32b_long": "long"}
# Updates of the real runs, and of the twins'. A number that is on the page and not here fails.
UPDATES = {596_047: 2, 1_413_814: 4, 47_684: 2, 656_000: 2, 23_842: 2, 11_921: 3, 11_000: 2, 10_000: 1}
# Words of the page that stand for what is not here.
STAND_INS = {
    "data.sources.midtraining.mix=OLMo-midtraining-mix-0925-ingredient2-100B.txt": ["data.seed=1338"],  # another order
    "eval/olmo3_downstream": ["{bucket}/downstream.yml"],  # invented questions
    "data.sequence_length=8192": ["data.sequence_length=64"],
    "eval.batch=64": ["eval.batch=8"],
}
# transformers is not everywhere: what it computes is committed.
VERIFY_WITH = ["--golden", str(golden("olmo3"))]
REAL = "Olmo-3-1025-7B"


def named_only(text: str) -> bool:
    """Whether a command cannot run, for a reason; `maxtext convert verify` can here, on what torch once computed."""
    return reason_not_to_run(text) is not None and not text.startswith("maxtext convert verify ")


def twin(line: list[str], page: Config, prepared: Path) -> list[str]:
    """The words of a training command for the twin: its own overrides, and the page's numbers made small."""
    program, script, name, *overrides = line
    small = {"train.steps": UPDATES[page.train.steps], "train.take_over_at": page.train.take_over_at,
             "train.init_from.step": page.train.init_from.step}
    for key, value in small.items():
        small[key] = value if key == "train.steps" or value is None else UPDATES[value]
    given = [word for word in overrides if word.partition("=")[0] not in small]
    return [program, script, f"tiny/olmo3_tiny_{TWINS[name]}",
            f"train.init_from.path={page.train.init_from.path or 'null'}", *given,
            f"train.init_from.optimizer={str(page.train.init_from.optimizer).lower()}", f"run_name={page.run_name}",
            f"data.prepared={prepared}", "checkpoint.every=1", "eval.every=null", "log.report=false",
            *(f"{key}={'null' if value is None else value}" for key, value in small.items())]


def stand_in(word: str, bucket: str) -> list[str]:
    if word in STAND_INS:
        return [text.replace("{bucket}", bucket) for text in STAND_INS[word]]
    path, at, step = word.rpartition("@")
    return [f"{path}@{UPDATES[int(step)]}"] if at and step.isdigit() else [word]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`$BUCKET` with the files that the page expects in it; the working folder is its data folder, as on the page."""
    bucket = tmp_path_factory.mktemp("bucket")
    (bucket / "data").mkdir()
    shutil.copytree(HF / "olmo3", bucket / "hf" / REAL)
    shutil.copy(Path(make.__file__).parent / "tokenizer.json", bucket / "data" / "tokenizer.json")
    (bucket / "downstream.yml").write_text(
        f"eval: {{tasks: [gsm8k_gold_bpb_5shot], tasks_path: {Path(make.__file__).parent / 'files'}}}\n")
    rng = np.random.default_rng(0)
    for held_out in load("olmo3_7b").eval.sets.values():
        for path in held_out.paths:
            (bucket / "data" / path).parent.mkdir(parents=True, exist_ok=True)
            documents = rng.integers(3, 90, (16, 12))
            documents[:, -1] = 2  # the end of each
            documents.astype("u1").tofile(bucket / "data" / path)
    with contextlib.chdir(bucket / "data"):
        yield bucket


@pytest.fixture(scope="module")
def pages_runs(bucket: Path, prepared_text: Path) -> dict[str, Config]:
    """Runs every training and merging command of the page in its order; their configs on the page, by folder."""
    found: dict[str, Config] = {}
    for text in at_full_size():
        line = words(text, str(bucket))
        if line[0] == "python":
            page = load(find_config(line[2]), line[3:])
            line, found[page.run_dir] = twin(line, page, prepared_text), page
        elif line[:3] != ["maxtext", "checkpoint", "merge"]:
            continue
        assert run([new for word in line for new in stand_in(word, str(bucket))]) == 0, text
    return found


def test_the_training_commands_lead_from_an_empty_bucket_to_the_end(bucket: Path, pages_runs: dict[str, Config]):
    for folder, page in pages_runs.items():
        assert folder.startswith(f"{bucket}/runs/")
        steps = [json.loads(line)["step"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(UPDATES[page.train.steps] + 1)), folder
    assert {path.name for path in (bucket / "runs").iterdir() if path.is_dir()} >= {
        "olmo3_7b", "olmo3_7b_stage2", "olmo3_7b_long", "olmo3_32b", "olmo3_32b_stage2", "olmo3_32b_stage2_2",
        "olmo3_32b_merged", "olmo3_32b_long", "olmo3_32b_final"}


def test_the_commands_that_compare_and_hand_in(bucket: Path, pages_runs: dict[str, Config],
                                               capsys: pytest.CaptureFixture[str]):
    curve = Path(bucket, "runs", "olmo3_7b", "metrics.jsonl").read_text().splitlines()[1:]
    with open("CURVE.csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "train/CE loss"), *(
            (record["step"], record["train/CE loss"]) for record in map(json.loads, curve))])
    done = []
    for text in [*at_full_size(), *mentioned()]:
        line = words(text, str(bucket))
        if line[0] != "maxtext" or line[1:3] == ["checkpoint", "merge"] or named_only(text):
            continue
        line = [new for word in line for new in stand_in(word, str(bucket))]
        line += VERIFY_WITH if line[1:3] == ["convert", "verify"] else []
        assert run(line) == 0, (text, capsys.readouterr().err)
        done.append(" ".join(line[1:3]) if line[1] == "convert" else line[1])
    assert sorted(done) == ["convert export", "convert import", "convert verify", "eval", "eval", "report"]
    out = capsys.readouterr().out
    assert "pass: train/CE loss against CURVE.csv: largest gap +0.000000" in out
    scores = json.loads((bucket / "data" / "eval_public_0.json").read_text())
    assert len([name for name in scores["metrics"] if name.endswith("/CE loss")]) == 13  # 11 sets and two means
    assert "gsm8k_gold_bpb_5shot" in (bucket / "data" / "eval_olmo3_7b_4.json").read_text()
    assert (bucket / "hf" / "mine" / "model.safetensors").is_file()


def test_nothing_on_the_page_is_left_out():
    """Commands are training, merging, compared above, run by test_stages, or named with the reason."""
    everything = {*shown(), *mentioned()}
    for text in {text for text in everything if not named_only(text)} - set(in_small()):
        program, *rest = words(text)
        trained = (program, rest[0].rpartition("/")[2]) == ("python", "train.py")
        assert trained or (program == "maxtext" and len(rest) > 2), text
    assert set(STAND_INS) <= {word for text in everything for word in words(text)}
    assert {words(text)[2] for text in at_full_size() if text.startswith("python")} == set(TWINS)
