"""From a checked wire config to the frozen form: defaults of kinds filled in, derived widths worked out, `auto` turned into None."""

from __future__ import annotations

import math
from typing import Any

from llmtrain.config import schema, schema_data, schema_model
from llmtrain.config.declare import AUTO
from llmtrain.config.defaults import (
    DEFAULT_BPE_VOCAB_SIZE,
    DEFAULT_BUCKET_MIB,
    DEFAULT_FIRST_BUCKET_MIB,
    DEFAULT_GLOBAL_BATCH_SIZE,
    DEFAULT_MAX_DOCUMENT_BYTES,
    DEFAULT_STEPS,
    DEFAULT_VALIDATION_FRACTION,
)
from llmtrain.config.plugins import chosen, find, plugin_options
from llmtrain.config.typed import (
    AccumulationConfig,
    AdamWConfig,
    AttentionShapeConfig,
    CheckpointConfig,
    ChunkedLoss,
    Config,
    ConvertConfig,
    DdpConfig,
    DropoutConfig,
    EvaluateConfig,
    FeedForwardConfig,
    FeedForwardKind,
    GenerateConfig,
    LaunchConfig,
    LinearScaling,
    Llama3Scaling,
    LossConfig,
    ModelConfig,
    NormKind,
    OptimizerConfig,
    ParallelismConfig,
    PluginLoss,
    PluginOptimizer,
    PositionKind,
    RecomputeConfig,
    RecomputeKind,
    ReferenceLoss,
    RopeScaling,
    RunConfig,
    ScheduleConfig,
    ScheduleKind,
    SweepConfig,
    TrackerConfig,
    TrainConfig,
    WandbConfig,
    YarnScaling,
)
from llmtrain.config.typed_data import (
    BpeTokenizerConfig,
    ByteTokenizerConfig,
    CharTokenizerConfig,
    DataConfig,
    DataSource,
    FileTokenizerConfig,
    IdTokenizerConfig,
    OnBad,
    Packing,
    PluginData,
    PrepareConfig,
    RecordData,
    RunTokenizerConfig,
    SentencePieceTokenizerConfig,
    StdlibData,
    StoredTokenizerConfig,
    SyntheticData,
    TextData,
    TiktokenTokenizerConfig,
    TokenData,
    TokenFormat,
    TokenizerConfig,
)


def build_config(wire: schema.Config) -> Config:
    """Freeze a wire config whose values `config/rules.py` has accepted."""
    train, launch, run = wire.train, wire.launch, wire.run
    steps = DEFAULT_STEPS if train.steps is None and train.tokens is None else train.steps
    return Config(
        run=RunConfig(run.name, run.dir, run.seed, _one_of(run.on_change)),
        train=TrainConfig(**vars(train) | {"steps": steps}),
        model=_model(wire),
        init_from=wire.model.init_from,
        data=_data(wire.data),
        tokenizer=_tokenizer(wire),
        precision=wire.precision.kind,
        recompute=_recompute(wire.recompute),
        accumulation=_accumulation(wire.accumulation),
        attention_backend=wire.attention.backend,
        attention_kernel=wire.attention.kernel,
        loss=_loss(wire),
        optimizer=_optimizer(wire),
        schedule=_schedule(wire.schedule),
        parallelism=_parallelism(wire.parallelism),
        checkpoint=CheckpointConfig(**vars(wire.checkpoint)),
        tracker=_tracker(wire.tracker),
        launch=LaunchConfig(**vars(launch) | {"threads": _number(launch.threads), "env": dict(launch.env)}),
        sweep=SweepConfig(**vars(wire.sweep)),
        evaluate=EvaluateConfig(**vars(wire.evaluate)),
        generate=GenerateConfig(**vars(wire.generate)),
        prepare=PrepareConfig(wire.prepare.path, _number(wire.prepare.workers), wire.prepare.shard_bytes),
        convert=ConvertConfig(wire.convert.step, _one_of(wire.convert.dtype), wire.convert.shard_bytes),
        output=_one_of(wire.output),
        plugins={one.section: plugin_options(getattr(wire, one.plugin.group), one) for one in chosen(wire)},
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
            windows=_windows(heads),
        ),
        feed_forward=FeedForwardConfig(FeedForwardKind(inner.kind), hidden_dim, inner.bias),
        rope_theta=model.rope.theta,
        dropout=DropoutConfig(**vars(model.dropout)),
        rope_scaling=_rope_scaling(model.rope.scaling),
    )


def _windows(heads: schema_model.AttentionShape) -> tuple[int | None, ...]:
    return tuple(heads.window if letter == "S" else None for letter in heads.window_pattern or "S")


def _rope_scaling(scaling: schema_model.RopeScaling) -> RopeScaling | None:
    if scaling.kind == "none":
        return None
    assert scaling.factor is not None, "rules.rope_scaling_is_complete"
    if scaling.kind == "linear":
        return LinearScaling(scaling.factor)
    assert scaling.original_max_positions is not None, "rules.rope_scaling_is_complete"
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
        return Llama3Scaling(scaling.factor, scaling.original_max_positions, low, high)
    return YarnScaling(
        scaling.factor,
        scaling.original_max_positions,
        scaling.beta_fast or 32.0,
        scaling.beta_slow or 1.0,
        scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0,
    )


def _data(data: schema_data.Data) -> DataConfig:
    bos = None if isinstance(data.bos, str) else data.bos
    return DataConfig(_source(data), data.sequence_length, Packing(data.packing), bos, data.eos)


def _source(data: schema_data.Data) -> DataSource:
    fraction = data.validation_fraction or DEFAULT_VALIDATION_FRACTION
    if (plugin := find("data", data.kind)) is not None:
        return PluginData(data.kind, fraction, data.cache_dir, plugin_options(data, plugin))
    if data.kind == "synthetic":
        return SyntheticData()
    if data.kind == "stdlib":
        return StdlibData(fraction, data.cache_dir)
    assert data.path is not None, "rules.files_need_a_path"
    if data.kind == "text":
        return TextData(data.path, data.validation_path, fraction, data.cache_dir)
    if data.kind == "tokens":
        layout = TokenFormat(data.format or AUTO)
        return TokenData(data.path, data.validation_path, data.validation_fraction, layout, data.dtype)
    return RecordData(
        kind=_one_of(data.kind),
        path=data.path,
        validation_path=data.validation_path,
        validation_fraction=fraction,
        cache_dir=data.cache_dir,
        text_field=data.text_field or "text",
        on_bad=OnBad(data.on_bad or "error"),
        max_document_bytes=data.max_document_bytes or DEFAULT_MAX_DOCUMENT_BYTES,
    )


def _tokenizer(wire: schema.Config) -> TokenizerConfig:
    tokenizer, kind = wire.tokenizer, wire.tokenizer.kind
    if kind == AUTO and wire.model.init_from is not None:
        return RunTokenizerConfig(wire.model.init_from)
    if kind == AUTO:
        return StoredTokenizerConfig() if wire.data.kind == "tokens" else ByteTokenizerConfig()
    if kind == "bpe":
        return BpeTokenizerConfig(tokenizer.vocab_size or DEFAULT_BPE_VOCAB_SIZE)
    if kind == "ids":
        return IdTokenizerConfig(tokenizer.eos_id)
    if kind in ("byte", "char"):
        return ByteTokenizerConfig() if kind == "byte" else CharTokenizerConfig()
    assert tokenizer.path is not None, "rules.tokenizer_files_need_a_path"
    if kind == "file":
        return FileTokenizerConfig(tokenizer.path, tokenizer.bos_token, tokenizer.eos_token)
    if kind == "tiktoken":
        return TiktokenTokenizerConfig(tokenizer.path, tokenizer.pattern)
    return SentencePieceTokenizerConfig(tokenizer.path)


def _tracker(tracker: schema.Tracker) -> TrackerConfig:
    wandb = tracker.wandb
    settings = WandbConfig(_one_of(wandb.mode), wandb.project, wandb.entity, wandb.group, tuple(wandb.tags))
    return TrackerConfig(settings if wandb.enabled else None, tracker.tensorboard.enabled)


def _recompute(recompute: schema.Recompute) -> RecomputeConfig:
    kind = RecomputeKind(recompute.kind)
    if kind is not RecomputeKind.SELECTIVE:
        return RecomputeConfig(kind, ())
    if recompute.keep is None:
        return RecomputeConfig(kind, ("attention", "matmul"), keep_is_default=True)
    return RecomputeConfig(kind, tuple(recompute.keep))


def _accumulation(accumulation: schema.Accumulation) -> AccumulationConfig:
    sequences, tokens = accumulation.global_batch_size, accumulation.global_batch_tokens
    if sequences is None and tokens is None:
        sequences = DEFAULT_GLOBAL_BATCH_SIZE
    return AccumulationConfig(sequences, tokens, _number(accumulation.micro_batch_size))


def _parallelism(layout: schema.Parallelism) -> ParallelismConfig:
    bucket = DEFAULT_BUCKET_MIB if layout.bucket_mib is None else layout.bucket_mib
    first = min(DEFAULT_FIRST_BUCKET_MIB, bucket) if layout.first_bucket_mib is None else layout.first_bucket_mib
    ddp = DdpConfig(
        bucket_mib=bucket,
        first_bucket_mib=first,
        gradient_as_bucket_view=layout.gradient_as_bucket_view is not False,
        static_graph=layout.static_graph is True,
        compression=_one_of(layout.compression or "none"),
    )
    degrees = (_number(layout.dp_replicate), _number(layout.dp_shard), layout.cp, layout.tp, layout.pp)
    return ParallelismConfig(layout.kind, *degrees, ddp=ddp)


def _loss(wire: schema.Config) -> LossConfig:
    plugin = find("loss", wire.loss.kind)
    if plugin is not None:
        return PluginLoss(wire.loss.kind, plugin_options(wire.loss, plugin))
    return ChunkedLoss(wire.loss.chunk_size or 1024) if wire.loss.kind == "chunked" else ReferenceLoss()


def _optimizer(wire: schema.Config) -> OptimizerConfig:
    own, plugin = wire.optimizer, find("optimizer", wire.optimizer.kind)
    if plugin is not None:
        return PluginOptimizer(own.kind, own.lr, own.weight_decay, own.clip_norm, plugin_options(own, plugin))
    return AdamWConfig(own.lr, own.weight_decay, own.clip_norm, own.beta1, own.beta2, own.eps)


def _schedule(schedule: schema.Schedule) -> ScheduleConfig:
    kind = ScheduleKind(schedule.kind)
    if kind is ScheduleKind.CONSTANT:
        ratio = 1.0
    else:
        ratio = 0.1 if schedule.min_lr_ratio is None else schedule.min_lr_ratio
    return ScheduleConfig(kind, _number(schedule.warmup_steps), ratio, schedule.decay_steps)
