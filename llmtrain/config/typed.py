"""The frozen form of a run config: what every other part of the program reads.

Built once by `freeze.build_config` from a checked wire config. Where the fields of a section differ by kind there is one class per kind, so
a reader never meets a field that does not apply. `None` stands for `auto` where a plan settles the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from llmtrain.config.typed_data import DataConfig, PrepareConfig, TokenizerConfig


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


class PositionKind(StrEnum):
    ROTARY = "rotary"
    LEARNED = "learned"


class FeedForwardKind(StrEnum):
    SWIGLU = "swiglu"
    GELU = "gelu"


class ScheduleKind(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


class RecomputeKind(StrEnum):
    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


@dataclass(frozen=True)
class RunConfig:
    name: str | None
    dir: str
    seed: int
    on_change: Literal["refuse", "continue"]


@dataclass(frozen=True)
class TrainConfig:
    steps: int | None
    """Updates to make; None when `tokens` is the horizon."""
    tokens: int | None
    stop_after: int | None
    eval_every: int
    eval_tokens: int | None
    log_every: int
    deterministic: bool
    gc_every: int
    max_consecutive_skips: int


@dataclass(frozen=True)
class AttentionShapeConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    bias: bool
    output_bias: bool
    windows: tuple[int | None, ...] = (None,)
    """Keys a query sees, its own included, repeated over the layers; None = all before it."""

    def window(self, layer: int) -> int | None:
        """That of one layer."""
        return self.windows[layer % len(self.windows)]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    original_max_positions: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): divided, kept or between by turns over the original length; queries and keys scaled too."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class FeedForwardConfig:
    kind: FeedForwardKind
    hidden_dim: int
    bias: bool


@dataclass(frozen=True)
class DropoutConfig:
    embedding: float
    attention: float
    residual: float
    feed_forward: float


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Transformer, with every derived width filled in."""

    dim: int
    num_layers: int
    vocab_size: int | None
    """None = the tokenizer's; a Plan holds the settled model (`Plan.model`) in which it is a number."""
    max_positions: int
    """Longest text it is made for; rows of a learned position table."""
    position: PositionKind
    norm: NormKind
    norm_eps: float
    tie_embeddings: bool
    init_std: float
    depth_scaled_init: bool
    attention: AttentionShapeConfig
    feed_forward: FeedForwardConfig
    rope_theta: float
    dropout: DropoutConfig
    rope_scaling: RopeScaling | None = None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Window of every layer."""
        return tuple(self.attention.window(layer) for layer in range(self.num_layers))


@dataclass(frozen=True)
class RecomputeConfig:
    kind: RecomputeKind
    keep: tuple[str, ...]
    """Families of operations whose results are kept; empty unless `kind` is selective."""
    keep_is_default: bool = False
    """Whether nobody asked for these; then the plan leaves out what the attention backend cannot keep."""


@dataclass(frozen=True)
class AccumulationConfig:
    global_batch_size: int | None
    global_batch_tokens: int | None
    micro_batch_size: int | None


@dataclass(frozen=True)
class ReferenceLoss:
    kind: Literal["reference"] = "reference"


@dataclass(frozen=True)
class ChunkedLoss:
    chunk_size: int
    kind: Literal["chunked"] = "chunked"


@dataclass(frozen=True)
class PluginLoss:
    """A loss that an installed plugin provides."""

    kind: str
    options: Any


LossConfig = ReferenceLoss | ChunkedLoss | PluginLoss


@dataclass(frozen=True)
class AdamWConfig:
    lr: float
    weight_decay: float
    clip_norm: float | None
    beta1: float
    beta2: float
    eps: float
    kind: Literal["adamw"] = "adamw"


@dataclass(frozen=True)
class PluginOptimizer:
    """An update rule that an installed plugin provides."""

    kind: str
    lr: float
    weight_decay: float
    clip_norm: float | None
    options: Any


OptimizerConfig = AdamWConfig | PluginOptimizer


@dataclass(frozen=True)
class ScheduleConfig:
    kind: ScheduleKind
    warmup_steps: int | None
    """None = `defaults.auto_warmup_steps`."""
    min_lr_ratio: float
    """1.0 for a constant schedule."""
    decay_steps: int | None
    """Only read by wsd; None = `defaults.auto_decay_steps`."""


@dataclass(frozen=True)
class DdpConfig:
    """How gradients of whole copies are summed over ranks."""

    bucket_mib: float
    first_bucket_mib: float
    gradient_as_bucket_view: bool
    static_graph: bool
    compression: Literal["none", "bf16"]


@dataclass(frozen=True)
class ParallelismConfig:
    kind: str
    dp_replicate: int | None
    dp_shard: int | None
    cp: int
    tp: int
    pp: int
    ddp: DdpConfig


@dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int


@dataclass(frozen=True)
class LaunchConfig:
    nproc: int | None
    device: str
    threads: int | None
    timeout_seconds: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepConfig:
    jobs: int
    only: int | None


@dataclass(frozen=True)
class WandbConfig:
    mode: Literal["offline", "online"]
    project: str
    entity: str | None
    group: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True)
class TrackerConfig:
    wandb: WandbConfig | None
    """None = not used."""
    tensorboard: bool


@dataclass(frozen=True)
class ConvertConfig:
    step: int | None
    dtype: Literal["fp32", "bf16", "fp16"]
    shard_bytes: int


@dataclass(frozen=True)
class EvaluateConfig:
    step: int | None
    batch_size: int
    tokens: int | None


@dataclass(frozen=True)
class GenerateConfig:
    step: int | None
    prompt: str
    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


@dataclass(frozen=True)
class Config:
    """A whole run, checked; the argument of `make_plan`."""

    run: RunConfig
    train: TrainConfig
    model: ModelConfig
    init_from: str | None
    """Run folder that gives the first weights."""
    data: DataConfig
    tokenizer: TokenizerConfig
    precision: str
    recompute: RecomputeConfig
    accumulation: AccumulationConfig
    attention_backend: str
    attention_kernel: str
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallelism: ParallelismConfig
    checkpoint: CheckpointConfig
    tracker: TrackerConfig
    launch: LaunchConfig
    sweep: SweepConfig
    evaluate: EvaluateConfig
    generate: GenerateConfig
    prepare: PrepareConfig
    convert: ConvertConfig
    output: Literal["table", "json"]
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """Options of the plugins that are used, by `group.name`, each an instance of the plugin's own dataclass."""
