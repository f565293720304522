"""What a training says before its first and after its last update."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from llmtrain.config.plugins import installed
from llmtrain.config.typed import Config, LinearScaling, Llama3Scaling, RecomputeKind, RopeScaling
from llmtrain.config.typed_data import Packing, StdlibData, SyntheticData
from llmtrain.data.corpus import Corpus
from llmtrain.data.tokenizer import IdTokenizer, Tokenizer
from llmtrain.metrics.console import Row
from llmtrain.metrics.format import format_count, format_duration, format_flops, format_lr
from llmtrain.metrics.throughput import PeakFlops
from llmtrain.model.generate import generate
from llmtrain.model.transformer import Transformer
from llmtrain.plan.attention import AUTO
from llmtrain.plan.plan import Machine, MemoryForecast, Plan
from llmtrain.plan.report import format_bytes
from llmtrain.train.state import TrainState

CATEGORIES = ("params", "grads", "optimizer", "activations", "loss", "other")
ROW_KEYS = ("launch.device", "launch.threads", "model.vocab_size", "schedule.warmup_steps", "parallelism.dp_replicate")
"""Choices whose row of the card already shows them."""
ATTENTION_KEYS = ("attention.backend", "attention.kernel")


def card_rows(config: Config, plan: Plan, machine: Machine, corpus: Corpus, peak: PeakFlops, resume: str) -> list[Row]:
    """The run card: device, model, data, batch, schedule, every choice of `auto`, the forecast, and how to resume."""
    shown = (*ROW_KEYS, *ATTENTION_KEYS)
    chosen = [f"{choice.key} {choice.value} (auto: {choice.reason})" for choice in plan.choices if choice.key not in shown]
    rows = [
        Row("device", _device(plan, machine, peak)),
        Row("model", _model(plan)),
        Row("data", f"{corpus.summary}{_borders(config)}"),
        Row("batch", _batch(plan)),
        *([Row("ranks", _ranks(config, plan, machine))] if plan.world_size > 1 else []),
        Row("schedule", _schedule(plan)),
        Row("attention", _attention(plan), cut_last=True),
        *([Row("chosen", " · ".join(chosen), cut_last=True)] if chosen else []),
        *([Row("recompute", _recompute(plan))] if plan.recompute.kind is not RecomputeKind.NONE else []),
        *([Row("plugins", _plugins(config))] if config.plugins else []),
        Row("forecast", f"peak {format_bytes(plan.forecast.total)}: {_categories(plan.forecast)}"),
        Row("resume", resume, is_command=True),
    ]
    return rows


def _plugins(config: Config) -> str:
    """Each with its package, and whose memory is forecast for those that nobody knows it of."""
    used = [one for one in installed() if one.section in config.plugins]
    packages = {one.package: [other.section for other in used if other.package == one.package] for one in used}
    text = " · ".join(f"{', '.join(sections)} ({package})" for package, sections in packages.items())
    known = {"attention": "reference", "optimizer": "adamw", "loss": "reference"}
    instead = [known[one.plugin.group] for one in used if one.plugin.group in known]
    return f"{text}; forecast as for {', '.join(dict.fromkeys(instead))}" if instead else text


def done_lines(
    plan: Plan,
    corpus: Corpus,
    state: TrainState,
    *,
    seconds: float,
    tokens_per_second: float,
    val_loss: float | None,
    measured_peak_bytes: int | None,
) -> list[str]:
    """How the run went: time, validation loss beside that of byte frequencies, forecast beside measurement."""
    first = [f"{state.step} of {plan.steps} steps in {format_duration(seconds)}", f"{format_count(tokens_per_second)} tokens/s"]
    if val_loss is not None:
        first.append(_validation(val_loss, corpus))
    second = [f"{_plural(state.skipped, 'batch', 'es')} skipped" if state.skipped else "no batch skipped"]
    if measured_peak_bytes is not None:
        off = round(100 * (measured_peak_bytes / plan.forecast.total - 1))
        second.insert(
            0, f"forecast {format_bytes(plan.forecast.total)}, measured {format_bytes(measured_peak_bytes)} ({off:+d} %)"
        )
    second.append(f"saved at step {state.step}" if state.step else "nothing to save before the first step")
    return [" · ".join(first), " · ".join(second)]


def sample_text(model: Transformer, corpus: Corpus, config: Config, eos_ids: frozenset[int]) -> str | None:
    """A text the trained model makes from nothing; None for data that is no text or has no token to begin with."""
    if isinstance(config.data.source, SyntheticData):
        return None
    settings = config.generate
    tokenizer = corpus.tokenizer
    first = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if first is None:
        return None
    ids = generate(model, [first], settings, eos_ids=eos_ids, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode(list(ids))


def next_commands(config: Config, folder: Path, tokenizer: Tokenizer) -> list[str]:
    """What one would type after a run; a run on plain ids is prompted with numbers."""
    commands = [["llmtrain", "evaluate", str(folder)]]
    if not isinstance(config.data.source, SyntheticData):
        prompt = "import " if isinstance(config.data.source, StdlibData) else "The "
        if isinstance(tokenizer, IdTokenizer):
            prompt = " ".join(map(str, range(1, min(4, tokenizer.vocab_size)))) or "0"
        commands.insert(0, ["llmtrain", "generate", str(folder), f"generate.prompt={prompt}"])
    return [shlex.join(command) for command in commands]


def text_facts(corpus: Corpus) -> dict[str, float]:
    """What environment.json keeps of the text, so that the losses of runs with different tokenizers can be compared."""
    return {} if math.isnan(corpus.bytes_per_token) else {"bytes_per_token": corpus.bytes_per_token}


def _validation(loss: float, corpus: Corpus) -> str:
    bits = corpus.bits_per_byte(loss)
    if bits is None:
        return f"val {loss:.4f}"
    return f"val {loss:.4f} = {bits:.2f} bits/byte (byte frequencies alone: {corpus.byte_frequency_bits:.2f})"


def _device(plan: Plan, machine: Machine, peak: PeakFlops) -> str:
    speed = f"{plan.precision.matmul} matmul {format_flops(peak.flops_per_second)} ({peak.source})"
    reasons = [f"   (auto: {choice.reason})" for choice in plan.choices if choice.key == "launch.device"]
    return " · ".join([plan.device, machine.device_name, _plural(plan.threads, "thread"), speed]) + "".join(reasons)


def _recompute(plan: Plan) -> str:
    kept = f", keeping {', '.join(plan.recompute.keep)}" if plan.recompute.keep else ""
    return f"{plan.recompute.kind}{kept}"


def _model(plan: Plan) -> str:
    model = plan.model
    heads = f"{model.attention.num_heads} heads"
    if model.attention.num_kv_heads != model.attention.num_heads:
        heads += f" / {model.attention.num_kv_heads} kv"
    parts = (
        f"{format_count(plan.num_parameters)} parameters",
        f"{model.num_layers} layers × {model.dim}",
        heads,
        *_windows(model.attention.windows),
        f"{model.norm} norm, {model.position}{_rope_scaling(model.rope_scaling)}, {model.feed_forward.kind}",
        f"vocabulary {model.vocab_size:,}",
    )
    return " · ".join(parts)


def _windows(windows: tuple[int | None, ...]) -> list[str]:
    """`window 16`, or with the letters of `model.attention.window_pattern`: `window 16 SL`; empty where all layers see all keys."""
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return []
    pattern = "".join("L" if window is None else "S" for window in windows)
    return [f"window {', '.join(f'{size:,}' for size in sorted(sizes))}{f' {pattern}' if 'L' in pattern else ''}"]


def _rope_scaling(scaling: RopeScaling | None) -> str:
    """`, yarn × 4 from 4,096`: the rule, how much longer texts may be, and than what."""
    if scaling is None:
        return ""
    if isinstance(scaling, LinearScaling):
        return f", linear × {scaling.factor:g}"
    kind = "llama3" if isinstance(scaling, Llama3Scaling) else "yarn"
    return f", {kind} × {scaling.factor:g} from {scaling.original_max_positions:,}"


def _attention(plan: Plan) -> str:
    """Backend and, where it is settled, kernel, each with the reason if `auto` chose it."""
    reasons = {choice.key: f" (auto: {choice.reason})" for choice in plan.choices}
    values = dict(zip(ATTENTION_KEYS, (plan.attention_backend, plan.attention_kernel), strict=True))
    named = {key: value for key, value in values.items() if key == ATTENTION_KEYS[0] or value != AUTO}
    return " · ".join(f"{value}{reasons.get(key, '')}" for key, value in named.items())


def _borders(config: Config) -> str:
    """Whether packed documents see each other must never be a surprise."""
    if config.data.packing is Packing.CONCAT:
        return " · packed, attention crosses documents"
    return f" · {config.data.packing}, attention stays inside documents"


def _batch(plan: Plan) -> str:
    batch = plan.batch
    return (
        f"{batch.global_batch_size} sequences × {batch.sequence_length:,} tokens = {batch.tokens_per_step:,} tokens/update = "
        f"{_plural(batch.num_microbatches, 'micro-batch', 'es')} × {batch.micro_batch_size} × "
        f"{_plural(plan.degrees.data_ranks, 'rank')}"
    )


def _ranks(config: Config, plan: Plan, machine: Machine) -> str:
    """`4 on 2 hosts (SLURM_STEP_NUM_TASKS) · ddp: gradients summed in buckets of 25 MiB, the first of 1, sent as bf16`."""
    ddp = config.parallelism.ddp
    buckets = f"gradients summed in buckets of {ddp.bucket_mib:g} MiB, the first of {ddp.first_bucket_mib:g}"
    sent = "" if ddp.compression == "none" else f", sent as {ddp.compression}"
    return f"{plan.world_size} on {_plural(plan.num_nodes, 'host')} ({machine.world_source}) · ddp: {buckets}{sent}"


def _schedule(plan: Plan) -> str:
    schedule = plan.schedule
    tokens = format_count(plan.steps * plan.batch.tokens_per_step)
    parts = [
        f"{plan.steps:,} updates = {tokens} tokens",
        f"{schedule.kind} {format_lr(schedule.peak_lr)} → {format_lr(schedule.min_lr)}",
        f"warm-up {schedule.warmup_steps}",
    ]
    if schedule.decay_steps:
        parts.append(f"decay {schedule.decay_steps}")
    return " · ".join(parts)


def _categories(forecast: MemoryForecast) -> str:
    return " · ".join(f"{name} {format_bytes(getattr(forecast, name))}" for name in CATEGORIES)


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"
