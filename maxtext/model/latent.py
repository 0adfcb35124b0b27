"""Multi-head latent attention: keys and values of all heads are read from one compressed vector a token.

Each head's query and key have a part without positions, of width N, and a rotary part, of width R; the key of the
rotary part is one for all heads. Source: DeepSeek-V2 (2024), section 2.1.

Dims: B batch, T position, D model width, Q width of compressed queries, C of compressed keys and values, K head,
H = N + R width of a query, W width of a value.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.config.schema import DEFAULT_EXECUTION, Execution, ModelConfig, QuantConfig
from maxtext.model.attention import attend
from maxtext.model.layers import Rope, apply_rope, gathered_linear, norm_param, rms_norm
from maxtext.parallel.positions import positions_dim, unshare
from maxtext.parallel.sharding import Param, gather, spec
from maxtext.parallel.show import tree_text


@flax.struct.dataclass
class LatentAttention:
    q_up: jax.Array  # Q K H, or D K H when queries are not compressed
    kv_down: jax.Array  # D C+R
    kv_norm: jax.Array  # C
    kv_up: jax.Array  # C K N+W
    out: jax.Array  # K W D
    q_down: jax.Array | None = None  # D Q
    q_norm: jax.Array | None = None  # Q

    __repr__ = tree_text


def latent_params(cfg: ModelConfig) -> LatentAttention:
    latent, heads = cfg.latent, cfg.n_heads
    assert latent.kv_rank is not None
    return LatentAttention(
        q_down=None if latent.q_rank is None else Param((cfg.d_model, latent.q_rank), ("embed", None)),
        q_norm=None if latent.q_rank is None else norm_param(cfg, (latent.q_rank,), (None,)),
        q_up=Param((latent.q_rank or cfg.d_model, heads, cfg.head_width), ("embed", "heads", None)),
        kv_down=Param((cfg.d_model, latent.kv_rank + latent.rope_dim), ("embed", None)),
        kv_norm=norm_param(cfg, (latent.kv_rank,), (None,)),
        kv_up=Param((latent.kv_rank, heads, latent.nope_dim + latent.value_dim), ("embed", "heads", None)),
        out=Param((heads, latent.value_dim, cfg.d_model), ("heads", None, "embed")),
    )


def latent_attention(p: LatentAttention, x_BTD: jax.Array, segments_BT: jax.Array | None, rope: Rope,
                     window: int | None, cfg: ModelConfig, how: Execution = DEFAULT_EXECUTION) -> jax.Array:
    """Self-attention of (B, T, D) in its own dtype; `window` tokens are visible, or all earlier ones when None."""
    whole_BTD, quant = unshare(x_BTD), how.quant.of("dense")
    q_BTKH = latent_queries(p, whole_BTD, rope, cfg, quant)
    k_BTKH, v_BTKW = expand(p, *compress(p, whole_BTD, rope, cfg, quant), cfg, quant)
    attended_BTK1W = attend(q_BTKH[:, :, :, None], k_BTKH, v_BTKW, segments_BT, None, window, cfg, how)
    return latent_out(p, attended_BTK1W[:, :, :, 0], positions_dim(x_BTD), quant)


def latent_queries(p: LatentAttention, x_BTD: jax.Array, rope: Rope, cfg: ModelConfig,
                   quant: QuantConfig | None = None) -> jax.Array:
    """Queries (B, T, K, N + R), the rotary part rotated."""
    if p.q_down is not None and p.q_norm is not None:
        x_BTD = rms_norm(gathered_linear(x_BTD, p.q_down, ("embed", None), quant), p.q_norm, cfg)
    q_BTKH = checkpoint_name(gathered_linear(x_BTD, p.q_up, ("embed", "heads", None), quant), "qkv")
    plain, rotary = jnp.split(q_BTKH, [cfg.latent.nope_dim], axis=-1)
    return jnp.concatenate([plain, apply_rope(rotary, rope, cfg.rope_pairs)], axis=-1)


def compress(p: LatentAttention, x_BTD: jax.Array, rope: Rope, cfg: ModelConfig,
             quant: QuantConfig | None = None) -> tuple[jax.Array, jax.Array]:
    """What a cache keeps of each token: the normed compressed vector (B, T, C) and the rotated shared key (B, T, R)."""
    down_BTC = checkpoint_name(gathered_linear(x_BTD, p.kv_down, ("embed", None), quant), "qkv")
    c_BTC, r_BTR = jnp.split(down_BTC, [p.kv_norm.shape[0]], axis=-1)
    return rms_norm(c_BTC, p.kv_norm, cfg), apply_rope(r_BTR, rope, cfg.rope_pairs)


def expand(p: LatentAttention, c_BTC: jax.Array, r_BTR: jax.Array, cfg: ModelConfig,
           quant: QuantConfig | None = None) -> tuple[jax.Array, jax.Array]:
    """Keys (B, T, K, N + R) and values (B, T, K, W) of all heads."""
    up_BTKJ = gathered_linear(c_BTC, p.kv_up, ("embed", "heads", None), quant)
    k_BTKN, v_BTKW = jnp.split(up_BTKJ, [cfg.latent.nope_dim], axis=-1)
    shape = (*k_BTKN.shape[:-1], r_BTR.shape[-1])
    r_BTKR = jnp.broadcast_to(r_BTR[:, :, None], shape, out_sharding=spec("batch", positions_dim(r_BTR), "heads", None))
    return jnp.concatenate([k_BTKN, r_BTKR], axis=-1), v_BTKW


def absorbed_queries(p: LatentAttention, q_BTKH: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Queries whose products with (compressed vector, rotary key) are those with the keys, (B, T, K, C + R).

    With them a cache is read as it stands: its keys are never made (DeepSeek-V2, 2024, section 2.1.2).
    """
    plain_BTKN, rotary_BTKR = jnp.split(q_BTKH, [cfg.latent.nope_dim], axis=-1)
    up_CKN = gather(p.kv_up, "embed", "heads", None)[..., : cfg.latent.nope_dim]
    return jnp.concatenate([jnp.einsum("btkn,ckn->btkc", plain_BTKN, up_CKN), rotary_BTKR], axis=-1)


def absorbed_values(p: LatentAttention, read_BTKC: jax.Array, cfg: ModelConfig) -> jax.Array:
    """What each head reads of the values, (B, T, K, W), from what it read of the compressed vectors."""
    up_CKW = gather(p.kv_up, "embed", "heads", None)[..., cfg.latent.nope_dim :]
    return jnp.einsum("btkc,ckw->btkw", read_BTKC, up_CKW)


def latent_out(p: LatentAttention, attended_BTKW: jax.Array, positions: str | None = None,
               quant: QuantConfig | None = None) -> jax.Array:
    """What attention adds to the residual stream, (B, T, D), its T split over the mesh as `positions` says."""
    out_BTD = gathered_linear(attended_BTKW, p.out, ("heads", None, "embed"), quant, 2, spec("batch", positions, None))
    return checkpoint_name(out_BTD, "attention_out")
