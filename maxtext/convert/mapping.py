"""The table engine: where each tensor of another format lies in our arrays, and how to get it there and back.

A table is a list of `Rule`s. A rule is reversible by construction, since it is only a reshape, a permutation of dims
and a slice; so one line serves import and export, weights and Adam moments alike. The unit of work is a *piece*: one
layer's share of one stacked array (or a whole array outside the blocks), so that memory is bounded by one of those.

Dims: D model width, V vocabulary, F feed-forward width, K key/value heads, G query heads of one, H head width. Mixture
of experts: E experts, X width of one, S width of the shared ones, P the pair of gate and up. Latent attention: Q width
of compressed queries, C of compressed keys and values, N part of a head without positions, R rotary part, W value.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from maxtext.config.schema import ModelConfig
from maxtext.convert import ConvertError
from maxtext.model.decoder import decoder_params, leaf_names, segments
from maxtext.parallel.sharding import Param, is_param

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of tensor.

    Attributes:
      name: its name in the other format; `{layer}` stands for the number of the layer, and such a rule is of a block;
        `{expert}` for the number of the expert.
      theirs: its dims there; dims in brackets are one dim that runs over them, the last one fastest: "(K G H) D".
        "N+R" is one dim as long as both together.
      leaf: our array, named inside `Block` for a rule of a block, inside `Decoder` otherwise. The rule applies where
        there is such an array with as many dims: in routed blocks, in dense ones, or in a model with a head of its own.
      ours: the dims of that array, in its order, and the slice that the tensor fills: "G" is the whole dim, ":G" its
        first G entries, "-2" its last entry but one, "{expert}" that of the expert. It has the dims of `theirs` in any
        order.
      where: a further condition: an array that must be there too, or with "no " before it must not be there.
      float32: whether it is written in float32 whatever the others have.
    """

    name: str
    theirs: str
    leaf: str
    ours: str
    where: str = ""
    float32: bool = False


@dataclasses.dataclass(frozen=True)
class Piece:
    """One layer's share of a stacked array (`repeat` is its place on the leading dim), or an array outside blocks."""

    leaf: str
    repeat: int | None
    shape: Shape  # without the leading dim of a stacked array


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one tensor lies: `piece[index]`, after a reshape to `dims` and a permutation."""

    rule: Rule
    name: str
    shape: Shape
    piece: Piece
    index: tuple[slice | int, ...]
    dims: Shape
    order: tuple[int, ...]

    def to_ours(self, tensor: np.ndarray) -> np.ndarray:
        """A view of the tensor with the shape of `piece[index]`."""
        return tensor.reshape(self.dims).transpose(self.order)

    def to_theirs(self, piece: np.ndarray) -> np.ndarray:
        """The tensor out of a whole piece; a view or a copy."""
        return piece[self.index].transpose(np.argsort(self.order)).reshape(self.shape)


def places(rules: Iterable[Rule], model: ModelConfig) -> dict[str, Place]:
    """Every tensor that a model has in the other format, by name, in the order of our arrays.

    The exactly-once check of the table itself is here: AssertionError unless every entry of every array of the model is
    filled by exactly one tensor.
    """
    sizes = _sizes(model)
    declared = decoder_params(model)
    arrays: dict[str, Param] = dict(zip(jax.tree.leaves(leaf_names(declared)),
                                        jax.tree.leaves(declared, is_leaf=is_param), strict=True))
    layers = layer_places(model)
    found: dict[str, Place] = {}
    for rule in rules:
        homes = [(layer, f"{prefix}.", repeat) for layer, (prefix, repeat) in enumerate(layers)]
        for layer, prefix, repeat in homes if "{layer}" in rule.name else [(None, "", None)]:
            leaf, where = prefix + rule.leaf, rule.where.removeprefix("no ")
            if leaf not in arrays or (where and (prefix + where in arrays) != (where == rule.where)):
                continue
            piece = Piece(leaf, repeat, arrays[leaf].shape[0 if repeat is None else 1:])
            if len(piece.shape) != len(rule.ours.split()):
                continue
            for expert in range(model.moe.experts) if "{expert}" in rule.name else [None]:
                place = _place(rule, piece, sizes, layer, expert)
                assert place.name not in found, f"two rules give {place.name}"
                found[place.name] = place
    _check_coverage(found.values(), arrays)
    order = {leaf: number for number, leaf in enumerate(arrays)}
    return {place.name: place for place in
            sorted(found.values(), key=lambda place: (order[place.piece.leaf], place.piece.repeat or 0))}


def layer_places(model: ModelConfig) -> list[tuple[str, int]]:
    """Of each layer: the name of its block in the tree, and its place on the leading dim of the stacked arrays."""
    found = []
    for number, segment in enumerate(segments(model)):
        for repeat in range(segment.repeats):
            found += [(f"segments.{number}.{position}", repeat) for position in range(len(segment.layers))]
    return found


def _sizes(model: ModelConfig) -> dict[str, int]:
    """The length of each dim that the model has."""
    moe, latent = model.moe, model.latent
    sizes = {"D": model.d_model, "V": model.vocab_size, "F": model.d_ff, "K": model.kv_heads,
             "G": model.n_heads // model.kv_heads, "H": model.head_width, "P": 2, "E": moe.experts, "X": moe.d_expert,
             "S": moe.shared_experts * (moe.d_expert or 0), "Q": latent.q_rank, "C": latent.kv_rank,
             "N": latent.nope_dim, "R": latent.rope_dim, "W": model.value_width}
    return {dim: size for dim, size in sizes.items() if size is not None}


def _place(rule: Rule, piece: Piece, sizes: Mapping[str, int], layer: int | None, expert: int | None) -> Place:
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", rule.theirs)]
    theirs = [dim for group in groups for dim in group]
    long = {dim: sum(sizes[part] for part in dim.split("+")) for dim in theirs}
    ours: list[str] = []
    index: list[slice | int] = []
    for token, size in zip(rule.ours.split(), piece.shape, strict=True):
        dim = token.lstrip(":")
        if dim in long:
            assert token.startswith(":") or long[dim] == size, f"{rule.leaf}: {rule.ours!r} is not {piece.shape}"
            ours.append(dim)
            index.append(slice(0, long[dim]) if token.startswith(":") else slice(None))
        else:
            assert re.fullmatch(r"-?\d+|\{expert\}", token), f"{rule.name}: {dim} is in {rule.ours!r} alone"
            index.append(int(token.format(expert=expert)) % size)
    assert sorted(ours) == sorted(theirs), f"{rule.name}: {rule.theirs!r} and {rule.ours!r} have different dims"
    return Place(
        rule=rule,
        name=rule.name.format(layer=layer, expert=expert),
        shape=tuple(math.prod(long[dim] for dim in group) for group in groups),
        piece=piece,
        index=tuple(index),
        dims=tuple(long[dim] for dim in theirs),
        order=tuple(theirs.index(dim) for dim in ours),
    )


def _check_coverage(found: Iterable[Place], arrays: Mapping[str, Param]) -> None:
    """AssertionError unless every entry of every array is filled once. Dims that no rule cuts are counted as one."""
    by_piece = pieces(found)
    wanted = {(leaf, repeat) for leaf, param in arrays.items()
              for repeat in (range(param.shape[0]) if param.dims[0] == "layers" else [None])}
    assert {(piece.leaf, piece.repeat) for piece in by_piece} == wanted, "the table leaves arrays of the model out"
    for piece, parts in by_piece.items():
        cut = [any(part.index[i] != slice(None) for part in parts) for i in range(len(piece.shape))]
        count = np.zeros([size if is_cut else 1 for size, is_cut in zip(piece.shape, cut, strict=True)], np.int8)
        for part in parts:
            count[part.index] += 1
        assert (count == 1).all(), f"the table fills {piece.leaf} not exactly once"


def pieces(found: Iterable[Place]) -> dict[Piece, list[Place]]:
    """The tensors of each piece."""
    grouped: dict[Piece, list[Place]] = {}
    for place in found:
        grouped.setdefault(place.piece, []).append(place)
    return grouped


def assemble(piece: Piece, parts: Sequence[Place], read: Callable[[str], np.ndarray]) -> np.ndarray:
    """A piece as float32, out of the tensors that fill it; one of them is in memory at a time."""
    filled = np.empty(piece.shape, np.float32)
    for part in parts:
        filled[part.index] = part.to_ours(read(part.name))
    return filled


def check_tensors(wanted: Mapping[str, Place], found: Mapping[str, Shape], where: str,
                  ignored: Sequence[str] = ()) -> list[str]:
    """The exactly-once check of a file against a table, before anything is read or written.

    Args:
      wanted: the tensors that the model has.
      found: shape of each tensor that is there.
      where: the folder, for the message.
      ignored: regular expressions of tensors that carry nothing (such as stored rotary frequencies).

    Returns:
      The names of tensors that were ignored.

    Raises:
      ConvertError: names every tensor that is missing, unknown or of another shape, with the nearest name.
    """
    skipped = [name for name in found if name not in wanted and any(re.fullmatch(p, name) for p in ignored)]
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and name not in skipped]
    faults = [lambda n=name: f"missing: {n} {list(wanted[n].shape)}{_nearest(n, extra)}" for name in missing]
    faults += [lambda n=name: f"unknown: {n} {list(found[n])}{_nearest(n, missing or list(wanted))}" for name in extra]
    faults += [lambda n=name: _wrong_shape(n, tuple(found[n]), wanted[n].shape) for name in wanted
               if name in found and tuple(found[name]) != wanted[name].shape]
    if faults:
        shown = [fault() for fault in faults[:20]]  # the nearest name takes a while to find
        shown += [f"... and {len(faults) - 20} more"] if len(faults) > 20 else []
        raise ConvertError("\n  ".join([f"{where} does not hold exactly this model's tensors; nothing was written:",
                                        *shown]))
    return skipped


def _wrong_shape(name: str, found: Shape, wanted: Shape) -> str:
    turned = "; it looks transposed" if found == wanted[::-1] else ""
    return f"shape: {name} is {list(found)}, the model needs {list(wanted)}{turned}"


def _nearest(name: str, others: list[str]) -> str:
    near = difflib.get_close_matches(name, others, 1, 0.6)
    return f" (nearest: {near[0]})" if near else ""
