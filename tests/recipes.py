"""Runs the recipes of end_to_end/ by bash as they stand, on the committed text and in small numbers.

`MAXTEXT` is a program that hands its words to this process, which runs the verb: starting Python and JAX for each of
them would take most of the time. What starts processes of its own starts the real command.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext import cli
from maxtext.report.run_files import read_metrics
from maxtext.train import loop
from tests.runs import ROOT, some_devices

STEPS = 8
SMALLER = ("model.vocab_size=384 model.d_model=32 model.n_layers=2 model.layer_pattern=[window,full] model.window=8 "
           "data.sequence_length=32 log.tensorboard=false log.report=false schedule.warmup_steps=2 checkpoint.every=4")
DENSE = f"{SMALLER} model.d_ff=64 eval.every=4 eval.batch=32"
FORWARD = """\
#!{python} -S
import json, os, socket, sys
link, folder = socket.socket(socket.AF_UNIX), os.getcwd()
os.chdir({place!r})  # an address has no room for a long path
link.connect("link")
link.sendall(json.dumps([sys.argv[1:], folder, os.environ.get("XLA_FLAGS", "")]).encode() + b"\\n")
code, out, err = json.loads(link.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Recipes:
    """Runs recipes on runs below one folder; they may build on each other's."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.runs, self._data = folder / "runs", data
        self.program = folder / "maxtext"
        self.program.write_text(FORWARD.format(python=sys.executable, place=str(folder)))
        self.program.chmod(0o755)

    def __call__(self, recipe: str, smaller: str = DENSE, **variables: str) -> str:
        """Everything that the recipe and its verbs said; it must succeed."""
        environment = os.environ | {"MAXTEXT": str(self.program), "DATA": str(self._data), "RUNS": str(self.runs),
                                    "STEPS": str(STEPS), "SMALLER": smaller, "XLA_FLAGS": ""} | variables
        with socket.socket(socket.AF_UNIX) as link, contextlib.chdir(self.runs.parent), open("said", "w+") as said:
            link.bind("link")
            link.listen()
            link.settimeout(0.1)
            script = subprocess.Popen([str(ROOT / "end_to_end" / recipe)], env=environment, text=True,
                                      stdout=said, stderr=subprocess.STDOUT)
            try:
                while script.poll() is None:
                    with contextlib.suppress(TimeoutError):
                        _serve(link.accept()[0])
            finally:
                script.kill()
                os.unlink("link")
            script.wait()
            said.seek(0)
            text = said.read()
        assert script.returncode == 0, text
        return text

    def steps(self, name: str) -> list[int]:
        return [line["step"] for line in read_metrics(str(self.runs / name / "metrics.jsonl"))]


def _serve(link: socket.socket) -> None:
    link.settimeout(None)
    with link, link.makefile() as file:
        words, folder, flags = json.loads(file.readline())
        found = re.search(r"device_count=(\d+)", flags)
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder), contextlib.redirect_stdout(out), \
                contextlib.redirect_stderr(err):
            devices = some_devices(int(found[1]) if found else 1)
            patch.setattr(loop, "train", functools.partial(loop.train, devices=devices))
            try:
                code = cli.main(words)
            except SystemExit as ended:  # of argparse
                code = ended.code
        link.sendall(json.dumps([code, out.getvalue(), err.getvalue()]).encode())
