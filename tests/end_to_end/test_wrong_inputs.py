"""What a person may get wrong, over all verbs: one message with the next step, exit code 2 or 3, and no stack trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.checkpoint.manager import Checkpoints
from maxtext.train import loop
from maxtext.train.lock import run_lock
from tests.convert.folders import HF
from tests.runs import TEXT, Runs, restore, some_devices

pytestmark = pytest.mark.one_pass
NOT_WRITABLE = "/sys/maxtext"  # of a file system that nobody may write to, not even root
SHORT = ("train.steps=2", "checkpoint.every=1", "eval.every=null", "log.report=false", "log.tensorboard=false",
         "train.global_batch=8")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the wrong inputs are made: configs of small runs, and one run that is complete."""

    runs: Runs
    request: pytest.FixtureRequest

    @property
    def done(self) -> Path:
        return self.request.getfixturevalue("done")

    @property
    def config(self) -> str:
        return str(self.runs.yaml)

    def copy(self) -> Path:
        """The complete run, to be spoilt."""
        target = self.runs.folder / "runs" / "copy"
        shutil.copytree(self.done, target)
        return target

    def file(self, name: str, content: str | bytes = "") -> str:
        path = self.runs.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path) -> Path:
    runs = Runs(tmp_path_factory.mktemp("done"), prepared_text)
    loop.train(runs.config("done", *SHORT), devices=some_devices(1))
    return runs.directory("done")


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: a write meets what it meets on a full disk, an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _spoilt(p: Place, change: Callable[[bytes], bytes], pattern: str = "checkpoints/step_*/arrays-*/**/d/*") -> str:
    run = p.copy()
    for path in run.glob(pattern):
        path.write_bytes(change(path.read_bytes()))
    return str(run)


def _old_config(p: Place) -> list[str]:
    """A run whose newest checkpoint was saved by a version that had a key which there is no more."""
    cfg = p.runs.config("copy", *SHORT)
    p.copy()
    restored = restore(cfg, 2, (1, 1, 1))
    with run_lock(cfg.run_dir) as lease:
        checkpoints = Checkpoints(f"{cfg.run_dir}/checkpoints", cfg.checkpoint, lease=lease,
                                  config_text=restored.config_text.replace("\nlog:", "\nlogs_of_old:", 1))
        checkpoints.save(3, restored.state, restored.extra)
        checkpoints.wait()
        checkpoints.close()
    return ["train", p.config, "run_name=copy", *SHORT, "train.steps=4"]


def _flip(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


def _in_use(p: Place) -> list[str]:
    (p.runs.folder / "runs").write_text("a file where the folder of all runs should be")
    return ["train", p.config, *SHORT]


# Name -> what is asked for, what the message says, and, where the disk is full, from which size of a file on.
CASES: dict[str, tuple[Callable[[Place], list[str]], str]] = {
    "no such verb": (lambda p: ["trian"], "did you mean 'train'?"),
    "no such config": (lambda p: ["train", "quikstart"], "did you mean quickstart?"),
    "a config that is a folder": (lambda p: ["train", "configs"], "is a folder, not a YAML file"),
    "a config that is no text": (lambda p: ["train", p.file("x.yml", b"\xff\xfe\x00")], "save the file as UTF-8"),
    "an empty config": (lambda p: ["train", p.file("x.yml")], "the file is empty; a config is a mapping"),
    "a config that is no YAML": (lambda p: ["train", p.file("x.yml", "a: [1\nb: 2\n")], "x.yml:"),
    "a wrong type": (lambda p: ["train", p.config, "optim.lr=fast"], "optim.lr: fast is not a number"),
    "an unknown key": (lambda p: ["train", p.config, "optim.learning_rate=1"], "optim.lr"),
    "an unknown value": (lambda p: ["train", p.config, "optim.kind=adam"], "adamw"),
    "an option that is a setting": (lambda p: ["train", p.config, "--lr", "1e-3"], "without dashes: optim.lr=1e-3"),
    "a run whose name is near": (lambda p: ["report", f"{p.done}x"], "done?)"),
    "the folder of runs": (lambda p: ["eval", str(p.done.parent)], "runs there: "),
    "an import of a run": (lambda p: ["convert", "import", str(p.done), str(p.runs.folder / "m")],
                           "is a run of ours: `maxtext convert export`"),
    "an export of what is exported": (lambda p: [
        "convert", "export", str(HF / "olmo2"), str(p.runs.folder / "hf")], "it is a transformers folder"),
    "a step that is not there": (lambda p: ["eval", str(p.done), "--step", "7"], "there is no step 7 in "),
    "a word that is no setting": (lambda p: ["train", p.config, "--", "lr"], "write dotted.key=value"),
    "too big a mesh": (lambda p: ["train", p.config, "mesh.fsdp=512"], "= 512 devices, but there are 1"),
    "a batch that does not divide": (lambda p: ["train", p.config, "--dry-run", "--devices", "8",
                                                "train.global_batch=12"], "set train.global_batch to 8 or 16"),
    "no such data": (lambda p: ["train", p.config, "data.prepared=absent"], "absent"),
    "data of another vocabulary": (lambda p: ["train", p.config, "model.vocab_size=100"], "model.vocab_size"),
    "a folder that nobody may write": (lambda p: ["train", p.config, *SHORT, f"output_dir={NOT_WRITABLE}"],
                                       "set output_dir to a place that you may write"),
    "a file where runs should be": (_in_use, "set output_dir to a place that you may write"),
    "a tokenizer that is none": (lambda p: ["train", p.config, *SHORT, 'generate.prompts=["a"]', "generate.every=1",
                                            f"eval.tokenizer={p.file('x.json', '{}')}"], "not a tokenizer.json"),
    "a task that is none": (lambda p: ["train", p.config, *SHORT, "eval.every=1", "eval.tasks=[arc_nothing]"],
                            "arc_nothing"),
    "another model than the saved one": (lambda p: [
        p.copy() and "train", p.config, "run_name=copy", *SHORT, "train.steps=3", "model.d_ff=32"],
        "start a new run with another run_name"),
    "a config of another version": (_old_config, "start a new run with another run_name"),
    "checkpoints that are all damaged": (lambda p: [
        _spoilt(p, _flip) and "train", p.config, "run_name=copy", *SHORT, "train.steps=3"],
        "checkpoint.allow_fresh=true"),
    "weights of a run that is not there": (lambda p: ["train", p.config, *SHORT, "train.init_from.path=absent"],
                                           "train.init_from.path absent"),
    "a dry run on no devices": (lambda p: ["train", p.config, "--dry-run", "--devices", "0"], "give 1 or more"),
    "no workers": (lambda p: ["launch", "local", p.config, "--workers", "0"], "give 1 or more"),
    "a sweep of nothing": (lambda p: ["sweep", p.config], "give --over key=value,value,... or --seeds N"),
    "a sweep over an unknown key": (lambda p: ["sweep", p.config, "--over", "optim.lrr=1,2"], "optim.lr"),
    "a chip that is none": (lambda p: ["plan", p.config, "--topology", "v9:2x2"], "v5p"),
    "a plan into no folder": (lambda p: ["plan", p.config, "--json", "absent/x.json"], "make it first"),
    "a comparison with no config": (lambda p: ["compare", p.config, "absent"], "absent"),
    "a source without a name": (lambda p: ["data", "prepare", "--out", str(p.runs.folder / "d"), "--source", "x"],
                                "NAME="),
    "a source that is not there": (lambda p: [
        "data", "prepare", "--out", str(p.runs.folder / "d"), "--source", "x=absent"], "absent"),
    "data into a folder that nobody may write": (lambda p: [
        "data", "prepare", "--out", f"{NOT_WRITABLE}/d", "--source", f"x={p.file('x.txt', 'text ' * 999)}"],
        NOT_WRITABLE),
    "a library that is not installed": (lambda p: [
        "data", "prepare", "--out", str(p.runs.folder / "d"), "--tokenizer", "tiktoken:gpt2", "--source",
        f"x={p.file('x.txt', 'text ' * 999)}", "--heldout-fraction", "x=0"], "pip install"),
    "a batch before the first": (lambda p: ["data", "inspect", p.config, "--step", "0"], "updates are counted from 1"),
    "statistics of no data": (lambda p: ["data", "stats", "absent"], "absent"),
    "an audit of no run": (lambda p: ["data", "audit", "absent"], "absent does not exist; give the folder of a run"),
    "checkpoints of no run": (lambda p: ["checkpoint", "ls", "absent"], "give the folder of a run"),
    "a step that was not saved": (lambda p: ["checkpoint", "diff", f"{p.done}@1", f"{p.done}@7"], "7"),
    "a mean of one run": (lambda p: ["checkpoint", "merge", str(p.runs.folder / "m"), "absent"], "give two or more"),
    "a mean with no run": (lambda p: ["checkpoint", "merge", str(p.runs.folder / "m"), "absent", "absent2"], "absent"),
    "no transformers folder": (lambda p: ["convert", "import", "absent", str(p.runs.folder / "m")],
                               "give the folder of a transformers model"),
    "weights that are cut off": (lambda p: ["convert", "import", _cut_folder(p), str(p.runs.folder / "m")],
                                 "model.safetensors"),
    "an export of a damaged checkpoint": (lambda p: ["convert", "export", _spoilt(p, _flip), str(p.runs.folder / "hf")],
                                          "has changed since it was saved"),
    "a proof against nothing": (lambda p: ["convert", "verify", str(p.done)], "give the transformers folder"),
    "a trace of nothing": (lambda p: ["convert", "trace", "absent", str(p.runs.folder / "t.npz")], "absent"),
    "an evaluation of a damaged checkpoint": (lambda p: ["eval", _spoilt(p, _flip)], "is bad"),
    "an evaluation of nothing": (lambda p: ["eval", "absent"], "absent does not exist; give a run"),
    "a completion of nothing": (lambda p: ["generate", "absent", "--prompt", "a"], "absent does not exist; give a run"),
    "a completion by a tokenizer that is none": (lambda p: [
        "generate", str(p.done), "--prompt", "a", "--tokenizer", p.file("x.json", "{}")], "not a tokenizer.json"),
    "a report of nothing": (lambda p: ["report", "absent"], "give the folder of a run"),
    "a report of damaged metrics": (lambda p: ["report", _spoilt(p, lambda raw: b"{\n" + raw, "metrics.jsonl")],
                                    "metrics.jsonl:1: not a metrics line"),
    "a reference that is not there": (lambda p: ["report", str(p.done), "--reference", "absent.csv"], "absent.csv"),
}
FULL: dict[str, tuple[Callable[[Place], list[str]], str, int]] = {
    "checkpoints": (lambda p: ["train", p.config, *SHORT], "was not saved to", 20_000),
    "imported weights": (lambda p: ["convert", "import", str(HF / "olmo2"), str(p.runs.folder / "m")], "large", 4_000),
    "exported weights": (lambda p: ["convert", "export", str(p.done), str(p.runs.folder / "hf")], "large", 4_000),
    "token files": (lambda p: [
        "data", "prepare", "--out", str(p.runs.folder / "d"), "--vocab-size", "300", "--heldout-fraction", "x=0",
        "--source", f"x={TEXT / 'prose'}"], "large", 1_000),
    "a report": (lambda p: ["report", str(p.copy())], "large", 1_000),
}


def _cut_folder(p: Place) -> str:
    target = p.runs.folder / "hf_source"
    shutil.copytree(HF / "olmo2", target)
    for path in target.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    return str(target)


@pytest.fixture(autouse=True)
def one_device_and_no_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # so an import fails, as where it is not installed
    monkeypatch.setattr(loop, "train", functools.partial(loop.train, devices=some_devices(1)))


def answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and what was said on stderr; an exception that is no exit is what a person sees as a stack trace."""
    capsys.readouterr()
    try:
        code = cli.main(arguments)
    except SystemExit as exit:  # of argparse
        code = exit.code if isinstance(exit.code, int) else 1
    return code, capsys.readouterr().err


def check(code: int, said: str, message: str) -> None:
    assert code in (2, 3), said
    assert message in said
    assert "Traceback" not in said
    assert "[Errno" not in said
    told = [line for line in said.splitlines() if message in line]
    assert len(told) == 1, said


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_message_with_the_next_step(name: str, runs: Runs, request: pytest.FixtureRequest,
                                                     capsys: pytest.CaptureFixture[str]):
    ask, message = CASES[name]
    check(*answered(ask(Place(runs, request)), capsys), message)


def test_a_wrong_name_is_said_once(capsys: pytest.CaptureFixture[str]):
    for arguments in (["compare", "quickstart", "nope"], ["train", "nope"], ["config", "show", "nope"]):
        assert answered(arguments, capsys)[1].startswith("nope: no such config (looked for nope, ")


@pytest.mark.skipif(sys.platform == "darwin", reason="the limit ends the process there")
@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_one_message(name: str, runs: Runs, request: pytest.FixtureRequest,
                                    capsys: pytest.CaptureFixture[str]):
    ask, message, size = FULL[name]
    arguments = ask(Place(runs, request))
    with full_disk(size):
        code, said = answered(arguments, capsys)
    check(code, said, message)
