"""A run over a reference's curve: which steps are compared, the verdict, and every form that a reference may have."""

import pytest

from maxtext import cli
from maxtext.report.overlay import compare, lines, read_reference
from maxtext.report.run_files import ReportError, read_run
from maxtext.report.write import run as report
from tests.report.test_report import Page, make_run, record

METRIC = "train/CE loss"


def loss(step):
    return record(step)[METRIC]


@pytest.fixture
def ours(tmp_path):
    """61 steps; the reference logs every tenth."""
    return make_run(tmp_path / "ours", [record(step) for step in range(61)])


def write_csv(path, rows, header=("step", METRIC)):
    path.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]) + "\n")
    return str(path)


@pytest.fixture
def every_tenth(tmp_path):
    """0.004 above us at every step but 40, where it is 0.02 below."""
    return write_csv(tmp_path / "curve.csv", [(s, loss(s) + (-0.02 if s == 40 else 0.004)) for s in range(0, 101, 10)])


def test_gaps_at_the_steps_that_both_logged(ours, every_tenth):
    overlay = compare(read_run(ours), every_tenth, METRIC, 0.01)
    assert overlay.steps == [0, 10, 20, 30, 40, 50, 60]
    assert overlay.gaps == pytest.approx([-0.004] * 4 + [0.02] + [-0.004] * 2)
    assert not overlay.passed
    assert overlay.steps[overlay.worst] == 40
    printed = lines(overlay)
    assert len(printed) == 8
    assert printed[4].split() == ["step", "40", "ours", f"{loss(40):.6f}", "reference", f"{loss(40) - 0.02:.6f}", "gap",
                                  "+0.020000", "mean", "gap", f"{overlay.smoothed[4]:+.6f}"]
    assert printed[-1] == ("FAIL: train/CE loss against curve.csv: largest gap +0.020000 at step 40, tolerance 0.01; "
                           "mean -0.000571 over 7 steps (0 to 60) of the reference's 11")


def test_the_tolerance_counts_in_both_directions_and_for_the_mean(ours, every_tenth):
    run = read_run(ours)
    assert compare(run, every_tenth, METRIC, 0.0200001).passed
    assert not compare(run, every_tenth, METRIC, 0.0199999).passed
    below = [r | {METRIC: r[METRIC] - 0.05} for r in run.records]
    assert not compare(type(run)("f", below, "", {}), every_tenth, METRIC, 0.04).passed
    by_mean = compare(run, every_tenth, METRIC, 0.0199999, by_mean=True)
    assert max(map(abs, by_mean.smoothed)) < 0.019
    assert by_mean.passed
    assert "largest mean gap" in lines(by_mean)[-1]
    assert not compare(run, every_tenth, METRIC, 0.001, by_mean=True).passed


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_a_value_of_ours_that_is_not_finite_fails(tmp_path, every_tenth, value):
    folder = make_run(tmp_path / "bad", [record(s) | ({METRIC: value} if s == 20 else {}) for s in range(61)])
    overlay = compare(read_run(folder), every_tenth, METRIC, 1e9)
    assert not overlay.passed
    assert overlay.steps[overlay.worst] == 20
    assert report([folder, "--reference", every_tenth, "--tolerance", "1e9"]) == 1


# Forms of a reference


def test_another_run_and_its_metrics_file(ours, tmp_path):
    theirs = make_run(tmp_path / "theirs", [record(s) | {METRIC: loss(s) + 0.001} for s in range(40)])
    for path in (theirs, f"{theirs}/metrics.jsonl"):
        overlay = compare(read_run(ours), path, METRIC, 0.01)
        assert overlay.steps == list(range(40))
        assert overlay.gaps == pytest.approx([-0.001] * 40)
    assert overlay.name == "metrics.jsonl"


def test_an_export_with_names_of_the_run_spread_columns_gaps_and_restarts(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text('\ufeff"Step","OLMo 3, 7B - train/CE loss","OLMo 3, 7B - train/CE loss__MIN",'
                    '"OLMo 3, 7B - train/CE loss__MAX","OLMo 3, 7B - train/PPL"\n'
                    '1,10.5,1,1,\n2,,,,7\n3.0,9.5,1,1,\n3,9.25,1,1,\n4,NaN,,,\n\n5,1e1,,,\n', encoding="utf-8")
    assert read_reference(str(path), METRIC) == {1: 10.5, 3: 9.25, 5: 10.0}
    assert read_reference(str(path), "train/PPL") == {2: 7.0}


def test_the_only_column_beside_the_step_may_have_any_name(tmp_path):
    assert read_reference(write_csv(tmp_path / "c.csv", [(1, 2.5)], ("_step", "loss")), METRIC) == {1: 2.5}
    spread = write_csv(tmp_path / "d.csv", [(1, 2.5, 2, 3)], ("Step", "loss", "loss__MIN", "loss__MAX"))
    assert read_reference(spread, METRIC) == {1: 2.5}


@pytest.mark.parametrize(("header", "rows", "message"), [
    (("time", METRIC), [(1, 2)], "none of its columns 'time', 'train/CE loss' is a step column"),
    (("step", "_step", METRIC), [(1, 2, 3)], "more than one of its columns"),
    (("step", "a - train/CE loss", "b - train/CE loss"), [(1, 2, 3)], "may all be 'train/CE loss'; leave one"),
    (("step", "a", "b"), [(1, 2, 3)], "may all be"),
    (("step",), [(1,)], "hold no values beside the step"),
    (("step", METRIC), [(1.5, 2)], r"c.csv:2: step '1.5' and value '2' are not a whole number"),
    (("step", METRIC), [(1, 2), (2, "x")], r"c.csv:3: step '2' and value 'x'"),
    (("step", METRIC), [(1, "")], "has no values in its column 'train/CE loss'"),
])
def test_a_table_that_cannot_be_read_says_why(tmp_path, header, rows, message):
    with pytest.raises(ReportError, match=message):
        read_reference(write_csv(tmp_path / "c.csv", rows, header), METRIC)


def test_other_faults(ours, tmp_path):
    run = read_run(ours)
    with pytest.raises(ReportError, match="cannot be read"):
        compare(run, str(tmp_path / "absent.csv"), METRIC, 1)
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match="is no text file"):
        compare(run, str(tmp_path / "b.csv"), METRIC, 1)
    with pytest.raises(ReportError, match=r"has no values of 'nope'; its metrics are 'train/CE loss'"):
        compare(run, write_csv(tmp_path / "c.csv", [(1, 2)], ("step", "nope")), "nope", 1)
    with pytest.raises(ReportError, match=r"no step is in both: .* 61 steps from 0 to 60, .* 1 steps from 99 to 99"):
        compare(run, write_csv(tmp_path / "c.csv", [(99, 2)]), METRIC, 1)
    with pytest.raises(ReportError, match="has no values of 'nope'"):
        compare(run, ours, "nope", 1)


# The verb and the page


def test_the_verb_passes_fails_and_draws(ours, every_tenth, capsys):
    assert cli.main(["report", ours, "--reference", every_tenth, "--tolerance", "0.03"]) == 0
    assert "\npass: train/CE loss against curve.csv" in capsys.readouterr().out
    assert cli.main(["report", ours, "--reference", every_tenth]) == 1
    page = Page(f"{ours}/report.html")
    assert "Against a reference" in page.words
    assert "FAIL: train/CE loss against curve.csv: largest gap +0.020000 at step 40" in page.words
    drawn = page.charts["train/CE loss over the reference"]["curves"]
    assert drawn[1]["name"] == "curve.csv"
    assert drawn[1]["x"] == list(range(0, 101, 10))
    assert len(drawn[0]["x"]) == 61
    gap = {curve["name"]: curve["y"] for curve in page.charts["Gap"]["curves"]}
    assert gap["ours - reference"][4] == pytest.approx(0.02)
    assert gap["-tolerance"] == [-0.01, -0.01]
    assert cli.main(["report", ours]) == 0
    assert "Against a reference" not in Page(f"{ours}/report.html").words
    assert cli.main(["report", ours, "--reference", "absent.csv"]) == 2


@pytest.mark.parametrize("words", [["--metric", "train/PPL"], ["--tolerance", "0"], ["--by-mean"]])
def test_what_only_a_reference_needs_is_refused_without_one(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as exit:
        cli.main(["report", str(tmp_path), *words])
    assert exit.value.code == 2
    assert f"error: {words[0]} only goes with --reference" in capsys.readouterr().err


# Downstream tasks on the page


def test_tasks_have_curves_of_their_mean_and_a_table(tmp_path):
    def scored(step):
        bits = {f"eval/downstream/{name} (BPB v2)": 3 - step / 30 + i for i, name in enumerate(("t_bpb", "u_rc"))}
        return {"step": step, **bits, "eval/downstream/t_bpb (BPB)": 99.0,
                "eval/downstream/u_rc (length-normalized accuracy v2)": step / 120,
                "eval/downstream/u_rc (length-normalized accuracy)": 0.7}

    page = Page(write_page(tmp_path, [scored(0), record(1), scored(30), scored(60)]))
    (bits,) = page.charts["Downstream bits per byte"]["curves"]
    assert (bits["name"], bits["x"], bits["y"]) == ("2 tasks", [0, 30, 60], [3.5, 2.5, 1.5])
    assert page.charts["Downstream accuracy"]["curves"][0]["y"] == [0, 0.25, 0.5]
    assert "t_bpb BPB 3.0000 1.0000 at 60 1.0000" in page.words
    assert "u_rc length-normalized accuracy 0.0000 0.5000 at 60 0.5000" in page.words
    assert "99" not in page.words


def test_a_run_without_tasks_shows_nothing_of_them(ours):
    assert report([ours]) == 0
    assert "Downstream" not in Page(f"{ours}/report.html").source


def write_page(tmp_path, records):
    folder = make_run(tmp_path / "run", records)
    assert report([folder]) == 0
    return f"{folder}/report.html"
