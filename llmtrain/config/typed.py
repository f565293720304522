"""The frozen form of a run config: what every other part of the program reads.

Built once by `build_config` from a checked wire config. Where the fields of a section differ by kind there is one class per kind, so
a reader never meets a field that does not apply. `None` stands for `auto` where a plan settles the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from llmtrain.config import schema
from llmtrain.config.defaults import (
    DEFAULT_BPE_VOCAB_SIZE,
    DEFAULT_GLOBAL_BATCH_SIZE,
    DEFAULT_STEPS,
    DEFAULT_VALIDATION_FRACTION,
)


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


class PositionKind(StrEnum):
    ROTARY = "rotary"
    LEARNED = "learned"


class FeedForwardKind(StrEnum):
    SWIGLU = "swiglu"
    GELU = "gelu"


class Packing(StrEnum):
    CONCAT = "concat"
    DOCUMENT = "document"
    PADDED = "padded"


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


@dataclass(frozen=True)
class StdlibData:
    validation_fraction: float
    cache_dir: str | None


@dataclass(frozen=True)
class TextData:
    path: str
    validation_fraction: float
    cache_dir: str | None


@dataclass(frozen=True)
class SyntheticData:
    """Random tokens; a pure function of the seed and the sample index, nothing on disk."""


DataSource = StdlibData | TextData | SyntheticData


@dataclass(frozen=True)
class DataConfig:
    source: DataSource
    sequence_length: int
    packing: Packing
    bos: bool
    eos: bool


@dataclass(frozen=True)
class ByteTokenizerConfig:
    kind: Literal["byte"] = "byte"


@dataclass(frozen=True)
class CharTokenizerConfig:
    kind: Literal["char"] = "char"


@dataclass(frozen=True)
class BpeTokenizerConfig:
    vocab_size: int
    kind: Literal["bpe"] = "bpe"


TokenizerConfig = ByteTokenizerConfig | CharTokenizerConfig | BpeTokenizerConfig


@dataclass(frozen=True)
class RecomputeConfig:
    kind: RecomputeKind
    keep: tuple[str, ...]
    """Families of operations whose results are kept; empty unless `kind` is selective."""


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


LossConfig = ReferenceLoss | ChunkedLoss


@dataclass(frozen=True)
class AdamWConfig:
    lr: float
    weight_decay: float
    clip_norm: float | None
    beta1: float
    beta2: float
    eps: float
    kind: Literal["adamw"] = "adamw"


OptimizerConfig = AdamWConfig


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
class ParallelismConfig:
    kind: str
    dp_replicate: int | None
    dp_shard: int | None
    cp: int
    tp: int
    pp: int


@dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int


@dataclass(frozen=True)
class LaunchConfig:
    nproc: int | None
    device: str
    threads: int | None


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
    data: DataConfig
    tokenizer: TokenizerConfig
    precision: str
    recompute: RecomputeConfig
    accumulation: AccumulationConfig
    attention_backend: str
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallelism: ParallelismConfig
    checkpoint: CheckpointConfig
    launch: LaunchConfig
    evaluate: EvaluateConfig
    generate: GenerateConfig
    output: Literal["table", "json"]


def build_config(wire: schema.Config) -> Config:
    """Freeze a wire config whose values `config/rules.py` has accepted."""
    train, launch, run, layout = wire.train, wire.launch, wire.run, wire.parallelism
    steps = DEFAULT_STEPS if train.steps is None and train.tokens is None else train.steps
    return Config(
        run=RunConfig(run.name, run.dir, run.seed, _one_of(run.on_change)),
        train=TrainConfig(**vars(train) | {"steps": steps}),
        model=_model(wire),
        data=_data(wire.data),
        tokenizer=_tokenizer(wire.tokenizer),
        precision=wire.precision.kind,
        recompute=_recompute(wire.recompute),
        accumulation=_accumulation(wire.accumulation),
        attention_backend=wire.attention.backend,
        loss=ChunkedLoss(wire.loss.chunk_size or 1024) if wire.loss.kind == "chunked" else ReferenceLoss(),
        optimizer=AdamWConfig(**vars(wire.optimizer)),
        schedule=_schedule(wire.schedule),
        parallelism=ParallelismConfig(
            layout.kind, _number(layout.dp_replicate), _number(layout.dp_shard), layout.cp, layout.tp, layout.pp
        ),
        checkpoint=CheckpointConfig(**vars(wire.checkpoint)),
        launch=LaunchConfig(launch.nproc, launch.device, _number(launch.threads)),
        evaluate=EvaluateConfig(**vars(wire.evaluate)),
        generate=GenerateConfig(**vars(wire.generate)),
        output=_one_of(wire.output),
    )


def _number(value: int | str) -> int | None:
    """A number, or None for `auto`."""
    return None if isinstance(value, str) else value


def _one_of(word: str) -> Any:
    """A word as the `Literal` of its field: the schema has already checked it against the choices of its key."""
    return word


def _model(wire: schema.Config) -> ModelConfig:
    model, heads, inner = wire.model, wire.model.attention, wire.model.feed_forward
    if inner.hidden_dim is not None:
        hidden_dim = inner.hidden_dim
    elif inner.kind == FeedForwardKind.SWIGLU:
        hidden_dim = -(-8 * model.dim // 3 // 32) * 32
    else:
        hidden_dim = 4 * model.dim
    return ModelConfig(
        dim=model.dim,
        num_layers=model.num_layers,
        vocab_size=_number(model.vocab_size),
        max_positions=_number(model.max_positions) or wire.data.sequence_length,
        position=PositionKind(model.position),
        norm=NormKind(model.norm),
        norm_eps=model.norm_eps,
        tie_embeddings=model.tie_embeddings,
        init_std=model.init_std,
        depth_scaled_init=model.depth_scaled_init,
        attention=AttentionShapeConfig(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads or heads.num_heads,
            head_dim=heads.head_dim or model.dim // heads.num_heads,
            qk_norm=heads.qk_norm,
            bias=heads.bias,
            output_bias=heads.output_bias,
        ),
        feed_forward=FeedForwardConfig(FeedForwardKind(inner.kind), hidden_dim, inner.bias),
        rope_theta=model.rope.theta,
        dropout=DropoutConfig(**vars(model.dropout)),
    )


def _data(data: schema.Data) -> DataConfig:
    fraction = data.validation_fraction or DEFAULT_VALIDATION_FRACTION
    source: DataSource
    if data.kind == "text":
        assert data.path is not None
        source = TextData(data.path, fraction, data.cache_dir)
    elif data.kind == "stdlib":
        source = StdlibData(fraction, data.cache_dir)
    else:
        source = SyntheticData()
    return DataConfig(source, data.sequence_length, Packing(data.packing), data.bos, data.eos)


def _tokenizer(tokenizer: schema.Tokenizer) -> TokenizerConfig:
    if tokenizer.kind == "bpe":
        return BpeTokenizerConfig(tokenizer.vocab_size or DEFAULT_BPE_VOCAB_SIZE)
    return ByteTokenizerConfig() if tokenizer.kind == "byte" else CharTokenizerConfig()


def _recompute(recompute: schema.Recompute) -> RecomputeConfig:
    kind = RecomputeKind(recompute.kind)
    keep = tuple(("attention", "matmul") if recompute.keep is None else recompute.keep)
    return RecomputeConfig(kind, keep if kind is RecomputeKind.SELECTIVE else ())


def _accumulation(accumulation: schema.Accumulation) -> AccumulationConfig:
    sequences, tokens = accumulation.global_batch_size, accumulation.global_batch_tokens
    if sequences is None and tokens is None:
        sequences = DEFAULT_GLOBAL_BATCH_SIZE
    return AccumulationConfig(sequences, tokens, _number(accumulation.micro_batch_size))


def _schedule(schedule: schema.Schedule) -> ScheduleConfig:
    kind = ScheduleKind(schedule.kind)
    if kind is ScheduleKind.CONSTANT:
        ratio = 1.0
    else:
        ratio = 0.1 if schedule.min_lr_ratio is None else schedule.min_lr_ratio
    return ScheduleConfig(kind, _number(schedule.warmup_steps), ratio, schedule.decay_steps)
