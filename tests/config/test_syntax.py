"""What YAML a config may be, and what is no fault in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from maxtext.config.load import load, load_with_origins
from maxtext.config.schema import SourceConfig
from tests.config.files import GOOD, faults, write


@pytest.mark.parametrize(("text", "expected"), [
    (b"", "run.yml: the file is empty; a config is a mapping of sections such as `model:`"),
    (b"# only a comment\n", "run.yml: the file is empty"),
    (b"- 1\n- 2\n", "run.yml:1: a list of 2; a config is a mapping of sections such as `model:`"),
    (b"\n\njust text\n", "run.yml:3: just text; a config is a mapping"),
    (b"model:\n\td_model: 4\n", "run.yml:2: not valid YAML: found character that cannot start any token; this line is "
                                "indented with a tab: use spaces"),
    (b"model: {d_model: 4\ntrain: 5\n", "run.yml:2: not valid YAML"),
    (b"model: [1,\n", "run.yml:2: not valid YAML"),
    (b"model: a: b\n", "run.yml:1: not valid YAML: mapping values are not allowed in this context"),
    (b"a: 1\n---\nb: 2\n", "run.yml:2: not valid YAML: but found another document"),
    (b"ok: 1\nx: \xff\n", "run.yml:2: byte 0xff at offset 9 is not UTF-8; save the file as UTF-8"),
    (b"ok: 1\nx: a\x01b\n", "run.yml:2: not valid YAML: control characters are not allowed"),
    (b"x: *nothing\n", "run.yml:1: not valid YAML: found undefined alias; quote a text that starts with *"),
    (b"x: " + b"[" * 20000, "run.yml:"),
])
def test_a_file_that_is_no_mapping_is_one_clear_line(folder, text, expected):
    Path("run.yml").write_bytes(text)
    [problem] = faults("run.yml")
    assert problem.startswith(expected)


def test_a_byte_order_mark_is_no_fault(folder):
    Path("run.yml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load("run.yml").model.d_model == 16


def test_windows_line_ends_are_no_fault(folder):
    Path("run.yml").write_bytes(GOOD.replace("\n", "\r\n").encode())
    assert load("run.yml") == dataclasses.replace(load("good.yml"), run_name="run")


@pytest.mark.parametrize(("text", "expected"), [
    ("base: good\nrun_name: a\nrun_name: b\n", "run.yml:3: run_name: given twice; first at run.yml:2"),
    ("base: good\noptim: {lr: 1}\noptim: {eps: 1}\n", "run.yml:3: optim: given twice; first at run.yml:2"),
    ("base: good\noptim:\n  skip:\n    sigma: 3\n    window: 8\n    sigma: 3\n",
     "run.yml:6: optim.skip.sigma: given twice; first at run.yml:4"),
    ("base: good\ndata:\n  sources:\n    a: {}\n    b: {}\n    a: {}\n",
     "run.yml:6: data.sources.a: given twice; first at run.yml:4"),
    ("base: good\nbase: good\n", "run.yml:2: base: given twice; first at run.yml:1"),
])
def test_a_doubled_key_is_refused_at_any_level_with_both_lines(folder, text, expected):
    write("run.yml", text)
    assert faults("run.yml") == (expected,)


def test_a_doubled_key_on_the_command_line_is_refused_inside_one_argument(folder):
    [problem] = faults("good.yml", "optim={eps: 1, eps: 2}")
    assert problem == "command line: optim={eps: 1, eps: 2}: eps: given twice; first at command line"


@pytest.mark.parametrize("text", ["? [a]\n: 1\n", "{[a]: 1}\n", "? {a: 1}\n: 2\n"])
def test_a_key_that_is_no_name_is_refused(folder, text):
    write("run.yml", text)
    assert faults("run.yml") == ("run.yml:1: the file: a key must be a name, not a list or a mapping",)


def test_anchors_work_with_the_line_of_the_key_that_uses_them(folder):
    write("run.yml", "base: good\nmodel: {d_ff: &width 48}\ndata:\n  sources:\n    a: &one {repeat: 2}\n    b: *one\n"
                     "train:\n  loss_chunk_tokens: *width\n")
    cfg, origins = load_with_origins("run.yml")
    assert cfg.train.loss_chunk_tokens == 48
    assert cfg.data.sources == {"a": SourceConfig(repeat=2.0), "b": SourceConfig(repeat=2.0)}
    assert origins["train.loss_chunk_tokens"] == "run.yml:8"


@pytest.mark.parametrize(("text", "expected"), [
    ("base: good\noptim: &a {lr: *a}\n", "run.yml:2: optim.lr: an alias that contains itself"),
    ("base: good\noptim:\n  betas: &a [*a]\n", "run.yml:3: optim.betas[0]: an alias that contains itself"),
    ("base: good\nx: &a {lr: 1}\noptim:\n  <<: *a\n", "run.yml:4: optim.<<: merge keys are not read; share settings "
                                                      "with `base:`"),
    ("base: good\nrun_name: !!python/name:os.system x\n",
     "run.yml:2: run_name: tag !!python/name:os.system is not read; write the plain value"),
    ("base: good\nrun_name: !env HOME\n", "run.yml:2: run_name: tag !env is not read; write the plain value"),
])
def test_yaml_features_that_are_not_read_are_refused(folder, text, expected):
    write("run.yml", text)
    assert faults("run.yml")[0] == expected


def test_a_fault_inside_an_anchor_is_reported_once_however_often_it_is_used(folder):
    write("run.yml", "base: good\ndata:\n  sources:\n    a: &a {root: r, root: s}\n    b: *a\n    c: *a\n")
    assert faults("run.yml") == ("run.yml:4: data.sources.a.root: given twice; first at run.yml:4",)


def test_names_that_yaml_guesses_about_stay_text(folder):
    write("run.yml", "base: good\ndata: {sources: {on: {}, 12: {}, null: {}}}\n")
    assert list(load("run.yml").data.sources) == ["on", "12", "null"]
