"""The Dockerfile: no fault that its linter finds, what each build adds, and that what it copies is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.materials import program
from tests.runs import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def test_the_linter_finds_no_fault():
    found = subprocess.run([program("hadolint"), "--no-color", ROOT / "Dockerfile"], text=True, capture_output=True,
                           check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(("extra", "installed"), [
    ("", []), ("cuda", [f"jax[cuda13]=={version('jax')}"]), ("tpu", [f"jax[tpu]=={version('jax')}"]),
    ("pathways", [f"jax=={version('jax')}", "pathwaysutils==0.1.13"])])
def test_a_build_adds_the_plugin_of_the_pinned_jax(extra: str, installed: list[str], tmp_path: Path):
    done, words = run_extra(extra, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert words == ([] if not installed else ["install", "--no-cache-dir", *installed])


def test_a_build_for_something_else_is_refused(tmp_path: Path):
    done, words = run_extra("rocm", tmp_path)
    assert (done.returncode, words) == (1, [])
    assert done.stderr == "EXTRA must be empty, cuda, tpu or pathways, not 'rocm'\n"


def run_extra(extra: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the instruction that installs the extra, in sh, with a pip that writes down its words."""
    (step,) = re.findall(r'^RUN (version="(?:.*\\\n)*.*)\n', TEXT, re.M)
    (folder / "pip").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/words\n')
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("pip", "python"):
        (folder / name).chmod(0o755)
    done = subprocess.run(["sh", "-c", step], env=os.environ | {"EXTRA": extra, "PATH": f"{folder}:{os.defpath}"},
                          text=True, capture_output=True, check=False)
    return done, (folder / "words").read_text().splitlines() if (folder / "words").exists() else []


def test_what_it_copies_is_there():
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.M) for word in line.split()]
    assert {"requirements.lock", "maxtext", "configs"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
