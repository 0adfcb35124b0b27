"""A value is read by the declared type of its field, the same in a file and on the command line, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from maxtext.config.load import ConfigError, load

BASE = """\
model: {vocab_size: 64, d_model: 16, n_layers: 2, n_heads: 2, d_ff: 32}
data: {sequence_length: 8, prepared: somewhere}
optim: {lr: 0.1}
train: {steps: 10, global_batch: 4}
"""


def read(tmp_path: Path, way: str, key: str, text: str) -> Any:
    """Sets `key` to `text` in a file or on the command line and returns the resulting value."""
    base = tmp_path / "base.yml"
    base.write_text(BASE)
    if way == "command line":
        cfg = load(base, [f"{key}={text}"])
    else:
        *sections, leaf = key.split(".")
        lines = [f"{'  ' * i}{name}:" for i, name in enumerate(sections)] + [f"{'  ' * len(sections)}{leaf}: {text}"]
        (tmp_path / "run.yml").write_text("base: base\n" + "\n".join(lines) + "\n")
        cfg = load(tmp_path / "run.yml")
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


WAYS = pytest.mark.parametrize("way", ["file", "command line"])


@WAYS
@pytest.mark.parametrize(("key", "text", "expected"), [
    ("optim.lr", "1e-5", 1e-5), ("optim.lr", "1.e-5", 1e-5), ("optim.lr", '"1e-5"', 1e-5), ("optim.lr", "'1e-5'", 1e-5),
    ("optim.lr", "1E-5", 1e-5), ("optim.lr", "3e-4", 3e-4), ("optim.lr", "5", 5.0), ("optim.lr", "+.5", 0.5),
    ("optim.lr", "1_0.2_5", 10.25), ("optim.lr", "0", 0.0), ("optim.lr", "5.", 5.0),
    ("train.steps", "1e3", 1000), ("train.steps", "1_000", 1000), ("train.steps", "1000.0", 1000),
    ("train.steps", "1.5e3", 1500), ("train.steps", "2500e-2", 25), ("train.steps", '"7"', 7), ("train.steps", "+7", 7),
    ("data.seed", "0", 0), ("data.seed", "0e-9", 0), ("data.seed", "1e18", 10**18),
    ("data.seed", "9007199254740993", 9007199254740993), ("data.seed", "9.007199254740993e15", 9007199254740993),
    ("mesh.fsdp", "-1", -1),
    ("log.report", "true", True), ("log.report", "True", True), ("log.report", "false", False),
    ("log.report", '"false"', False), ("log.report", "FALSE", False), ("log.report", '"true"', True),
    ("train.compute_dtype", "float32", "float32"), ("train.compute_dtype", '"float32"', "float32"),
    ("run_name", "a-1", "a-1"), ("run_name", "123", "123"), ("run_name", "1e-5", "1e-5"), ("run_name", "true", "true"),
    ("run_name", '"null"', "null"), ("run_name", "010", "010"), ("run_name", "2020-01-01", "2020-01-01"),
    ("description", '""', ""), ("description", '"a: b # c"', "a: b # c"), ("description", "naïve 模型", "naïve 模型"),
    ("optim.betas", "[0.5, 9e-1]", (0.5, 0.9)), ("optim.no_decay", "[]", ()),
    ("optim.no_decay", '["*norm*", x]', ("*norm*", "x")),
    ("checkpoint.keep_last", "null", None), ("checkpoint.keep_last", "~", None), ("checkpoint.keep_last", "5", 5),
    ("train.max_seconds", "null", None), ("train.max_seconds", "1e1", 10.0),
])
def test_a_value_that_fits_is_read_with_its_declared_type(tmp_path, way, key, text, expected):
    value = read(tmp_path, way, key, text)
    assert value == expected
    assert type(value) is type(expected)


@WAYS
@pytest.mark.parametrize(("key", "text", "message"), [
    ("train.steps", "1e-1", "train.steps: 1e-1 is not a whole number; write an integer"),
    ("train.steps", "1.5", "train.steps: 1.5 is not a whole number"),
    ("train.steps", "1e-400", "train.steps: 1e-400 is not a whole number"),
    ("train.steps", "1e999999", "train.steps: 1e999999 is too large"),
    ("train.steps", "9223372036854775808", "is too large; at most 9223372036854775807"),
    ("train.steps", "9" * 5000, "is not an integer"),
    ("train.steps", "0x10", "train.steps: 0x10 is not an integer; write one such as 1000, 1_000 or 1e3"),
    ("train.steps", "010", "train.steps: 010 has a leading zero"),
    ("train.steps", "1:30", "train.steps: 1:30 is not an integer"),
    ("train.steps", "1__0", "train.steps: 1__0 is not an integer"),
    ("train.steps", "1_", "train.steps: 1_ is not an integer"),
    ("train.steps", "true", "train.steps: true is not an integer"),
    ("train.steps", "many", "train.steps: many is not an integer"),
    ("train.steps", "٣", "is not an integer"),
    ("train.steps", "null", "train.steps: null is not allowed; write an integer"),
    ("train.steps", "~", "train.steps: null is not allowed; write an integer"),
    ("train.steps", '""', 'train.steps: "" is not an integer'),
    ("train.steps", "[1]", "train.steps: a list of 1 where an integer is expected"),
    ("train.steps", "{a: 1}", "train.steps: a mapping where an integer is expected"),
    ("train.steps", "0", "train.steps: 0 is out of range; it must be at least 1"),
    ("train.steps", "-3", "train.steps: -3 is out of range; it must be at least 1"),
    ("optim.lr", "high", "optim.lr: high is not a number; write one such as 0.1 or 1e-5"),
    ("optim.lr", "nan", "optim.lr: nan is not allowed; write a finite number"),
    ("optim.lr", ".nan", "optim.lr: .nan is not allowed; write a finite number"),
    ("optim.lr", "inf", "optim.lr: inf is not allowed; write a finite number"),
    ("optim.lr", "-.inf", "optim.lr: -.inf is not allowed; write a finite number"),
    ("optim.lr", "1e999", "optim.lr: 1e999 is out of the range of a float64"),
    ("optim.lr", "1e-999", "optim.lr: 1e-999 is out of the range of a float64"),
    ("optim.lr", "-1e-5", "optim.lr: -1e-5 is out of range; it must be at least 0"),
    ("optim.lr", "true", "optim.lr: true is not a number"),
    ("optim.lr", "1 2", "optim.lr: 1 2 is not a number"),
    ("optim.eps", "0", "optim.eps: 0 is out of range; it must be above 0"),
    ("schedule.min_ratio", "1.5", "schedule.min_ratio: 1.5 is out of range; it must be at most 1"),
    ("log.report", "yes", "log.report: yes is neither true nor false; write true"),
    ("log.report", "1", "log.report: 1 is neither true nor false; write true"),
    ("log.report", "on", "log.report: on is neither true nor false; write true"),
    ("log.report", "off", "log.report: off is neither true nor false; write false"),
    ("log.report", "0", "log.report: 0 is neither true nor false; write false"),
    ("log.report", "No", "log.report: No is neither true nor false; write false"),
    ("log.report", "2", "log.report: 2 is neither true nor false; write true or false"),
    ("log.report", "null", "log.report: null is not allowed; write true or false"),
    ("train.compute_dtype", "bfloat61", "bfloat61 is not one of float32, bfloat16; did you mean bfloat16?"),
    ("train.compute_dtype", "bf16", "bf16 is not one of float32, bfloat16; did you mean bfloat16?"),
    ("train.compute_dtype", "zzz", "train.compute_dtype: zzz is not one of float32, bfloat16"),
    ("train.compute_dtype", "null", "null is not allowed; write one of float32, bfloat16"),
    ("run_name", "null", 'run_name: null is not allowed; write a text (an empty text is "")'),
    ("run_name", "[a]", "run_name: a list of 1 where a text is expected"),
    ("optim.betas", "0.9", "optim.betas: 0.9 where a list is expected; write [...]"),
    ("optim.no_decay", "embed", "optim.no_decay: embed where a list is expected; write [embed]"),
    ("optim.betas", "[0.9]", "optim.betas: a list of 1 where 2 values are expected"),
    ("optim.betas", "[0.9, x]", "optim.betas[1]: x is not a number"),
    ("optim.betas", "[0.9, 1.1]", "optim.betas[1]: 1.1 is out of range; it must be at most 1"),
    ("optim.betas", "[0.9, null]", "optim.betas[1]: null is not allowed"),
    ("model.layer_pattern", "[window, ful]",
     "model.layer_pattern[1]: ful is not one of window, full; did you mean full?"),
    ("optim.no_decay", "[[a]]", "optim.no_decay[0]: a list of 1 where a text is expected"),
    ("checkpoint.keep_last", "0", "checkpoint.keep_last: 0 is out of range; it must be at least 1"),
    ("checkpoint.keep_last", '"null"', 'checkpoint.keep_last: "null" is not an integer'),
    ("checkpoint.keep_last", "none", "checkpoint.keep_last: none is not an integer"),
    ("optim", "5", "optim: 5 where a section is expected; give a mapping of lr, kind"),
    ("optim", "[1]", "optim: a list of 1 where a section is expected"),
    ("optim", "null", "optim: null where a section is expected"),
    ("data.sources", "5", "data.sources: 5 where a section is expected"),
    ("data.sources.code", "5", "data.sources.code: 5 where a section is expected; give a mapping of paths"),
    ("data.sources", '{"a b": {}}', "data.sources.a b: a name is one word without `.` and `=`"),
    ("data.sources", "{a.b: {}}", "data.sources.a.b: a name is one word without `.` and `=`"),
])
def test_a_value_that_does_not_fit_is_refused_with_its_key_and_what_to_write(tmp_path, way, key, text, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, way, key, text)
    [problem] = caught.value.problems
    assert message in problem
    place = "command line: " if way == "command line" else f"run.yml:{2 + key.count('.')}: "
    assert place in problem
    assert "\n" not in problem


@WAYS
def test_a_section_given_as_a_flow_mapping_merges_with_what_is_there(tmp_path, way):
    assert read(tmp_path, way, "optim", "{eps: 1e-6}").eps == 1e-6
    assert read(tmp_path, way, "optim", "{eps: 1e-6}").lr == 0.1


def test_every_item_of_a_bad_list_is_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "file", "optim.betas", "[x, 2]")
    keys = [problem.partition("optim.")[2].partition(":")[0] for problem in caught.value.problems]
    assert keys == ["betas[0]", "betas[1]"]


def test_a_long_or_odd_value_is_shown_on_one_short_line(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "file", "optim.lr", '"' + "x" * 500 + '\\n\\e"')
    assert len(caught.value.problems[0]) < 300
    with pytest.raises(ConfigError, match=r'optim\.lr: "a\\nb" is not a number'):
        read(tmp_path, "file", "optim.lr", '"a\\nb"')


def test_floats_equal_pythons_own_reading(tmp_path):
    assert read(tmp_path, "file", "optim.lr", "2.0712352850360292e-4") == 2.0712352850360292e-4
    assert math.copysign(1, read(tmp_path, "file", "optim.lr", "0.0")) == 1
