"""The order in which the tokens of a sequence lie on the devices that share it.

Under a causal mask late tokens have more keys than early ones. So the sequence is cut into 2 C equal chunks, and device
i of C holds chunk i and chunk 2 C - 1 - i: each device then has the same number of pairs of query and key.
"""

from __future__ import annotations

import numpy as np


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """Positions in the order in which they lie: `x[zigzag_order(len(x), C)]` splits evenly over C devices.

    Args:
      length: tokens of a sequence; a multiple of 2 * devices.
      devices: how many share it. On one device the order is the natural one.

    Returns:
      int64 (length,), a permutation.

    Raises:
      ValueError: when the sequence cannot be cut into 2 * devices equal chunks.
    """
    check_length(length, devices)
    chunks = np.arange(length).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[devices:][::-1]], axis=1).reshape(-1)


def natural_order(length: int, devices: int) -> np.ndarray:
    """The inverse of `zigzag_order`: `x[zigzag_order(n, C)][natural_order(n, C)]` is x."""
    return np.argsort(zigzag_order(length, devices))


def holder(chunk: int, devices: int) -> tuple[int, int]:
    """The device that holds a chunk, and where: 0 for its first half, 1 for its second."""
    return (chunk, 0) if chunk < devices else (2 * devices - 1 - chunk, 1)


def chunks_of(device: int, devices: int) -> tuple[int, int]:
    """The two chunks that a device holds."""
    return device, 2 * devices - 1 - device


def check_length(length: int, devices: int) -> None:
    if length % (2 * devices):
        raise ValueError(f"a sequence of {length} tokens cannot be shared by {devices} devices: the length must be a "
                         f"multiple of 2 * {devices} = {2 * devices}")
