"""The model section of the configuration: a small vocabulary of choices that describes every decoder.

Like the rest of the schema it is frozen dataclasses, without jax and numpy.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from maxtext.config.field import field

NormPlacement = Literal["post", "pre", "both"]
NormGain = Literal["weight", "one_plus_weight"]
QkNorm = Literal["projection", "head", "none"]
AttentionBias = Literal["none", "qkv", "all"]
Activation = Literal["silu", "gelu_tanh", "clamped_swish"]
RopeScalingKind = Literal["none", "linear", "llama3", "yarn"]
RopePairs = Literal["halves", "neighbours"]
RouterScores = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2_sum"]
LoadStatistics = Literal["micro_batch", "batch", "sequence"]
LayerKind = Literal["window", "full"]


@dataclasses.dataclass(frozen=True)
class RopeScalingConfig:
    """Stretching of rotary frequencies to longer contexts."""

    kind: RopeScalingKind = field("none, linear (all divided by factor), llama3 or yarn (Peng et al. 2023).", "none",
                                  also=("rope_type",))
    factor: float = field("New context length over the old.", 8.0, minimum=1)
    original_length: int = field("Context length of the model before, in tokens.", 8192,
                                 also=("old_context_len", "original_max_position_embeddings"), minimum=1)
    beta_fast: float = field("Rotations over the old context above which a frequency is left alone; llama3 calls it "
                             "high_freq_factor.", 32.0, also=("high_freq_factor",), above=0)
    beta_slow: float = field("Rotations over the old context below which a frequency is divided by factor; llama3 "
                             "calls it low_freq_factor.", 1.0, also=("low_freq_factor",), above=0)
    mscale: float = field("yarn: slope of the rotary tables' own factor, 0.1 mscale ln(factor) + 1.", 1.0, minimum=0)
    mscale_all_dim: float = field("yarn: slope of a factor on the attention scores, taken out of the tables' factor; "
                                  "0: none.", 0.0, minimum=0)
    truncate: bool = field("yarn: whether the borders of the mixed range are rounded outwards to whole indices.", True)
    window_layers: bool = field("Whether window layers are stretched too.", False)


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are read from one compressed vector a token."""

    kv_rank: int | None = field("Width of the compressed keys and values; null: ordinary attention.", None,
                                also=("kv_lora_rank",), minimum=1)
    q_rank: int | None = field("Width of the compressed queries; null: queries are not compressed.", None,
                               also=("q_lora_rank",), minimum=1)
    nope_dim: int = field("Width of a head's part without positions.", 128, also=("qk_nope_head_dim",), minimum=1)
    rope_dim: int = field("Width of the rotary part; its key is shared by all heads.", 64, also=("qk_rope_head_dim",),
                          minimum=2)
    value_dim: int = field("Width of a head's value.", 128, also=("v_head_dim",), minimum=1)


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: which layers are routed, and how a token finds its experts."""

    experts: int = field("Routed experts of a layer; 0: every layer is dense.", 0,
                         also=("num_experts", "n_routed_experts", "num_local_experts"), minimum=0)
    top_k: int = field("Experts that a token uses.", 2, also=("num_experts_per_tok", "experts_per_token"), minimum=1)
    d_expert: int | None = field("Hidden width of one expert.", None, also=("moe_intermediate_size", "moe_mlp_dim"),
                                 minimum=1)
    shared_experts: int = field("Experts that every token uses; together one feed-forward of this many times "
                                "d_expert.", 0, also=("n_shared_experts",), minimum=0)
    dense_layers: int = field("First layers that are dense, of width model.d_ff.", 0,
                              also=("first_k_dense_replace", "first_num_dense_layers"), minimum=0)
    scores: RouterScores = field("What makes a score of a router logit: softmax over all experts, or sigmoid.",
                                 "softmax", also=("scoring_func",))
    renormalise: bool = field("Whether the scores of a token's experts are divided by their sum.", False,
                              also=("norm_topk_prob", "normalize_expert_weights"))
    scale: float = field("Multiplier of the weights of routed experts.", 1.0, also=("routed_scaling_factor",), above=0)
    groups: int = field("Groups of experts, of which a token may use group_top_k.", 1, also=("n_group",), minimum=1)
    group_top_k: int = field("Groups that a token may use.", 1, also=("topk_group",), minimum=1)
    group_score: GroupScore = field("What ranks the groups: their best score, or the sum of their best two.",
                                    "top2_sum")
    router_bias: bool = field("Whether the router has a learned bias.", False)
    expert_bias: bool = field("Whether the experts have biases.", False)
    selection_bias: bool = field("Whether a bias that is not learned by gradient takes part in the choice of experts, "
                                 "but not in their weights.", False, also=("e_score_correction_bias",))
    bias_update_rate: float = field("How far an update moves the selection bias of each expert towards an even load.",
                                    0.0, also=("routed_bias_update_rate",), minimum=0)
    load_balance_loss: float = field("Multiplier of the load-balance loss.", 0.0,
                                     also=("router_aux_loss_coef", "lb_loss_weight", "load_balance_loss_weight"),
                                     minimum=0)
    load_statistics: LoadStatistics = field(
        "Tokens over which the load-balance loss counts: a micro_batch over all devices; the batch, so far as its "
        "micro-batches have been seen; or each sequence.", "micro_batch", also=("lb_loss_granularity",))
    z_loss: float = field("Multiplier of the squared log-partition of the router.", 0.0,
                          also=("z_loss_weight", "router_z_loss_coef"), minimum=0)
    capacity_factor: float | None = field(
        "Most tokens that an expert takes, over an even share; further ones are dropped. null: none is ever dropped.",
        None, above=0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture. A decoder is described by these choices alone; code never looks at a model's name."""

    vocab_size: int = field("Rows of the embedding and of the LM head; at least the tokenizer's vocabulary.", minimum=1)
    d_model: int = field("Width of the residual stream.", also=("hidden_size", "embed_dim", "emb_dim"), minimum=1)
    n_layers: int = field("Number of blocks.", also=("num_hidden_layers", "num_decoder_layers", "num_layers"),
                          minimum=1)
    n_heads: int = field("Number of query heads.", also=("num_attention_heads", "num_query_heads"), minimum=1)
    d_ff: int | None = field("Hidden width of the gated feed-forward of dense layers; null when there is none.", None,
                             also=("intermediate_size", "mlp_dim", "hidden_dim"), minimum=1)
    n_kv_heads: int | None = field("Number of key/value heads; null means n_heads (no grouping).", None,
                                   also=("num_key_value_heads", "num_kv_heads"), minimum=1)
    head_dim: int | None = field("Width of one head; null means d_model / n_heads.", None, minimum=2)
    layer_pattern: tuple[LayerKind, ...] = field(
        "Kinds of attention, repeated from layer 0: window (sliding) or full.", ("full",), also=("layer_types",))
    last_layer_full: bool = field("Whether the last layer is full whatever the pattern says.", True)
    window: int | None = field("Tokens that a window layer sees, itself included.", None, also=("sliding_window",),
                               minimum=1)
    norm_placement: NormPlacement = field(
        "Where the block norms stand: post = on the output of each branch, inside the residual (OLMo 2 and 3); pre = "
        "on its input (Llama); both (Gemma 3).", "post")
    norm_gain: NormGain = field("What a norm multiplies by: its weight (drawn as 1), or 1 plus its weight (drawn as "
                                "0).", "weight")
    norm_eps: float = field("Epsilon of every RMSNorm.", 1e-6, also=("rms_norm_eps",), above=0)
    qk_norm: QkNorm = field("QK-norm: projection = one RMS statistic over all heads, before the head split; head = one "
                            "for each head, with one gain for all; or none.", "projection")
    attention_bias: AttentionBias = field("Which projections of attention have a bias: none, qkv, or all.", "none")
    attention_sinks: bool = field("Whether each head has a learned score that takes weight and gives nothing.", False)
    attention_scale: float | None = field("Multiplier of the attention scores; null: 1 / sqrt(head width).", None,
                                          above=0)
    latent: LatentConfig = field("Multi-head latent attention.", LatentConfig)
    activation: Activation = field("Of the gate of the feed-forward: silu (SwiGLU), gelu_tanh (GeGLU), or "
                                   "clamped_swish, which clips at 7 and adds 1 to the other half (gpt-oss).", "silu",
                                   also=("hidden_act", "hidden_activation"))
    moe: MoeConfig = field("Mixture of experts.", MoeConfig)
    tie_embeddings: bool = field("Whether the LM head is the embedding table.", False, also=("tie_word_embeddings",))
    scale_embeddings: bool = field("Whether embeddings are multiplied by sqrt(d_model) on their way in.", False)
    rope_theta: float = field("Base of the rotary position embedding.", 500000.0, above=0)
    window_rope_theta: float | None = field("Base in window layers; null: rope_theta.", None,
                                            also=("rope_local_base_freq",), above=0)
    rope_pairs: RopePairs = field("Which dimensions turn together: those of the two halves, or neighbours.", "halves",
                                  also=("rope_interleave",))
    rope_scaling: RopeScalingConfig = field("Stretching to long contexts.", RopeScalingConfig)
    init_std: float = field("Standard deviation of the normal that is cut at 3 of them to draw initial weights.", 0.02,
                            above=0)

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """Width of a query and of a key."""
        if self.latent.kv_rank is not None:
            return self.latent.nope_dim + self.latent.rope_dim
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        return self.head_width if self.latent.kv_rank is None else self.latent.value_dim

    @property
    def rope_width(self) -> int:
        """Width of the part of a head that turns with the position."""
        return self.head_width if self.latent.kv_rank is None else self.latent.rope_dim

    @property
    def routed_layers(self) -> tuple[bool, ...]:
        """Per layer: whether its feed-forward is a mixture of experts."""
        return tuple(self.moe.experts > 0 and i >= self.moe.dense_layers for i in range(self.n_layers))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Per layer: the window in tokens, or None for full attention."""
        kinds = [self.layer_pattern[i % len(self.layer_pattern)] for i in range(self.n_layers)]
        if self.last_layer_full:
            kinds[-1] = "full"
        return tuple(self.window if kind == "window" else None for kind in kinds)
