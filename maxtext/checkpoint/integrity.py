"""Fingerprints of arrays that do not depend on the mesh: two 32-bit sums over the bits of every element.

Element i (row-major) holds the bits b. With mix, the 32-bit finalizer of MurmurHash3 (a bijection), and a constant c:

    h = mix(b xor mix(i + c))        sum 1 = sum of h        sum 2 = sum of mix(h + c)        all mod 2^32

Integer addition that wraps is associative and commutative, so every sharding and every order of reduction gives the
same sums, in one pass on the device. A change of a single element always changes both sums (a bijection loses
nothing); any other change is missed with a chance of about 2^-64. Plain sums of b times a weight would not do: they
are blind to negating two elements. It guards against accidents, not against somebody who wants to deceive.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxtext.parallel.host_memory import to_device

PyTree = Any
# One word holds this many positions; of a larger array the leading dims are counted in a second word, so that no two
# elements share a key. (One dim of 2^32 or more cannot be indexed without 64-bit mode; the assert below says so.)
WORD = 2**32
_GOLDEN = 0x9E3779B9
_NUMPY_BLOCK = 1 << 15  # elements hashed at a time on the host, so that the temporaries stay in the cache


def leaf_name(path: tuple[Any, ...]) -> str:
    """The dotted name of a leaf from its jax key path: `params.blocks.0.wq`; a lone leaf is called `leaf`."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "leaf"


def named_leaves(state: PyTree) -> dict[str, Any]:
    """Every leaf by dotted name, in tree order; ValueError when two leaves would share a name."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = leaf_name(path)
        if name in named:
            raise ValueError(f"two leaves of the state are called {name}; rename the key that has a dot in it")
        named[name] = leaf
    return named


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed random keys (`jax.random.key`)."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _mix(x: Any, constant: Callable[[int], Any]) -> Any:
    """MurmurHash3's finalizer (Appleby, public domain), for jnp and for numpy words alike."""
    x = x ^ (x >> constant(16))
    x = x * constant(0x85EBCA6B)
    x = x ^ (x >> constant(13))
    x = x * constant(0xC2B2AE35)
    return x ^ (x >> constant(16))


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32; 64-bit elements become two words in a new last dim."""
    dtype = x.dtype
    if dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(dtype, jnp.complexfloating) or not jnp.issubdtype(dtype, jnp.number):
        raise TypeError(f"no fingerprint for arrays of {dtype}; supported are bool, integers, floats and random keys")
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    if bits == 64:
        return lax.bitcast_convert_type(x, jnp.uint32)
    if jnp.issubdtype(dtype, jnp.integer):
        return x.astype(jnp.uint32)
    unsigned = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _split(shape: tuple[int, ...], word: int) -> int:
    """How many leading dims are counted in the second position word, so that the others fit the first."""
    split = next(k for k in range(len(shape) + 1) if math.prod(shape[k:]) <= word)
    assert math.prod(shape[:split]) <= word, f"an array of shape {shape} has too many elements for two words"
    return split


def _position(shape: tuple[int, ...], dims: range) -> jax.Array:
    """uint32 of `shape`: the row-major index over `dims` alone."""
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(dims):
        position += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
        stride *= shape[dim]
    return position


@partial(jax.jit, static_argnames="word")
def leaf_sums(x: jax.Array, word: int = WORD) -> tuple[jax.Array, jax.Array, jax.Array]:
    """uint32 scalars on the device: both sums of one array and its number of NaN and infinite elements.

    Runs under any sharding, explicit axes too. `word` is a parameter only so that tests reach the second word.
    """
    if is_key(x.dtype):
        x = jax.random.key_data(x)
    x = to_device(x)
    if x.ndim == 0:
        x = x.reshape(1)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    bits = _words(x)
    bad = (~jnp.isfinite(x)).astype(jnp.uint32) if floating else jnp.zeros(x.shape, jnp.uint32)
    if bits.ndim > x.ndim:  # two words an element: count the element once
        bad = jnp.stack([bad, jnp.zeros_like(bad)], axis=-1)
    shape, split = bits.shape, _split(bits.shape, word)
    key = _mix(_position(shape, range(split, len(shape))) + jnp.uint32(_GOLDEN), jnp.uint32)
    if split:
        key = _mix(key ^ _mix(_position(shape, range(split)), jnp.uint32), jnp.uint32)
    first = _mix(bits ^ key, jnp.uint32)
    terms = (first, _mix(first + jnp.uint32(_GOLDEN), jnp.uint32), bad)
    # One reduction of three operands is one pass over memory, and many times faster here than three sums.
    add = lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True))  # noqa: E731
    first, second, bad = lax.reduce(terms, (jnp.uint32(0),) * 3, add, tuple(range(len(shape))))
    return first, second, bad


def tree_fingerprints(state: PyTree) -> dict[str, tuple[int, int]]:
    """Both sums of every leaf by dotted name: equal for equal bits, whatever the mesh. Waits for the devices."""
    return {name: (a, b) for name, (a, b, _) in fetch_sums(tree_sums(state)).items()}


def tree_sums(state: PyTree) -> dict[str, tuple[jax.Array, jax.Array, jax.Array]]:
    """`leaf_sums` of every leaf by dotted name, on the devices. Equal shapes share one program.

    Dispatched and not waited for, but on CPU one at a time: of two programs in flight XLA's CPU client (jax 0.10.2)
    may start the collectives in another order on another device, and then hangs for ever.
    """
    sums = {}
    for name, leaf in named_leaves(state).items():
        sums[name] = leaf_sums(leaf)
        if isinstance(leaf, jax.Array) and all(device.platform == "cpu" for device in leaf.devices()):
            jax.block_until_ready(sums[name])
    return sums


def fetch_sums(sums: dict[str, tuple[jax.Array, jax.Array, jax.Array]]) -> dict[str, tuple[int, int, int]]:
    """The values of `tree_sums` as Python ints."""
    host = jax.device_get(sums)
    return {name: (int(host[name][0]), int(host[name][1]), int(host[name][2])) for name in sums}


def fingerprint_numpy(x: np.ndarray, word: int = WORD) -> tuple[int, int]:
    """Both sums of a host array, without a device: the reader's second opinion, and the oracle of the tests."""
    first, second, _ = partial_sums_numpy(x, x.shape, 0, word)
    return first, second


def partial_sums_numpy(x: np.ndarray, shape: tuple[int, ...], start: int, word: int = WORD) -> tuple[int, int, int]:
    """What a part of an array adds to the sums of the whole, and its number of NaN and infinite elements.

    Args:
      x: the elements `start` to `start + x.size` of the whole, in row-major order.
      shape: of the whole.
    """
    x = np.ascontiguousarray(x)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    words = 2 if x.dtype.itemsize == 8 else 1
    if words == 2:
        bits, shape = x.reshape(-1).view(np.uint32), (*(shape or (1,)), 2)
    else:
        narrow = np.dtype(f"u{x.dtype.itemsize}")
        integer = x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.integer)
        bits, shape = x.reshape(-1) if integer else x.reshape(-1).view(narrow), shape or (1,)
    inner, total = math.prod(shape[_split(shape, word) :]), math.prod(shape)
    first = second = bad = 0
    for begin in range(0, bits.size, _NUMPY_BLOCK):
        b = bits[begin : begin + _NUMPY_BLOCK].astype(np.uint32)
        index = np.arange(start * words + begin, start * words + begin + b.size, dtype=np.uint64)
        key = _mix((index % np.uint64(inner)).astype(np.uint32) + np.uint32(_GOLDEN), np.uint32)
        if inner < total:
            key = _mix(key ^ _mix((index // np.uint64(inner)).astype(np.uint32), np.uint32), np.uint32)
        hashed = _mix(b ^ key, np.uint32)
        first += int(np.sum(hashed, dtype=np.uint32))
        second += int(np.sum(_mix(hashed + np.uint32(_GOLDEN), np.uint32), dtype=np.uint32))
        if floating:
            with np.errstate(invalid="ignore"):  # narrow floats warn of the NaN that is looked for
                finite = np.isfinite(x.reshape(-1)[begin // words : (begin + b.size) // words])
            bad += int(finite.size - np.count_nonzero(finite))
    return first % WORD, second % WORD, bad
