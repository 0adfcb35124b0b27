"""What may be wrong with one part: each usual mistake is undone on our weights, to see whether the part then agrees.

Edits are made on tensors as transformers has them, so that the tables alone say where heads, rotary rows, gates and
experts lie. Found causes are exact: the edited part agrees within the limit of the comparison.

Dims: N tokens, D model width, E experts; others as in `mapping`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from maxtext.config.schema import ModelConfig
from maxtext.convert.mapping import Place

Tensors = Mapping[str, np.ndarray]
Run = Callable[[Tensors, ModelConfig], np.ndarray]  # our part with some tensors changed, under some settings
UNKNOWN = "no single edit that is known here explains it: look at the tensors of this part and at its settings"
_SHOWN = 3  # causes that agree
_EXPERTS = ("mlp.gate_up", "mlp.gate_up_bias", "mlp.down", "mlp.down_bias")


def gap(ours: np.ndarray, theirs: np.ndarray) -> float:
    """L2 norm of the difference over that of the reference; NaN when ours has one."""
    a, b = ours.astype(np.float64).reshape(theirs.shape), theirs.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def of_linear(ours: np.ndarray, theirs: np.ndarray, limit: float) -> str:
    """For the embedding and the head."""
    factor = _factor(ours, theirs)
    if gap(factor * ours, theirs) <= limit:
        return f"ours is {1 / factor:.6g} times theirs: look at the scale (model.scale_embeddings)"
    return "the rows of the table are not theirs, or in another order"


def of_norm(normed: np.ndarray, weight: np.ndarray, offset: float, theirs: np.ndarray, given: np.ndarray,
            others: Tensors, limit: float) -> str:
    """For a norm: what gain theirs has is solved for.

    Args:
      normed: the input over its root mean square.
      weight, offset: our gain is offset + weight.
      given: the input.
      others: weights of other norms of the layer, by name.
    """
    b, a = theirs.astype(np.float64).reshape(-1, len(weight)), normed.reshape(-1, len(weight))
    if gap(theirs, given) <= limit:
        return "theirs gives out what it takes in: it has no norm here"
    wanted = (a * b).sum(0) / np.maximum((a * a).sum(0), 1e-30)
    if gap(a * wanted, b) > limit:
        return "no gain explains it: look at model.norm_eps, and at what the norm runs over (model.qk_norm)"

    def same(gain: np.ndarray) -> bool:
        return gap(a * gain, b) <= limit

    if np.allclose(weight + offset, 1.0):
        return "our gain is 1 everywhere, theirs is not: the norm gain is missing"
    if same(weight + 1.0 - offset):
        return "the gain counts from the other end: theirs is " + (
            "the weight (model.norm_gain weight)" if offset else "1 plus the weight (model.norm_gain one_plus_weight)")
    for name, tensor in others.items():
        if tensor.size == weight.size and same(tensor.reshape(-1) + offset):
            return f"theirs has the gain that we have from {name}: swapped"
    factor = _factor(a * (weight + offset), b)
    if same(factor * (weight + offset)):
        return f"our gain is {1 / factor:.6g} times theirs: scaled"
    if np.allclose(np.sort(wanted), np.sort(weight + offset), atol=1e-4):
        return "theirs has the same gains in another order"
    return "our gain is not theirs"


def of_branch(tensors: Tensors, own: Mapping[str, Place], run: Run, model: ModelConfig, theirs: np.ndarray,
              limit: float) -> str:
    """For attention or a feed-forward.

    Args:
      tensors: of this part.
      own: the places of the layer's tensors.
      run: our part.
    """
    groups: dict[str, list[Place]] = {}
    for name in tensors:  # the experts' tensors of one kind are one group, and edited together
        groups.setdefault(own[name].rule.name, []).append(own[name])
    kinds = [_transposed(groups, tensors), _swapped(groups, tensors), _orders_of_heads(groups, tensors),
             _orders_of_rotary_rows(groups, tensors), _orders_of_pairs(groups, tensors)]
    found = [cause for cause, edit in itertools.chain(*kinds) if gap(run(edit, model), theirs) <= limit]
    found = found or list(_permuted_experts(groups, tensors, run, model, theirs, limit))
    found = found or list(_scaled(groups, tensors, run, model, theirs, limit))
    found = found or list(_missing_bias(run({}, model), theirs, limit))
    found = found or list(itertools.islice(_other_settings(groups, run, model, theirs, limit), 1))  # each compiles
    return "; or ".join(dict.fromkeys(found[:_SHOWN])) if found else UNKNOWN


def _factor(ours: np.ndarray, theirs: np.ndarray) -> float:
    """c with the least |c ours - theirs|."""
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    return float(a @ b / max(a @ a, 1e-30)) or 1e-30


def _short(name: str) -> str:
    return name.replace("model.layers.{layer}.", "").replace("{expert}", "*")


# ---- edits of tensors: (cause, tensors by name)

Groups = Mapping[str, Sequence[Place]]
Edits = Iterator[tuple[str, Tensors]]


def _transposed(groups: Groups, tensors: Tensors) -> Edits:
    square = {rule: {p.name: tensors[p.name].T for p in group} for rule, group in groups.items()
              if len(set(group[0].shape)) == 1 and len(group[0].shape) == 2}
    for rule, edit in square.items():
        yield f"{_short(rule)} is transposed", edit
    if len(square) > 1:
        yield "all square matrices are transposed", {k: v for edit in square.values() for k, v in edit.items()}


def _swapped(groups: Groups, tensors: Tensors) -> Edits:
    """Two tensors, or two modules with weight and bias, in each other's place."""
    modules: dict[str, dict[str, Sequence[Place]]] = {}
    for rule, group in groups.items():
        modules.setdefault(rule.removesuffix(".weight").removesuffix(".bias"), {})[rule.rpartition(".")[2]] = group
    seen: set[frozenset[str]] = set()  # a module of one tensor is both
    for sets in (modules, {rule: {"": group} for rule, group in groups.items()}):
        for (first, ours), (second, others) in itertools.combinations(sets.items(), 2):
            if {key: [p.shape for p in group] for key, group in ours.items()} != {
                    key: [p.shape for p in group] for key, group in others.items()}:
                continue
            pairs = [pair for key in ours for pair in zip(ours[key], others[key], strict=True)]
            edit = {a.name: tensors[b.name] for one in pairs for a, b in (one, one[::-1])}
            if frozenset(edit) in seen:
                continue
            seen.add(frozenset(edit))
            same = all(a.piece == b.piece and a.rule.leaf.endswith("gate_up") for a, b in pairs)
            yield f"{'gate and up' if same else 'two tensors'} are swapped: {_short(first)} and {_short(second)}", edit


def _orders_of_heads(groups: Groups, tensors: Tensors) -> Edits:
    """Query heads counted through the key/value heads first."""
    found: list[dict[str, dict[str, np.ndarray]]] = [{}, {}]
    for rule, group in groups.items():
        names = _dims(group[0])
        if "K" not in names or "G" not in names or 1 in (
                sizes := [group[0].dims[names.index(dim)] for dim in ("K", "G")]):
            continue
        at = names.index("K")
        for edit, (a, b) in zip(found, (sizes, sizes[::-1]), strict=True):
            edit[rule] = {p.name: _exchange(tensors[p.name], p.dims, at, a, b) for p in group}
    yield from _each_and_all("the order of its heads is wrong", found)


def _exchange(tensor: np.ndarray, dims: Sequence[int], at: int, a: int, b: int) -> np.ndarray:
    """The two dims at `at`, taken as (b, a), exchanged, so that they are (a, b)."""
    split = tensor.reshape(*dims[:at], b, a, *dims[at + 2:])
    return split.swapaxes(at, at + 1).reshape(tensor.shape)


def _orders_of_rotary_rows(groups: Groups, tensors: Tensors) -> Edits:
    """Rows of the two halves where neighbours are expected, and the other way round."""
    found: list[dict[str, dict[str, np.ndarray]]] = [{}, {}]
    for rule, group in groups.items():
        place, names = group[0], _dims(group[0])
        if place.rule.leaf.rpartition(".")[2] in ("qkv", "qkv_bias") and "-1" not in place.rule.ours:
            at, start = names.index("H"), 0
        elif "N+R" in names or "C+R" in names:
            at = names.index("N+R" if "N+R" in names else "C+R")
            start = place.dims[at] - _rotary_width(groups)
        else:
            continue
        width = place.dims[at] - start
        to_neighbours = np.arange(width).reshape(2, -1).T.ravel()
        for edit, order in zip(found, (to_neighbours, np.argsort(to_neighbours)), strict=True):
            rows = np.concatenate([np.arange(start), start + order])
            edit[rule] = {p.name: tensors[p.name].reshape(p.dims).take(rows, at).reshape(p.shape) for p in group}
    yield from _each_and_all("the order of its rotary rows is wrong (halves or neighbours, model.rope_pairs)", found)


def _rotary_width(groups: Groups) -> int:
    """R, from the two latent dims that a table has with it and without."""
    for group in groups.values():
        names = _dims(group[0])
        if "C+R" in names:
            norm = next(other[0] for other in groups.values() if "C" in _dims(other[0]))
            return group[0].dims[names.index("C+R")] - norm.dims[_dims(norm).index("C")]
    raise AssertionError("a table of latent attention has a dim C+R")


def _orders_of_pairs(groups: Groups, tensors: Tensors) -> Edits:
    """Fused gate and up: in the other order, or one after the other instead of alternating."""
    found: list[dict[str, dict[str, np.ndarray]]] = [{}, {}, {}]
    for rule, group in groups.items():
        place, names = group[0], _dims(group[0])
        if "P" not in names:
            continue
        at = names.index("P")
        first = min(at, names.index("X"))
        sizes = [place.dims[first], place.dims[first + 1]]
        found[0][rule] = {p.name: np.flip(tensors[p.name].reshape(p.dims), at).reshape(p.shape) for p in group}
        for edit, (a, b) in zip(found[1:], (sizes, sizes[::-1]), strict=True):
            edit[rule] = {p.name: _exchange(tensors[p.name], p.dims, first, a, b) for p in group}
    yield from _each_and_all("gate and up are swapped", found[:1])
    yield from _each_and_all("gate and up alternate in one of the two, and follow each other in the other", found[1:])


def _each_and_all(cause: str, edits: Sequence[Mapping[str, dict[str, np.ndarray]]]) -> Edits:
    """Each tensor by itself, then all together."""
    for edit in edits:
        for rule, one in edit.items():
            yield f"{_short(rule)}: {cause}", one
        if len(edit) > 1:
            every = {name: tensor for one in edit.values() for name, tensor in one.items()}
            yield f"{', '.join(map(_short, edit))}: {cause}", every


def _dims(place: Place) -> list[str]:
    return re.findall(r"[A-Z+]+", place.rule.theirs)


# ---- causes that are solved for


def _scaled(groups: Groups, tensors: Tensors, run: Run, model: ModelConfig, theirs: np.ndarray,
            limit: float) -> Iterator[str]:
    """A constant factor on one tensor: solved for where the output is linear in it, else a usual one."""
    ours, width = run({}, model), model.head_width
    usual = [math.sqrt(width), width, math.sqrt(model.d_model), 2.0, 4.0, 8.0, 16.0]
    for rule, group in groups.items():
        slope = run({p.name: 2 * tensors[p.name] for p in group}, model).astype(np.float64) - ours
        solved = 1 + _factor(slope, theirs - ours)
        for factor in [solved, *usual, *(1 / factor for factor in usual)]:
            if gap(run({p.name: np.float32(factor) * tensors[p.name] for p in group}, model), theirs) <= limit:
                scores = group[0].rule.leaf == "attention.qkv" and "-1" not in group[0].rule.ours
                yield (f"{_short(rule)} is {1 / factor:.6g} times theirs: scaled"
                       f"{' (or model.attention_scale is not theirs)' if scores else ''}")
                break


def _missing_bias(ours: np.ndarray, theirs: np.ndarray, limit: float) -> Iterator[str]:
    offset = (theirs.astype(np.float64) - ours).reshape(-1, theirs.shape[-1]).mean(0)
    if gap(ours + offset, theirs) <= limit:
        yield "theirs is ours plus a constant vector: a bias is missing, or another one"


def _other_settings(groups: Groups, run: Run, model: ModelConfig, theirs: np.ndarray, limit: float) -> Iterator[str]:
    """Settings of the part under which our weights agree."""
    changes: list[dict[str, object]]
    if any(group[0].rule.leaf.startswith("attention.") for group in groups.values()):
        windows = () if model.window is None else (model.window - 1, model.window + 1, theirs.shape[1])
        changes = [{"window": window} for window in windows if window > 0]
        changes += [{"rope_theta": theta, "window_rope_theta": None} for theta in (1e4, 1e5, 5e5, 1e6)]
        changes += [{"attention_scale": scale} for scale in (1.0, model.head_width**-0.5)]
        changes += [{"rope_pairs": "halves" if model.rope_pairs == "neighbours" else "neighbours"}]
    else:
        changes = [{"activation": kind} for kind in ("silu", "gelu_tanh", "clamped_swish")]
        usual = {"renormalise": not model.moe.renormalise, "scale": 1.0, "groups": 1,
                 "scores": "sigmoid" if model.moe.scores == "softmax" else "softmax"}
        changes += [{"moe": dataclasses.replace(model.moe, **{field: value})} for field, value in usual.items()
                    if model.moe.experts]
    for change in changes:
        other = dataclasses.replace(model, **change)
        if other != model and gap(run({}, other), theirs) <= limit:
            shown = {f"model.{k}": v for k, v in change.items() if k != "moe" and v is not None}
            shown |= {f"model.moe.{f.name}": getattr(other.moe, f.name) for f in dataclasses.fields(other.moe)
                      if getattr(other.moe, f.name) != getattr(model.moe, f.name)}
            yield "the weights agree, a setting does not: with " + ", ".join(
                f"{key} {value}" for key, value in shown.items()) + " it agrees"


def _permuted_experts(groups: Groups, tensors: Tensors, run: Run, model: ModelConfig, theirs: np.ndarray,
                      limit: float) -> Iterator[str]:
    """The order of experts in which they fit their router.

    With all experts set to one of them, the output shows what this one gives for each token. What a token gets is then
    a weighted sum of these, and the weights, solved for on both sides, tell which expert is which.
    """
    count = model.moe.experts
    experts = {place.name: place for group in groups.values() for place in group if place.rule.leaf in _EXPERTS and (
        "{expert}" in place.rule.name or place.rule.theirs.startswith("E "))}
    if not experts or theirs.shape[-1] < count:
        return

    def taken(order: Sequence[int]) -> Tensors:
        """Tensors in which place e holds expert order[e]."""
        edit = {}
        for name, place in experts.items():
            if "{expert}" in place.rule.name:
                at = place.index[0]
                twin = next(other for other, p in experts.items() if p.rule == place.rule and p.index[0] == order[at])
                edit[name] = tensors[twin]
            else:
                edit[name] = tensors[name][np.asarray(order)]
        return edit

    nothing = {name: np.zeros_like(tensors[name]) for name, place in experts.items() if "down" in place.rule.leaf}
    base = run(nothing, model).astype(np.float64)
    alone_END = np.stack([run(taken([e] * count), model) - base for e in range(count)]).reshape(count, -1,
                                                                                               theirs.shape[-1])
    solve_NED = np.linalg.pinv(alone_END.transpose(1, 2, 0), rcond=1e-6)
    shares = [np.einsum("ned,nd->en", solve_NED, (side - base).reshape(-1, theirs.shape[-1]))
              for side in (theirs.astype(np.float64), run({}, model))]
    # theirs[e] is how much of our expert e they use, which is how much of place r ours uses: so e belongs to r.
    distance_EE = ((shares[0][:, None] - shares[1][None]) ** 2).sum(-1)
    order = _matched(distance_EE)
    if order != list(range(count)) and gap(run(taken(order), model), theirs) <= limit:
        moved = [f"{place} is {expert}" for place, expert in enumerate(order) if place != expert]
        yield f"the experts are permuted against their router: expert {', '.join(moved[:8])} of ours"


def _matched(distance_EE: np.ndarray) -> list[int]:
    """For each place the expert that belongs to it, nearest pairs first; those without tokens stay where they are."""
    order = [-1] * len(distance_EE)
    moved_EE = 1e-6 * distance_EE.max() * (1 - np.eye(len(distance_EE)))
    for flat in np.argsort(distance_EE + moved_EE, axis=None):
        expert, place = divmod(int(flat), len(distance_EE))
        if order[place] < 0 and expert not in order:
            order[place] = expert
    return order
