"""Muon's direction: the momentum of each matrix, made orthogonal by Newton-Schulz iterations.

Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), for the iteration and its coefficients; Liu et al. 2025
(arXiv:2502.16982), for the scale that lets AdamW's rates serve. Each matrix is orthogonalised as a whole: queries, keys
and values apart, gate and up apart, each expert apart. Embeddings, head, norms, biases, sinks and routers are AdamW's.

No device repeats another's work. A layer's weights are split over the mesh; here each device gets whole matrices of its
own by all-to-all, an equal share of all that have one shape, and the results go back the same way. Axes that do not
split a weight (`data`) share the matrices out too, and gather the results. (optax.contrib exports the whole
optimizer and not this step, and leaves its layout to the compiler, which gathers every matrix on every device.)

Dims: R repeats, N matrices of one shape, M their shorter side, L the longer one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxtext.config.optimizer import MuonConfig
from maxtext.model.matrices import Matrices

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Jordan et al. 2024: steepest at zero
EPS = 1e-7


def newton_schulz(x_NML: jax.Array, steps: int) -> jax.Array:
    """Brings the singular values of each matrix near 1 (about 0.7 to 1.2 after five steps), in the dtype of `x_NML`."""
    a, b, c = COEFFICIENTS
    norm_N11 = jnp.sqrt(jnp.sum(jnp.square(x_NML.astype(jnp.float32)), (-2, -1), keepdims=True))
    x_NML = (x_NML / (norm_N11 + EPS)).astype(x_NML.dtype)
    for _ in range(steps):
        gram_NMM = jnp.einsum("nml,nkl->nmk", x_NML, x_NML)
        x_NML = a * x_NML + (b * gram_NMM + c * (gram_NMM @ gram_NMM)) @ x_NML
    return x_NML


def update_scale(fan_in: int, fan_out: int, cfg: MuonConfig) -> float:
    """What the orthogonal matrix is multiplied by, besides the learning rate."""
    if cfg.scale == "adamw_rms":
        return 0.2 * math.sqrt(max(fan_in, fan_out))
    return math.sqrt(max(1.0, fan_out / fan_in))


def orthogonalized(momenta: Sequence[jax.Array], matrices: Sequence[Matrices], cfg: MuonConfig) -> list[jax.Array]:
    """The direction of each array, scaled by its shape; float32, laid out like `momenta`.

    Args:
      momenta: arrays of the weights' shapes, with the leading dim R; sharded on the current mesh, if there is one.
      matrices: how each of them is made of matrices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    specs = tuple(PartitionSpec() if mesh.empty else jax.typeof(x).sharding.spec for x in momenta)
    sizes = {} if mesh.empty else {name: size for name, size in mesh.shape.items() if size > 1}
    run = functools.partial(_local, matrices=matrices, specs=specs, sizes=sizes, cfg=cfg)
    if mesh.empty:
        return run(*momenta)
    # Unchecked: that the gathered results are alike on all devices of an idle axis is not in their types.
    return jax.shard_map(run, in_specs=specs, out_specs=list(specs), check_vma=False)(*momenta)


class _Split(NamedTuple):
    """The mesh axes that split the sides of a matrix, and those that leave it whole: all have size above 1."""

    short: tuple[str, ...]
    long: tuple[str, ...]
    idle: tuple[str, ...]


class _Piece(NamedTuple):
    """One device's part of one array's matrices."""

    x_NML: jax.Array
    split: _Split
    shape: tuple[int, int]  # of a whole matrix
    turned: bool  # whether its longer side was that of the inputs
    scale: float


def _local(*momenta: jax.Array, matrices: Sequence[Matrices], specs: Sequence[PartitionSpec], sizes: dict[str, int],
           cfg: MuonConfig) -> list[jax.Array]:
    """`orthogonalized`, of one device's parts."""
    pieces = [_pieces(*one, sizes, cfg) for one in zip(momenta, matrices, specs, strict=True)]
    groups: dict[tuple, list[tuple[int, int]]] = {}
    for i, parts in enumerate(pieces):
        for j, piece in enumerate(parts):
            groups.setdefault((piece.shape, piece.split), []).append((i, j))
    done: dict[tuple[int, int], jax.Array] = {}
    for (_, split), members in groups.items():
        stacked_NML = jnp.concatenate([pieces[i][j].x_NML for i, j in members])
        whole_NML = _to_whole(stacked_NML.astype(cfg.dtype), split, sizes)
        back_NML = _to_parts(newton_schulz(whole_NML, cfg.ns_steps), len(stacked_NML), split, sizes)
        start = 0
        for i, j in members:
            count = len(pieces[i][j].x_NML)
            done[i, j] = pieces[i][j].scale * back_NML[start : start + count].astype(jnp.float32)
            start += count
    return [_joined(x, how, [done[i, j].mT if piece.turned else done[i, j] for j, piece in enumerate(pieces[i])])
            for i, (x, how) in enumerate(zip(momenta, matrices, strict=True))]


def _pieces(x: jax.Array, how: Matrices, spec: PartitionSpec, sizes: dict[str, int], cfg: MuonConfig) -> list[_Piece]:
    axes = [tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if axis in sizes)
            for entry in (*spec, *(None,) * (x.ndim - len(spec)))]
    fans, over, found = [], [], []
    for side in (how.inputs, how.outputs):
        over.append(tuple(axis for dim in side for axis in axes[dim + 1]))
    counted = {axis for dim in _counting(x, how) for axis in axes[dim]}
    idle = tuple(axis for axis in sizes if axis not in {*over[0], *over[1], *counted})
    for part in _parts(x, how):
        x_NIO = part.transpose(_order(x, how))
        fans = [math.prod(part.shape[dim + 1] for dim in side) for side in (how.inputs, how.outputs)]
        x_NIO = x_NIO.reshape(-1, *fans)
        whole = [fan * math.prod(sizes[axis] for axis in side) for fan, side in zip(fans, over, strict=True)]
        turned = (whole[0], over[0]) > (whole[1], over[1])  # of square ones too, so that all of one layout go together
        scale = update_scale(*whole, cfg)
        if turned:
            found.append(_Piece(x_NIO.mT, _Split(over[1], over[0], idle), (whole[1], whole[0]), True, scale))
        else:
            found.append(_Piece(x_NIO, _Split(over[0], over[1], idle), (whole[0], whole[1]), False, scale))
    return found


def _counting(x: jax.Array, how: Matrices) -> list[int]:
    """The dims that count matrices."""
    return [dim for dim in range(x.ndim) if dim - 1 not in (*how.inputs, *how.outputs)]


def _order(x: jax.Array, how: Matrices) -> list[int]:
    return [*_counting(x, how), *(dim + 1 for dim in (*how.inputs, *how.outputs))]


def _parts(x: jax.Array, how: Matrices) -> list[jax.Array]:
    if how.apart is None:
        return [x]
    last = x.shape[how.apart + 1]
    return jnp.split(x, [last - 2, last - 1], how.apart + 1)


def _joined(x: jax.Array, how: Matrices, parts_NIO: list[jax.Array]) -> jax.Array:
    """The array like `x` whose matrices are these: `_parts` and the reshaping of `_pieces`, undone."""
    order, parts = _order(x, how), []
    for like, part_NIO in zip(jax.eval_shape(lambda: _parts(x, how)), parts_NIO, strict=True):
        shaped = part_NIO.reshape([like.shape[dim] for dim in order])
        parts.append(shaped.transpose([order.index(dim) for dim in range(x.ndim)]))
    return parts[0] if how.apart is None else jnp.concatenate(parts, how.apart + 1)


def _to_whole(x_NML: jax.Array, split: _Split, sizes: dict[str, int]) -> jax.Array:
    """Parts of all N matrices to this device's share of them, whole; zero matrices fill up the last shares."""
    ways = math.prod(sizes[axis] for axes in split for axis in axes)
    x_NML = jnp.pad(x_NML, ((0, -len(x_NML) % ways), (0, 0), (0, 0)))
    if split.idle:
        shares = x_NML.reshape(math.prod(sizes[axis] for axis in split.idle), -1, *x_NML.shape[1:])
        x_NML = shares[jax.lax.axis_index(split.idle)]
    for dim, axes in ((1, split.short), (2, split.long)):
        if axes:
            x_NML = _exchange(x_NML, axes, split_axis=0, concat_axis=dim)
    return x_NML


def _to_parts(x_NML: jax.Array, count: int, split: _Split, sizes: dict[str, int]) -> jax.Array:
    """`_to_whole`, undone."""
    for dim, axes in ((2, split.long), (1, split.short)):
        if axes:
            x_NML = _exchange(x_NML, axes, split_axis=dim, concat_axis=0)
    if split.idle:
        x_NML = jax.lax.all_gather(x_NML, split.idle, tiled=True)
    return x_NML[:count]


def _exchange(x_NML: jax.Array, axes: tuple[str, ...], split_axis: int, concat_axis: int) -> jax.Array:
    """All-to-all over some mesh axes.

    The barrier keeps the compiler from giving it the arrays that were put together before: XLA for CPU (jax 0.10.2 and
    0.12) makes one operand of each, with layouts of their own, and then refuses them.
    """
    whole = jax.lax.optimization_barrier(x_NML)
    return jax.lax.all_to_all(whole, axes, split_axis=split_axis, concat_axis=concat_axis, tiled=True)
