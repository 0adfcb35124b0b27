"""report.html and loss.png: whole, self-contained, and right for runs that were resumed, short, or never evaluated."""

import html.parser
import json
import math
import os
import re
import struct
from pathlib import Path

import pytest

from maxtext.config import schema
from maxtext.report import write
from maxtext.report.chart import Curve, chart
from maxtext.report.curves import linear_ticks, log_ticks, short, smooth, thin, tick_labels, value_range
from maxtext.report.run_files import ReportError, read_run
from maxtext.report.write import write_report
from maxtext.train.metrics import MetricsWriter

CONFIG = """run_name: "a <run> & more"                     # command line
description: Two domains, one model.            # configs/x.yml:3
train:
  steps: 60                                     # configs/x.yml:12
"""
VOID = {"meta", "path", "polyline", "br"}


def record(step, **more):
    values = {"train/CE loss": 7.5 * math.exp(-step / 30) + 2, "optim/total grad norm": 1.0 + step % 3,
              "optim/LR (group 0)": 1e-3 * step / 60, "optim/LR (group 1)": 1e-3 * step / 60,
              "optim/step skipped": int(step in (20, 41)), "throughput/total tokens": 2048 * step, "time/step (s)": 0.5,
              "throughput/device/data loading (%)": 0.3}
    if step % 20 == 0:
        for name, bits in (("code", 5.5 - step / 20), ("prose", 4.2 - step / 30), ("macro", 4.8)):
            values |= {f"eval/lm/{name}/BPB": bits, f"eval/lm/{name}/CE loss": bits / 2,
                       f"eval/lm/{name}/PPL": math.exp(bits / 2), f"eval/lm/{name}/tokens": 1000}
    return {"step": step} | values | more


def make_run(folder, records, config=CONFIG):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if config:
        (folder / "config.yml").write_text(config)
    return str(folder)


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order, and collects text and charts."""

    def __init__(self, path):
        super().__init__()
        self.open, self.text, self.source = [], [], Path(path).read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == [], f"not closed: {self.open}"
        self.words = " ".join(" ".join(self.text).split())
        titles = re.findall(r'aria-label="([^"]*)"', self.source)
        data = re.findall(r'<script type="application/json">(.*?)</script>', self.source)
        self.charts = dict(zip(titles, map(json.loads, data), strict=True))

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def curves(page, title):
    return {curve["name"]: dict(zip(curve["x"], curve["y"], strict=True)) for curve in page.charts[title]["curves"]}


def test_a_whole_run(tmp_path):
    folder = make_run(tmp_path / "run", [record(step, **{"time/unix (s)": 1.7e9 + step}) for step in range(61)])
    paths = write_report(folder)
    assert paths == (os.path.join(folder, "report.html"), os.path.join(folder, "loss.png"))
    page = Page(paths[0])
    assert list(page.charts) == ["Training loss", "Held-out bits per byte", "Held-out loss", "Learning rate",
                                 "Gradient norm", "Throughput", "Waiting for data"]
    for text in ("a <run> & more", "Two domains, one model.", "complete, 60 updates", "2023-11-14 22:13 UTC",
                 "training loss, last update 3.015", "bits per byte, code 2.500 -54.5% from 5.500", "122,880",
                 "tokens/s, median 4,096", "time at work 30 s", "updates skipped 2", "steps: 60", "# configs/x.yml:12"):
        assert text in page.words, text
    assert curves(page, "Held-out bits per byte") == {
        "code": {0: 5.5, 20: 4.5, 40: 3.5, 60: 2.5}, "prose": {0: 4.2, 20: 3.5333, 40: 2.8667, 60: 2.2}}
    assert curves(page, "Learning rate")["learning rate"][30] == pytest.approx(5e-4)
    assert page.source.count("v-45") == 2, "one red tick for each skipped update"
    assert "prefers-color-scheme: dark" in page.source
    assert sorted(os.listdir(folder)) == ["config.yml", "loss.png", "metrics.jsonl", "report.html"]


def test_samples_of_a_few_steps_stand_in_the_page(tmp_path):
    folder = make_run(tmp_path / "run", [record(step) for step in range(61)])
    assert "Samples" not in Page(write_report(folder)[0]).words
    lines = [{"step": step, "prompt": prompt, "text": f" <{step}{prompt}>\n"} for step in range(0, 61, 5)
             for prompt in ("a&", "b")]
    lines[-1]["text"] = "NaN"
    Path(folder, "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"step": 61, "prom')
    page = Page(write_report(folder)[0])
    shown = re.findall(r"<tr><td>([^<]*)</td><td><b>([^<]*)</b>([^<]*)</td></tr>", page.source)
    assert shown == [(str(step), prompt, f" &lt;{step}{prompt}&gt;\n" if (step, prompt) != (60, "b") else "NaN")
                     for prompt in ("a&amp;", "b") for step in (0, 15, 30, 45, 60)]


def test_sources_and_the_wait_for_data_stand_in_the_tiles(tmp_path):
    records = [record(step, **{"data/tokens/web": 1536 * step, "data/tokens/code": 512 * step,
                               "throughput/device/data loading (s)": 0.004}) for step in range(1, 61)]
    page = Page(write_report(make_run(tmp_path / "run", records))[0])
    assert "training tokens 123k web 75.0%, code 25.0%" in page.words
    assert "waited for data 0.80% of the time of updates" in page.words


def test_the_page_loads_nothing(tmp_path):
    page = Page(write_report(make_run(tmp_path / "run", [record(step) for step in range(61)]))[0])
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/)|\bfetch\(|import\(""", page.source)


def test_the_picture_is_a_png_with_both_halves(tmp_path):
    def size(records):
        data = Path(write_report(make_run(tmp_path / "run", records))[1]).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(data) > 10_000
        return struct.unpack(">II", data[16:24])

    assert size([record(step) for step in range(61)]) == (1650, 630)
    assert size([record(1)]) == (1125, 630)


def test_a_resumed_run_counts_each_step_once(tmp_path):
    folder = tmp_path / "run"
    cfg = schema.Config(
        model=schema.ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=1, d_ff=8),
        data=schema.DataConfig(sequence_length=8), optim=schema.OptimConfig(lr=1e-3),
        train=schema.TrainConfig(steps=60, global_batch=1), log=schema.LogConfig(tensorboard=False))
    for resume_step, until in ((0, 25), (20, 60)):
        writer = MetricsWriter(str(folder), cfg, resume_step=resume_step)
        for step in range(resume_step + 1, until + 1):
            writer.write(step, record(step))
        writer.close()
    page = Page(write_report(str(folder))[0])
    assert list(curves(page, "Learning rate")["learning rate"]) == list(range(1, 61))
    assert "training tokens 123k 122,880" in page.words
    assert "This run has no config.yml." in page.words


def test_one_update_without_evaluations(tmp_path):
    page = Page(write_report(make_run(tmp_path / "run", [record(1)]))[0])
    assert "Held-out loss" not in page.charts
    assert "Held-out evaluation" not in page.words
    assert "update 1 of 60" in page.words
    assert curves(page, "Training loss") == {"cross-entropy": {1: pytest.approx(record(1)["train/CE loss"], rel=1e-4)}}


def test_only_the_first_evaluation(tmp_path):
    first = {name: value for name, value in record(0).items() if name == "step" or name.startswith("eval/")}
    page = Page(write_report(make_run(tmp_path / "run", [first]))[0])
    assert list(page.charts) == ["Held-out bits per byte", "Held-out loss"]
    assert "bits per byte, code 5.500 one evaluation" in page.words


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    records = [record(step) for step in range(1, 31)]
    records[9] |= {"train/CE loss": "NaN", "optim/total grad norm": "Infinity"}
    page = Page(write_report(make_run(tmp_path / "run", records))[0])
    assert 10 not in curves(page, "Training loss")["cross-entropy"]
    assert "nan" not in page.source.lower()


@pytest.mark.parametrize(("content", "message"), [
    (None, "holds no file metrics.jsonl; give the folder of a run"),
    ("", "holds no step yet"), ('{"step": 1, "a', "holds no step yet"),
    ('{"step": 1}\nnonsense\n{"step": 2}\n', "metrics.jsonl:2"),
])
def test_runs_that_cannot_be_reported(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ReportError, match=message):
        write_report(str(tmp_path))
    assert write.run([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_metrics_that_are_a_folder_are_no_metrics(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    assert write.run([str(tmp_path)]) == 2
    assert f"{tmp_path} holds no file metrics.jsonl; give the folder of a run" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_says_where(tmp_path, capsys):
    folder = make_run(tmp_path / "run", [record(1)])
    (tmp_path / "run" / "report.html.tmp").mkdir()
    assert write.run([folder]) == 2
    assert capsys.readouterr().err == f"{folder}/report.html.tmp: Is a directory\n"


def test_the_verb_prints_what_it_wrote(tmp_path, capsys):
    folder = make_run(tmp_path / "run", [record(1)])
    assert write.run([folder]) == 0
    assert capsys.readouterr().out.split() == [f"{folder}/report.html", f"{folder}/loss.png"]


def test_a_config_that_is_not_yaml_is_shown_as_it_is(tmp_path):
    page = Page(write_report(make_run(tmp_path / "run", [record(1)], "a: [<b>\n"))[0])
    assert "a: [<b>" in page.words
    assert page.words.startswith("run run update 1"), "the folder gives the name"


def test_doubled_lines_are_merged(tmp_path):
    run = read_run(make_run(tmp_path / "run", [{"step": 2, "a": 1}, {"step": 1, "a": 5}, {"step": 2, "a": 3, "b": 4}]))
    assert run.records == [{"step": 1, "a": 5}, {"step": 2, "a": 3, "b": 4}]


def test_thinning_keeps_spikes_and_ends():
    ys = [1.0] * 50_000
    ys[31_415], ys[7] = 90.0, -3.0
    xs, kept = thin(range(50_000), ys)
    assert len(xs) <= 1202
    assert (max(kept), xs[kept.index(90.0)], xs[kept.index(-3.0)], xs[0], xs[-1]) == (90.0, 31_415, 7, 0, 49_999)


def test_smoothing_keeps_means_and_does_not_lag():
    assert smooth([3.0] * 500) == pytest.approx([3.0] * 500)
    ramp = [float(i) for i in range(1000)]
    assert smooth(ramp)[500] == pytest.approx(500, abs=1e-6)
    noisy = [i % 2 for i in range(1000)]
    assert all(abs(y - 0.5) < 0.06 for y in smooth(noisy)[20:-20])


def test_value_range_ignores_far_outliers_but_no_ordinary_value():
    values = [2 + 0.001 * i for i in range(1000)]
    assert value_range(values) == pytest.approx((1.95, 3.05), abs=0.01)
    assert value_range([*values, 1e6])[1] < 5
    assert value_range([1.0])[0] < 1.0 < value_range([1.0])[1]
    assert value_range([0.0]) == (-1.0, 1.0)
    assert value_range([0.1, 0.100005])[0] < 0.095, "a constant, but for rounding"
    assert value_range([0.1, 0.1001])[0] > 0.0999
    assert value_range([0.0], from_zero=True) == (0.0, 1.0)


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0, 600, [0, 100, 200, 300, 400, 500, 600]), (2.1, 7.6, [3, 4, 5, 6, 7]), (-0.1, 0.11, [-0.1, -0.05, 0, 0.05, 0.1]),
])
def test_ticks_are_round(low, high, expected):
    assert linear_ticks(low, high) == pytest.approx(expected)


def test_log_ticks():
    assert log_ticks(0.5, 40) == pytest.approx([1, 3, 10, 30])
    assert log_ticks(0.02, 5000) == pytest.approx([0.1, 1, 10, 100, 1000])
    assert log_ticks(1.4, 6) == pytest.approx([2, 5])


@pytest.mark.parametrize(("ticks", "texts"), [
    ([0, 0.5, 1], ["0", "0.5", "1"]), ([0.09999, 0.1, 0.10001], ["0.09999", "0.10000", "0.10001"]),
    ([12_340, 12_360, 12_380], ["12,340", "12,360", "12,380"]), ([5], ["5"]), ([], []),
])
def test_ticks_read_differently(ticks, texts):
    assert tick_labels(ticks) == texts


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (0.8123456, "0.8123"), (2.9e-5, "2.9e-5"), (3e-4, "0.0003"), (5120, "5,120"), (12_345, "12.3k"),
    (1_228_800, "1.23M"), (7_298_617_344, "7.3B"), (-2.5, "-2.5"), (5e12, "5T"), (1e-5, "1e-5"),
])
def test_short_numbers(value, text):
    assert short(value) == text


def test_a_chart_without_points_is_no_chart():
    assert chart("x", [Curve("a", [], [])]) == ""
    assert "</script><b>" not in chart("x", [Curve("</script><b>", [1, 2], [1.0, 2.0])])


def test_every_rule_of_the_style_sheet_stands_once():
    """A rule that a text replacement put in twice changes what it should not; rules for narrow screens come after."""
    sheet = (Path(write.__file__).parent / "page.css").read_text().split("@media (max-width")[0]
    selectors = [line.split(" {")[0] for line in sheet.splitlines() if " {" in line and not line.startswith((" ", "@"))]
    assert [name for name in set(selectors) if selectors.count(name) > 1] == []
