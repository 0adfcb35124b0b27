"""Arrays whose positions are split over devices: by the context axis, and between layers by the tensor axis too.

Dims: B batch, T position.
"""

from __future__ import annotations

import jax
import numpy as np

from maxtext.parallel.sequence import natural_order, zigzag_order
from maxtext.parallel.sharding import RULES, spec

CONTEXT = RULES["sequence"][0]


def context_devices() -> int:
    """Devices of the current mesh that share a sequence."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(CONTEXT, 1)


def layout(length: int) -> np.ndarray | None:
    """The order of so many positions on the current mesh; None: each device has all, as they cannot be split."""
    devices = context_devices()
    return None if devices == 1 or length % (2 * devices) else zigzag_order(length, devices)


def split(x_BT: jax.Array, order_T: np.ndarray | None) -> jax.Array:
    """(B, T, ...) with its positions laid out over devices."""
    if order_T is None:
        return x_BT
    rest = (None,) * (x_BT.ndim - 2)
    ordered = x_BT.at[:, order_T].get(out_sharding=spec("batch", None, *rest))
    return jax.sharding.reshard(ordered, spec("batch", "sequence", *rest))


def join(x_BT: jax.Array, order_T: np.ndarray | None) -> jax.Array:
    """The inverse of `split`: all positions on each device, in their own order."""
    if order_T is None:
        return x_BT
    dims = spec("batch", *(None,) * (x_BT.ndim - 1))
    return jax.sharding.reshard(x_BT, dims).at[:, natural_order(len(order_T), context_devices())].get(out_sharding=dims)


def share(x_BTD: jax.Array) -> jax.Array:
    """Positions split over the tensor axis too, as they are between layers; not where they do not divide.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    split_already = jax.typeof(x_BTD).sharding.spec[1] is not None
    ways = sizes["tensor"] * (sizes[CONTEXT] if split_already else 1)
    if sizes["tensor"] == 1 or x_BTD.shape[1] % ways or (sizes[CONTEXT] > 1 and not split_already):
        return x_BTD
    return jax.sharding.reshard(x_BTD, spec("batch", "residual", None))


def unshare(x_BTD: jax.Array) -> jax.Array:
    """The inverse of `share`: all positions of this device's part of the context axis (an all-gather)."""
    return jax.sharding.reshard(x_BTD, spec("batch", None if positions_dim(x_BTD) is None else "sequence", None))


def positions_dim(x_BT: jax.Array) -> str | None:
    """The logical dim of the positions of (B, T, ...): what of the mesh they are split over."""
    axes = jax.typeof(x_BT).sharding.spec[1]
    return None if axes is None else "residual" if "tensor" in axes else "sequence"
