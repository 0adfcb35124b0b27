"""A run that was stopped, killed or damaged and then continued is, bit for bit, the run that never was."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from maxtext.checkpoint import integrity
from maxtext.config.schema import Config
from maxtext.data import DataError
from maxtext.parallel.sharding import sharding
from maxtext.train import loop
from maxtext.train.schedule import learning_rate
from maxtext.train.state import abstract_state
from tests.runs import (
    Runs,
    command,
    environment,
    lines,
    reproducible,
    restore,
    run_child,
    saved_bits,
    saved_steps,
    some_devices,
    when_written,
)
from tests.tiny import mesh_of

KILLED = "tests/end_to_end/killed.py"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path) -> Config:
    """40 updates without a break, on two devices of this process that share all weights."""
    cfg = Runs(tmp_path_factory.mktemp("straight"), prepared_text).config("straight")
    assert loop.train(cfg, devices=some_devices(2)) == loop.Outcome(40)
    assert [line["step"] for line in lines(cfg)] == list(range(41))
    assert saved_steps(cfg) == [10, 20, 30, 40]
    return cfg


def check_same_run(cfg: Config, straight: Config) -> None:
    """All metrics of all updates, and every bit of the last state: weights, moments, count, windows, step, RNG."""
    assert reproducible(lines(cfg)) == reproducible(lines(straight))
    assert saved_bits(cfg, 40) == saved_bits(straight, 40)


def test_what_is_compared_tells_updates_apart(straight: Config):
    """The comparisons of this file would mean nothing if losses, fingerprints or states repeated themselves."""
    records = reproducible(lines(straight))
    assert [record["step"] for record in records if "eval/lm/code/CE loss" in record] == [0, 10, 20, 30, 40]
    for name in ("train/CE loss", "optim/total grad norm", "data/fingerprint"):
        assert len({record[name] for record in records[1:]}) == 40, name
    earlier, later = saved_bits(straight, 30), saved_bits(straight, 40)
    same = {name for name in later if earlier[name] == later[name]}
    assert same == {"rng", "optimizer.skipped"}
    assert {"step", "optimizer.count", "optimizer.learning_rate", "optimizer.loss_window",
            "optimizer.grad_norm_window", "optimizer.n_recorded"} < later.keys()


@pytest.mark.parametrize(("number", "stop"), [(signal.SIGTERM, 20), (signal.SIGINT, 23)])
def test_a_stop_and_a_resume_change_nothing(runs: Runs, straight: Config, monkeypatch: pytest.MonkeyPatch,
                                            number: signal.Signals, stop: int, capsys: pytest.CaptureFixture[str]):
    """20 + 20 updates, with an evaluation due at the stop, and 23 + 17; no save is due at either."""
    cfg = runs.config("run", "checkpoint.every=40")
    with monkeypatch.context() as patch:
        when_written(patch, stop - 1, lambda: os.kill(os.getpid(), number))
        assert loop.train(cfg, devices=some_devices(2)) == loop.Outcome(stop, number.name)
    assert f"stopped by {number.name} after update {stop} of 40; all is saved, and the same command continues" in \
        capsys.readouterr().out
    assert reproducible(lines(cfg)) == reproducible(lines(straight))[:stop + 1]
    assert saved_steps(cfg) == [stop]
    if stop == 20:
        assert saved_bits(cfg, 20) == saved_bits(straight, 20)
    assert loop.train(cfg, devices=some_devices(2)) == loop.Outcome(40)
    assert f"resuming {cfg.run_dir} from update {stop} of 40" in capsys.readouterr().out
    check_same_run(cfg, straight)


def test_raising_the_number_of_updates_continues_a_complete_run(runs: Runs, straight: Config):
    """schedule.total_steps is 40 throughout; the first part ends between two saves and two evaluations."""
    part = ("eval.at_end=false", "train.steps=23")
    assert loop.train(runs.config("run", *part), devices=some_devices(2)) == loop.Outcome(23)
    cfg = runs.config("run")
    assert loop.train(cfg, devices=some_devices(2)) == loop.Outcome(40)
    check_same_run(cfg, straight)


def test_a_checkpoint_holds_exactly_its_updates_and_the_schedule_goes_on(straight: Config):
    """Warm-up 10, cosine to 40: the resumed runs above have the lines of this one, whose rates are checked here."""
    state = restore(straight, 20, (1, 1, 1)).state
    assert int(state.step) == int(state.optimizer.count) == int(state.optimizer.n_recorded) == 20
    records = lines(straight)
    assert float(state.optimizer.learning_rate) == records[20]["optim/LR (group 0)"]
    window = np.asarray(state.optimizer.loss_window)
    assert window[:20].tolist() == [record["train/CE loss"] for record in records[1:21]]
    assert not window[20:].any()
    for step in range(1, 41):
        assert records[step]["optim/LR (group 0)"] == pytest.approx(learning_rate(straight, step), rel=1e-6)
    assert learning_rate(straight, 10) == pytest.approx(straight.optim.lr)
    assert learning_rate(straight, 40) == pytest.approx(straight.optim.lr * straight.schedule.min_ratio)


@pytest.mark.parametrize(("mesh", "overrides"), [
    pytest.param((1, 1, 1), (), marks=pytest.mark.one_pass), pytest.param((1, 2, 1), (), marks=pytest.mark.one_pass),
    ((1, 2, 2), ("mesh.tensor=2",))])
def test_a_run_on_eight_devices_goes_on_with_one_two_or_four(runs: Runs, eight: Config, mesh: tuple[int, int, int],
                                                            overrides: tuple[str, ...]):
    laid_out, whole = restore(eight, 20, mesh).state, restore(eight, 20, (1, 8, 1)).state
    expected = integrity.named_leaves(abstract_state(eight, mesh_of(mesh)))
    for name, leaf in integrity.named_leaves(laid_out).items():
        saved = integrity.named_leaves(whole)[name]
        assert np.asarray(leaf).tobytes() == np.asarray(saved).tobytes(), name
        assert leaf.sharding == expected[name].sharding, name
        assert tuple(leaf.sharding.mesh.shape[axis] for axis in ("data", "fsdp", "tensor")) == mesh
    assert laid_out.params.embed.sharding.is_equivalent_to(sharding(mesh_of(mesh), "vocab", "embed"), 2)

    shutil.copytree(eight.run_dir, runs.directory())
    shutil.rmtree(runs.directory() / "checkpoints" / "step_00000024")
    cfg = runs.config("run", "train.steps=24", *overrides)
    assert loop.train(cfg, devices=some_devices(int(np.prod(mesh)))) == loop.Outcome(24)
    before, after = lines(eight), lines(cfg)
    assert reproducible(after[:21]) == reproducible(before[:21])
    for name, tolerance in (("train/CE loss", 1e-6), ("optim/total grad norm", 1e-4), ("data/fingerprint", 0)):
        np.testing.assert_allclose([line[name] for line in after[21:]], [line[name] for line in before[21:]],
                                   rtol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory, prepared_text: Path) -> Config:
    """24 updates on eight devices that share all weights."""
    runs = Runs(tmp_path_factory.mktemp("eight"), prepared_text)
    cfg = runs.config("eight", "mesh.fsdp=8", "train.steps=24", "eval.every=null")
    assert loop.train(cfg) == loop.Outcome(24)
    return cfg


@pytest.mark.slow  # three processes, of which the first compiles
def test_kill_9_and_two_resumes_in_new_processes(runs: Runs, straight: Config):
    """Killed at update 25, and again while update 30, which is saved, is evaluated: its line is made up for."""
    cfg, arguments = runs.config(), runs.arguments()
    killed = run_child("written", "25", *arguments, script=KILLED)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [line["step"] for line in lines(cfg)] == list(range(26))
    assert saved_steps(cfg) == [10, 20]

    killed = run_child("evaluation", "1", *arguments, script=KILLED)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "from update 20 of 40" in killed.stdout
    assert [line["step"] for line in lines(cfg)] == list(range(30))
    assert saved_steps(cfg) == [10, 20, 30]

    ended = run_child(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "from update 30 of 40" in ended.stdout
    check_same_run(cfg, straight)


@pytest.mark.one_pass  # other processes again, of which nothing depends on the version
def test_sigterm_and_sigint_from_outside_save_and_exit_0(runs: Runs):
    """`train.py` with nothing patched, stopped at whatever update it has reached."""
    arguments, done = runs.arguments("run", "train.steps=100000", "eval.every=null", "checkpoint.every=null"), 0
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(command(*arguments), env=environment(2), text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) as child:
            for line in child.stdout:
                if line.startswith(f"step {done + 5}/"):
                    break
            child.send_signal(number)
            out, err = child.communicate(timeout=120)
        assert (child.returncode, err) == (0, "")
        stopped = re.search(rf"^stopped by {number.name} after update (\d+) of 100000; all is saved, and the same "
                            r"command continues from there$", out, re.MULTILINE)
        assert stopped, out
        assert int(stopped[1]) > done
        done = int(stopped[1])
        cfg = runs.config()
        assert saved_steps(cfg)[-1] == done
        assert [record["step"] for record in lines(cfg)] == list(range(done + 1))


def test_a_signal_while_the_step_compiles(runs: Runs, straight: Config, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]):
    compile_train_step, cfg = loop.compile_train_step, runs.config()

    def compile_while_stopping(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return compile_train_step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "compile_train_step", compile_while_stopping)
        assert loop.train(cfg, devices=some_devices(2)) == loop.Outcome(0, "SIGTERM")
    assert "stopped by SIGTERM after update 0 of 40" in capsys.readouterr().out
    assert reproducible(lines(cfg)) == reproducible(lines(straight))[:1]
    with monkeypatch.context() as patch:
        when_written(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert loop.train(cfg, devices=some_devices(2)).step == 2
    assert reproducible(lines(cfg)) == reproducible(lines(straight))[:3]


def test_a_damaged_newest_checkpoint_costs_updates_but_changes_none(runs: Runs, straight: Config,
                                                                    caplog: pytest.LogCaptureFixture):
    cfg = runs.config()
    with_20 = runs.config("run", "train.steps=20")
    assert loop.train(with_20, devices=some_devices(2)) == loop.Outcome(20)
    newest = runs.directory() / "checkpoints" / "step_00000020"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert loop.train(cfg, devices=some_devices(2)) == loop.Outcome(40)
    assert str(newest) in caplog.text
    assert largest.name in caplog.text
    assert saved_steps(cfg) == [10, 20, 30, 40]
    check_same_run(cfg, straight)


def test_data_may_move_but_not_change(runs: Runs, straight: Config, tmp_path: Path):
    shutil.copytree(straight.run_dir, runs.directory())
    for step in (20, 30, 40):
        shutil.rmtree(runs.directory() / "checkpoints" / f"step_{step:08d}")
    moved = tmp_path / "moved"
    shutil.copytree(runs.prepared, moved)
    tokens = np.fromfile(moved / "train" / "prose-00000.npy", np.uint16)
    changed = tokens.copy()
    changed[7] = 5 if tokens[7] != 5 else 6
    changed.tofile(moved / "train" / "prose-00000.npy")
    with pytest.raises(DataError, match=r"cannot continue at step 10: the data \(fingerprint\) is \w+ but was \w+"):
        loop.train(runs.config("run", f"data.prepared={moved}"), devices=some_devices(2))
    tokens.tofile(moved / "train" / "prose-00000.npy")
    cfg = runs.config("run", f"data.prepared={moved}", "train.steps=20")
    assert loop.train(cfg, devices=some_devices(2)) == loop.Outcome(20)
    assert reproducible(lines(cfg)) == reproducible(lines(straight))[:21]
