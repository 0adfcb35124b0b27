"""Prompts in, new tokens out: batches of prompts of any lengths, in one compiled program a shape.

Dims: B rows of a batch, T position in the longest prompt, N new token, V vocabulary, D model width.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.config.architecture import ModelConfig
from maxtext.generate.cache import cast_decoder, decode, prefill
from maxtext.generate.sampler import Sampling, sample_rows
from maxtext.model.decoder import Decoder
from maxtext.model.loss import head_logits
from maxtext.parallel.mesh import batch_devices
from maxtext.parallel.sharding import per_device, sharding, spec

SHORTEST = 16  # prompts are padded to a power of two of at least this many tokens, so that few shapes are compiled


def generate(params: Decoder, cfg: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, *,
             sampling: Sampling | None = None, seed: int = 0, stop_ids: Collection[int] = (), dtype: str = "float32",
             batch: int = 8, vocabulary: int | None = None) -> list[list[int]]:
    """Goes on from each prompt. All processes of a mesh call it alike; it uses the current mesh.

    Args:
      params: weights of any float dtype; they are only read.
      prompts: ids, at least one each.
      max_new_tokens: most tokens added to each.
      sampling: how a token is chosen; the likeliest by default.
      seed: with the place of a prompt among all prompts, it determines its sample, whatever the batches and the mesh.
      stop_ids: ids that end a row.
      dtype: of activations and of the cache.
      batch: rows computed together; rounded up to what the mesh divides.
      vocabulary: ids from here on are never chosen (an embedding table may be padded); None: all may be.

    Returns:
      The new ids of each prompt; a stop id is the last of them.

    Raises:
      ValueError: an empty prompt, an id that is not in the vocabulary, or nothing to add.
    """
    vocabulary = cfg.vocab_size if vocabulary is None else min(vocabulary, cfg.vocab_size)
    _check(prompts, max_new_tokens, stop_ids, cfg.vocab_size)
    mesh = jax.sharding.get_mesh()
    ways = batch_devices(mesh)
    rows = -(-min(batch, len(prompts)) // ways) * ways
    length = max([SHORTEST, *(1 << (len(prompt) - 1).bit_length() for prompt in prompts)])
    stops_V = np.isin(np.arange(cfg.vocab_size), list(stop_ids))
    place = functools.partial(_place, mesh=mesh)
    done: list[list[int]] = []
    for start in range(0, len(prompts), rows):
        chunk = prompts[start : start + rows]
        tokens_BT, lengths_B = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
        for b, prompt in enumerate(chunk):
            tokens_BT[b, : len(prompt)], lengths_B[b] = prompt, len(prompt)
        rows_B = np.arange(start, start + rows, dtype=np.int32)
        new_BN = np.asarray(_complete(
            params, place(tokens_BT, "batch", None), place(lengths_B, "batch"), place(rows_B, "batch"),
            place(stops_V, None), np.uint32(seed), cfg, max_new_tokens, sampling or Sampling(), dtype, vocabulary))
        done += [_until_stop(new_BN[b], stops_V) for b in range(len(chunk))]
    return done


def _place(array: np.ndarray, *dims: str | None, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding(mesh, *dims), lambda index: array[index])


def _check(prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Collection[int], vocab_size: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} adds nothing; give 1 or more")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; give at least one token, such as the end of a document")
        if wrong := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(f"prompt {i} has the id {wrong[0]}, but the model's vocabulary ends at {vocab_size - 1}; "
                             "encode it with the tokenizer of this model")
    if wrong := [token for token in stop_ids if not 0 <= token < vocab_size]:
        raise ValueError(f"the stop id {wrong[0]} is not in the model's vocabulary, which ends at {vocab_size - 1}")


def _until_stop(new_N: np.ndarray, stops_V: np.ndarray) -> list[int]:
    ends = np.flatnonzero(stops_V[new_N])
    return new_N[: ends[0] + 1 if len(ends) else len(new_N)].tolist()


@functools.partial(jax.jit, static_argnames=("cfg", "tokens", "sampling", "dtype", "vocabulary"))
def _complete(params: Decoder, tokens_BT: jax.Array, lengths_B: jax.Array, rows_B: jax.Array, stops_V: jax.Array,
              seed: jax.Array, cfg: ModelConfig, tokens: int, sampling: Sampling, dtype: str,
              vocabulary: int) -> jax.Array:
    """New ids of each row, (B, N) int32 on every device; what follows a stop id means nothing."""
    p = cast_decoder(params, jnp.dtype(dtype))

    def choose(x_B1D: jax.Array, step: jax.Array) -> jax.Array:
        logits_BV = jax.sharding.reshard(head_logits(p, x_B1D)[:, 0], spec("batch", None))
        logits_BV = jnp.where(jnp.arange(cfg.vocab_size)[None] < vocabulary, logits_BV, -jnp.inf)
        run = per_device(functools.partial(sample_rows, sampling=sampling), (("batch", None), ("batch",), (), ()),
                         ("batch",))
        return run(logits_BV, rows_B, step, seed)

    def add(new_BN: jax.Array, done_B: jax.Array, x_B1D: jax.Array, step: jax.Array) -> tuple:
        token_B = choose(x_B1D, step)
        new_BN = jax.lax.dynamic_update_slice_in_dim(new_BN, token_B[:, None], step, axis=1)
        return new_BN, done_B | stops_V.at[token_B].get(out_sharding=spec("batch")), token_B

    def more(state: tuple) -> jax.Array:
        _, _, done_B, _, step = state
        return (step < tokens) & ~jnp.all(done_B)

    def go_on(state: tuple) -> tuple:
        cache, new_BN, done_B, token_B, step = state
        cache, x_B1D = decode(p, token_B, cache, cfg, jnp.dtype(dtype), ~done_B)
        return cache, *add(new_BN, done_B, x_B1D, step), step + 1

    cache, x_B1D = prefill(p, tokens_BT, lengths_B, tokens_BT.shape[1] + tokens, cfg, jnp.dtype(dtype))
    new_BN = jnp.zeros((tokens_BT.shape[0], tokens), jnp.int32, out_sharding=spec("batch", None))
    first = cache, *add(new_BN, lengths_B == 0, x_B1D, jnp.int32(0)), jnp.int32(1)
    return jax.sharding.reshard(jax.lax.while_loop(more, go_on, first)[1], spec(None, None))
