"""The parity report: its numbers, its limits, and that it names the layer of a mapping that no shape gives away."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from maxtext.convert import ConvertError, parity, trace
from maxtext.convert.commands import run
from maxtext.convert.parity import LIMITS, Trace, compare
from maxtext.convert.saved import open_saved
from tests.convert.folders import HF, edited, golden


def verify(tmp_path, source, name, *options):
    """(exit code, report) of an import of `source`, compared with what transformers computed for `name`."""
    assert run(["import", str(source), str(tmp_path / "out")]) == 0
    code = run(["verify", str(tmp_path / "out"), str(source), "--golden", str(golden(name)), *options])
    return code, json.loads((tmp_path / "out" / "parity.json").read_text())


def turned(tensor):
    return lambda t: t.update({tensor: np.ascontiguousarray(t[tensor].T)})


def swapped(first, second):
    return lambda t: t.update({first: t[second], second: t[first]})


LAYER = "model.layers.{}."


@pytest.mark.parametrize(("change", "first"), [
    (turned("model.layers.2.self_attn.o_proj.weight"), "layer 2"),
    (turned("model.layers.0.self_attn.q_proj.weight"), "layer 0"),
    (swapped("model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_proj.weight"), "layer 3"),
    (swapped("model.layers.1.post_attention_layernorm.weight", "model.layers.1.post_feedforward_layernorm.weight"),
     "layer 1"),
    (swapped("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"), "layer 1"),
    (swapped("model.layers.4.self_attn.q_norm.weight", "model.layers.4.self_attn.k_norm.weight"),
     "layer 4 and final norm"),
    (lambda t: t.update({"model.norm.weight": t["model.norm.weight"] * np.float32(1.001)}), "layer 4 and final norm"),
    (lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][::-1]}), "embedding"),
])
def test_the_first_wrong_layer_is_named(tmp_path, capsys, change, first):
    code, report = verify(tmp_path, edited("olmo3", tmp_path / "source", change), "olmo3")
    assert (code, report["first_diverging_layer"]) == (1, first)
    assert f"First layer that diverges: {first}\n" in (tmp_path / "out" / "parity.md").read_text()
    assert "# Parity report: FAILED" in capsys.readouterr().out


def test_only_the_head_is_wrong(tmp_path):
    """Hidden states agree, logits do not."""
    change = lambda t: t.update({"lm_head.weight": t["lm_head.weight"][::-1]})  # noqa: E731
    code, report = verify(tmp_path, edited("olmo3", tmp_path / "source", change), "olmo3")
    assert (code, report["first_diverging_layer"]) == (1, None)
    assert len(report["failures"]) == 1
    assert report["max_logit_difference"] > 0.1
    assert abs(report["nll_ours"] - report["nll_reference"]) > 0.01


@pytest.mark.parametrize(("name", "keys", "first"), [
    ("olmo2", {"rope_parameters": {"rope_type": "default", "rope_theta": 400000.0}}, "layer 0"),
    ("olmo2", {"rms_norm_eps": 1e-5}, "layer 0"),
    ("olmo3", {"sliding_window": 9}, "layer 0"),
    ("olmo3", {"layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]},
     "layer 4 and final norm"),
    ("olmo3_yarn", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "layer 3"),
])
def test_a_wrong_setting_is_found_in_its_layer(tmp_path, name, keys, first):
    code, report = verify(tmp_path, edited(name, tmp_path / "source", **keys), name)
    assert (code, report["first_diverging_layer"]) == (1, first)


def test_tensors_that_differ_are_named_with_their_cause(tmp_path, capsys):
    assert run(["import", str(HF / "olmo3"), str(tmp_path / "out")]) == 0
    other = edited("olmo3", tmp_path / "other", turned("model.layers.2.self_attn.o_proj.weight"))
    assert run(["verify", str(tmp_path / "out"), str(other), "--golden", str(golden("olmo3"))]) == 1
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert [(w["name"], w["note"]) for w in report["different_weights"]] == [
        ("model.layers.2.self_attn.o_proj.weight", "transposed")]
    assert report["first_diverging_layer"] is None
    assert "model.layers.2.self_attn.o_proj.weight (transposed)" in capsys.readouterr().out


def test_bfloat16_has_its_own_limits(tmp_path):
    """KL is far below the published one. Logits of random weights nearly tie, so top-1 is not: real weights show it.

    (transformers' own bfloat16 run agrees with its float32 run no better.)
    """
    code, report = verify(tmp_path, HF / "olmo3_gqa", "olmo3_gqa", "--dtype", "bfloat16")
    assert code == 1
    assert [failure.split(" ")[0] for failure in report["failures"]] == ["top-1"]
    assert 1e-7 < report["mean_kl"] < 1.5e-4
    assert report["top1_agreement"] > 0.9
    assert report["max_logit_difference"] > 1e-3  # it really was computed in bfloat16
    logits = parity.ours(open_saved(str(tmp_path / "out")), trace.load(str(golden("olmo3_gqa"))).tokens_BT,
                         "bfloat16").logits_BTV
    assert (logits != logits.astype(ml_dtypes.bfloat16)).mean() > 0.9  # but for the logits, which are not rounded


# ---- the numbers themselves


def traces(length=8, vocabulary=7, layers=2):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (3, length)).astype(np.int32)
    logits = rng.standard_normal((3, length, vocabulary)).astype(np.float32)
    hidden = [rng.standard_normal((3, length, 4)).astype(np.float32) for _ in range(layers + 1)]
    near = logits + 0.1 * rng.standard_normal(logits.shape).astype(np.float32)
    return Trace(tokens, near, [h.copy() for h in hidden]), Trace(tokens, logits, hidden)


def test_numbers_equal_their_definitions():
    ours, theirs = traces()
    report = compare(ours, theirs, LIMITS["float32"])
    p, q = (np.exp(t.logits_BTV.astype(float)) / np.exp(t.logits_BTV.astype(float)).sum(-1, keepdims=True)
            for t in (theirs, ours))
    kl = (p * np.log(p / q)).sum(-1)
    nll = [-np.mean([np.log(x[b, t, theirs.tokens_BT[b, t + 1]]) for b in range(3) for t in range(7)]) for x in (q, p)]
    gap = np.abs(ours.logits_BTV.astype(float) - theirs.logits_BTV)
    same = (p.argmax(-1) == q.argmax(-1)).mean()
    expected = {"max_logit_difference": gap.max(), "mean_logit_difference": gap.mean(), "mean_kl": kl.mean(),
                "max_kl": kl.max(), "top1_agreement": same, "nll_ours": nll[0], "nll_reference": nll[1],
                "largest_logit": np.abs(theirs.logits_BTV).max()}
    assert {name: report[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_logits_that_bfloat16_cannot_tell_apart_are_no_disagreement():
    """20.02 and 20.05 are 20 there, 20.1 is 20.125. Only the reference is rounded: ours must not tie by rounding."""
    tokens = np.zeros((1, 3), np.int32)
    theirs = Trace(tokens, np.array([[[1, 20.02, 20.05], [1, 20.02, 20.1], [1, 20.02, 20.1]]], np.float32), None)
    ours = Trace(tokens, np.array([[[1, 20.05, 20.02], [1, 20.05, 20.02], [1, 20.02, 20.05]]], np.float32), None)
    report = compare(ours, theirs, LIMITS["bfloat16"])
    assert (report["top1_agreement"], report["top1_agreement_as_bfloat16"]) == (1 / 3, 2 / 3)
    assert [failure.split(" ")[0] for failure in report["failures"]] == ["top-1"]


def test_the_limit_grows_with_logits_beyond_ten():
    tokens, logits = np.zeros((1, 2), np.int32), np.zeros((1, 2, 3), np.float32)
    for largest, gap, fails in ((5, 0.9e-4, False), (5, 1.1e-4, True), (30, 2.5e-4, False), (30, 3.5e-4, True)):
        theirs = logits.copy()
        theirs[0, 0, 1] = largest
        report = compare(Trace(tokens, theirs + np.float32([0, 0, gap]), None), Trace(tokens, theirs, None),
                         LIMITS["float32"])
        assert bool(report["failures"]) is fails


def test_long_rows_are_cut_without_loss(monkeypatch):
    ours, theirs = traces(length=9)
    whole = compare(ours, theirs, LIMITS["float32"])
    monkeypatch.setattr(parity, "_TOKENS_AT_ONCE", 2)
    cut = compare(ours, theirs, LIMITS["float32"])
    assert cut.pop("layers") == whole.pop("layers")
    assert cut.pop("failures") == whole.pop("failures")
    assert cut == pytest.approx(whole)


def test_a_nan_is_never_equal():
    ours, theirs = traces()
    for side in ("logits", "hidden"):
        hidden = [layer.copy() for layer in theirs.hidden]
        broken = dataclasses.replace(ours, logits_BTV=theirs.logits_BTV.copy(), hidden=hidden)
        assert compare(broken, theirs, LIMITS["float32"])["failures"] == []
        (broken.logits_BTV if side == "logits" else broken.hidden[1])[1, 2, 3] = np.nan
        for dtype in LIMITS:
            assert compare(broken, theirs, LIMITS[dtype])["failures"] != []


def test_limits_of_bfloat16_are_the_published_ones():
    assert (LIMITS["bfloat16"].mean_kl, LIMITS["bfloat16"].top1) == (1.5e-3, 0.9875)
    assert LIMITS["float32"].max_logit == 1e-4
    ours, theirs = traces()
    assert any("mean KL" in failure for failure in compare(ours, theirs, LIMITS["bfloat16"])["failures"])


def test_padded_rows_of_our_vocabulary_are_left_out():
    ours, theirs = traces(vocabulary=7)
    padded = dataclasses.replace(ours, logits_BTV=np.concatenate([ours.logits_BTV, 99 + ours.logits_BTV], -1))
    assert compare(padded, theirs, LIMITS["float32"]) == compare(ours, theirs, LIMITS["float32"])
    with pytest.raises(ConvertError, match="the reference has 14 logits, our model 7"):
        compare(theirs, padded, LIMITS["float32"])


# ---- goldens


def test_a_golden_without_hidden_states_compares_logits_alone(tmp_path):
    with np.load(golden("olmo2")) as file:
        np.savez(tmp_path / "golden.npz", input_ids=file["input_ids"].astype(np.int64), logits=file["logits"])
    assert run(["import", str(HF / "olmo2"), str(tmp_path / "out")]) == 0
    arguments = ["verify", str(tmp_path / "out"), str(HF / "olmo2"), "--golden", str(tmp_path / "golden.npz")]
    assert run([*arguments, "--save-golden", str(tmp_path / "kept.npz"), "--report", str(tmp_path / "report")]) == 0
    report = json.loads((tmp_path / "report" / "parity.json").read_text())
    assert (report["layers"], report["rows"], report["length"]) == ([], 2, 40)
    assert "Weights that differ: 0" in (tmp_path / "report" / "parity.md").read_text()
    np.testing.assert_array_equal(trace.load(str(tmp_path / "kept.npz")).logits_BTV,
                                  trace.load(str(golden("olmo2"))).logits_BTV)


@pytest.mark.parametrize(("arrays", "message"), [
    ({"input_ids": np.zeros((1, 3), np.int32)}, "has no logits; it has input_ids"),
    ({"input_ids": np.zeros(3, np.int32), "logits": np.zeros((1, 3, 4))}, r"must be \(B, T\) and \(B, T, V\)"),
    ({"input_ids": np.array([object()]), "logits": np.zeros(1)}, "cannot be read as .npz"),
])
def test_goldens_that_are_none(tmp_path, arrays, message):
    np.savez(tmp_path / "golden.npz", **arrays)
    with pytest.raises(ConvertError, match=message):
        trace.load(str(tmp_path / "golden.npz"))


@pytest.mark.parametrize("damage", [
    lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"text",
    lambda data: data.replace(b"\x01\x02\x03\x04", b"\x01\x02\x03\x05"), lambda data: data[:-30] + bytes(30)])
def test_damaged_goldens_are_named(tmp_path, damage):
    path = tmp_path / "golden.npz"
    np.savez(path, input_ids=np.full((1, 9), 0x04030201), logits=np.zeros((1, 9, 4)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConvertError, match=r"golden.npz: cannot be read as .npz: ."):
        trace.load(str(path))


@pytest.mark.parametrize(("words", "message"), [
    (["--rows", "0"], "--rows 0 leaves nothing to compare"), (["--length", "-1"], "--length -1 leaves nothing")])
def test_no_tokens_are_no_comparison(tmp_path, capsys, words, message):
    assert run(["trace", str(HF / "olmo2"), str(tmp_path / "t.npz"), *words]) == 2
    assert message in capsys.readouterr().err
