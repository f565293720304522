"""Settles a checked config on a machine: degrees, batch, lengths and every `auto` become numbers and names, with reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from llmtrain.config.defaults import BYTE_VOCAB_SIZE, LONGEST_AUTO_WARMUP, auto_decay_steps, auto_warmup_steps
from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.typed import (
    ChunkedLoss,
    Config,
    ModelConfig,
    RecomputeConfig,
    RecomputeKind,
    ScheduleConfig,
    ScheduleKind,
    TrainConfig,
)
from llmtrain.config.typed_data import BpeTokenizerConfig, ByteTokenizerConfig, Packing, RecordData
from llmtrain.plan.activations import REFERENCE, Workload
from llmtrain.plan.attention import ATTENTION, MPS
from llmtrain.plan.batch import MEMORY_SHARE, largest_micro_batch, settle_batch
from llmtrain.plan.choose_attention import settle_attention, settle_keep
from llmtrain.plan.degrees import settle_degrees
from llmtrain.plan.flops import flops_per_token
from llmtrain.plan.memory import forecast_memory
from llmtrain.plan.plan import Choice, Machine, Plan, SchedulePlan
from llmtrain.plan.precision import PRECISION_TABLES
from llmtrain.plan.report import format_bytes
from llmtrain.plan.shapes import num_parameters, tied_parameters

Choices = list[Choice]
PIP_COMMAND = re.compile(r"pip install [\w-]+")
"""How the reason of an option whose package is missing ends."""


def make_plan(config: Config, machine: Machine, *, vocab_size: int | None = None, training: bool = True) -> Plan:
    """What will run, settled before a process or a tensor is made.

    Args:
        config: a checked config.
        machine: the devices at hand, or those of a cluster description.
        vocab_size: size of the prepared tokenizer; None where it is not prepared (bytes and bpe are known without data).
        training: False to use a trained model: no backward, and an attention backend that is not here makes room for `auto`.

    Raises:
        PlanError: degrees, batch, memory, schedule, vocabulary or a named option do not fit; says what would.
    """
    _refuse_missing(config, machine)
    if training:
        _refuse_on_mps(config, machine)
    model, vocab_choices = _settle_vocab(config, vocab_size)
    precision_name, precision_choices = _settle_precision(config.precision, machine)
    backend, kernel, attention_choices = settle_attention(config, precision_name, machine, training=training)
    degrees, degree_choices = settle_degrees(config.parallelism, machine)
    recompute, recompute_choices = settle_keep(config.recompute, backend, kernel, machine.device)
    one_sequence = _one_sequence(config, model, precision_name, backend, kernel, machine.device)
    workload = replace(one_sequence, recompute=recompute, ddp=config.parallelism.ddp if degrees.dp_replicate > 1 else None)
    batch, batch_choices = settle_batch(
        config.accumulation, config.data.sequence_length, degrees.data_ranks, _micro_batch_finder(workload, machine)
    )
    steps = config.train.steps or _steps_for(config.train, batch.tokens_per_step)
    schedule, schedule_choices = settle_schedule(config.schedule, config.optimizer.lr, steps)
    threads, thread_choices = _settle_threads(config, machine)
    settled = replace(workload, micro_batch_size=batch.micro_batch_size, num_microbatches=batch.num_microbatches)
    choices = (_device_choice(config, machine), precision_choices, attention_choices, recompute_choices, batch_choices)
    return Plan(
        device=machine.device,
        threads=threads,
        world_size=machine.world_size,
        degrees=degrees,
        batch=batch,
        schedule=schedule,
        precision_name=precision_name,
        precision=workload.precision,
        model=model,
        tied=tied_parameters(model),
        attention_backend=backend,
        attention_kernel=kernel,
        loss=config.loss,
        recompute=recompute,
        num_parameters=num_parameters(model),
        flops_per_token=flops_per_token(model, batch.sequence_length, causal=True),
        flops_per_token_full_attention=flops_per_token(model, batch.sequence_length, causal=False),
        forecast=forecast_memory(settled),
        choices=tuple(chain(*choices, thread_choices, degree_choices, vocab_choices, schedule_choices)),
        attention_options=config.plugins.get(f"attention.{backend}"),
        num_nodes=machine.num_nodes,
    )


def _chosen_options(config: Config) -> Iterator[tuple[str, str]]:
    """Options that a machine may lack without anything standing in for them, as `group, option`."""
    if isinstance(config.data.source, RecordData):
        yield "data", config.data.source.kind
    yield "tokenizer", config.tokenizer.kind
    yield "optimizer", config.optimizer.kind
    yield "loss", config.loss.kind
    if config.tracker.wandb is not None:
        yield "tracker", "wandb"
    if config.tracker.tensorboard:
        yield "tracker", "tensorboard"


def _one_sequence(config: Config, model: ModelConfig, precision_name: str, backend: str, kernel: str, device: str) -> Workload:
    """The work of one sequence at a time; the batch is what is settled next."""
    return Workload(
        model=model,
        precision=PRECISION_TABLES[precision_name],
        micro_batch_size=1,
        num_microbatches=1,
        sequence_length=config.data.sequence_length,
        loss=config.loss,
        recompute=config.recompute,
        # What a plugin keeps is not known: it may be whole matrices of scores, as with `reference`.
        attention_backend=backend if backend in ATTENTION else REFERENCE,
        attention_kernel=kernel,
        device=device,
        document_mask=config.data.packing is not Packing.CONCAT,
    )


def check_memory(plan: Plan, machine: Machine) -> None:
    """Refuse a training whose forecast is more than the device has; only a micro-batch that was asked for can be such.

    Raises:
        PlanError: names the bytes and what would fit.
    """
    need, batch = plan.forecast.total, plan.batch
    if need <= machine.memory_bytes:
        return
    rule = f"forecast peak {format_bytes(need)}, {machine.device_name} has {format_bytes(machine.memory_bytes)}"
    raise PlanError(
        Problem(f"accumulation.micro_batch_size={batch.micro_batch_size}", rule, "auto, recompute=full or loss=chunked")
    )


def settle_schedule(schedule: ScheduleConfig, peak_lr: float, steps: int) -> tuple[SchedulePlan, Choices]:
    """Phase lengths in updates; raises PlanError when they are longer than the run."""
    choices = []
    warmup, decay = schedule.warmup_steps, 0
    if warmup is None:
        warmup = auto_warmup_steps(steps)
        choices.append(Choice("schedule.warmup_steps", str(warmup), f"min({LONGEST_AUTO_WARMUP}, {steps} steps / 10)"))
    if schedule.kind is ScheduleKind.WSD:
        decay = auto_decay_steps(steps) if schedule.decay_steps is None else schedule.decay_steps
    if warmup + decay > steps:
        raise PlanError(_too_long(schedule, warmup, decay, steps))
    return SchedulePlan(schedule.kind, peak_lr, peak_lr * schedule.min_lr_ratio, steps, warmup, decay), choices


def _too_long(schedule: ScheduleConfig, warmup: int, decay: int, steps: int) -> Problem:
    what = f"schedule.warmup_steps={'auto' if schedule.warmup_steps is None else warmup}"
    if schedule.kind is not ScheduleKind.WSD:
        return Problem(what, f"warm-up of {warmup} updates in a run of {steps}", f"{steps} or less, or a longer run")
    if schedule.decay_steps is None:
        origin = " (steps / 5)"
    else:
        origin, what = "", f"{what} schedule.decay_steps={decay}"
    cures = []
    if None not in (schedule.warmup_steps, schedule.decay_steps):
        cures.append(f"train.steps={warmup + decay}")
    if steps > warmup:
        cures.append(f"schedule.decay_steps={steps - warmup}")
    if steps > decay:
        cures.append(f"schedule.warmup_steps={steps - decay}")
    rule = f"warm-up of {warmup} + decay of {decay}{origin} = {warmup + decay} updates in a run of {steps}"
    return Problem(what, rule, " or ".join(cures) or "a longer run")


def _steps_for(train: TrainConfig, tokens_per_step: int) -> int:
    """Updates that see at least the asked tokens."""
    assert train.tokens is not None, "steps or tokens is set"
    return -(-train.tokens // tokens_per_step)


def _settle_vocab(config: Config, prepared: int | None) -> tuple[ModelConfig, Choices]:
    kind, asked = config.tokenizer.kind, config.model.vocab_size
    tokenizer = prepared
    if tokenizer is None and isinstance(config.tokenizer, ByteTokenizerConfig):
        tokenizer = BYTE_VOCAB_SIZE
    if tokenizer is None and isinstance(config.tokenizer, BpeTokenizerConfig):
        tokenizer = config.tokenizer.vocab_size
    if asked is not None:
        if tokenizer is not None and asked < tokenizer:
            rule = f"at least the vocabulary of the {kind} tokenizer, {tokenizer}"
            raise PlanError(Problem(f"model.vocab_size={asked}", rule, f"{tokenizer} or auto"))
        return config.model, []
    if tokenizer is None:
        rule = f"the size of the {kind} tokenizer's vocabulary is only known after its data is prepared"
        raise PlanError(Problem("model.vocab_size=auto", rule, "a number, or prepare the data first"))
    reason = f"the {kind} tokenizer's vocabulary"
    return replace(config.model, vocab_size=tokenizer), [Choice("model.vocab_size", str(tokenizer), reason)]


def _settle_precision(asked: str, machine: Machine) -> tuple[str, Choices]:
    if asked != "auto":
        if refused := _unavailable("precision", asked, machine):
            raise PlanError(*refused)
        if asked == "bf16" and not machine.bf16:
            rule = f"{machine.device_name} has no bf16: on MPS torch has it from macOS 14 on"
            raise PlanError(Problem("precision=bf16", rule, "precision=fp32 or auto"))
        return asked, []
    if machine.bf16_native:
        return "bf16", [Choice("precision", "bf16", f"this {machine.device} multiplies bf16 natively")]
    return "fp32", [Choice("precision", "fp32", f"this {machine.device} does not multiply bf16 natively")]


def _refuse_missing(config: Config, machine: Machine) -> None:
    """Raise PlanError for everything chosen that the machine lacks, all at once."""
    missing = [problem for key, value in _chosen_options(config) for problem in _unavailable(key, value, machine)]
    if missing:
        raise PlanError(*missing)


def _unavailable(key: str, value: str, machine: Machine) -> list[Problem]:
    """What is wrong with a named option that the machine is known not to have; it is never replaced by another one."""
    entry = machine.options.get(f"{key}={value}")
    if entry is None or entry.available:
        return []
    command = PIP_COMMAND.search(entry.reason)
    if command is not None:
        return [Problem(f"{key}={value}", entry.reason, command[0])]
    others = [name.removeprefix(f"{key}=") for name, other in machine.options.items() if other.available]
    known = [name for name in others if f"{key}={name}" in machine.options]
    return [Problem(f"{key}={value}", f"not available on {machine.device_name}: {entry.reason}", " or ".join(known))]


def _refuse_on_mps(config: Config, machine: Machine) -> None:
    """Raise PlanError for a promise that cannot be kept on Apple's GPU; what torch cannot compute there its own rows refuse."""
    if machine.device == MPS and config.train.deterministic:
        rule = "torch does not say which of its operations on mps give the same bits every time"
        raise PlanError(
            Problem("train.deterministic=true launch.device=mps", rule, "train.deterministic=false or launch.device=cpu")
        )


def _settle_threads(config: Config, machine: Machine) -> tuple[int, Choices]:
    asked, ranks, jobs = config.launch.threads, machine.core_ranks, machine.host_jobs
    # Ranks that are bound to cores of their own have none of the rest of the host.
    all_share = ranks == machine.local_world_size
    if asked is not None:
        whose = "of this host" if all_share else "that this rank may use"
        refused = too_many_threads(asked, machine.cores, ranks, jobs, whose=whose)
        if refused:
            raise PlanError(refused)
        return asked, []
    here = " on this host" if machine.num_nodes > 1 else ""
    reason = f"{_counted(machine.cores, 'core')} / {_counted(ranks, 'rank')}{here if all_share else ' that may use them'}"
    share = _threads_each(machine.cores, ranks * jobs)
    return share, [Choice("launch.threads", str(share), f"{reason} / {jobs} jobs" if jobs > 1 else reason)]


def too_many_threads(asked: int, cores: int, ranks: int, jobs: int = 1, *, whose: str = "of this host") -> Problem | None:
    """What is wrong with `launch.threads` where ranks, of as many jobs of a sweep at a time, share cores; None if nothing is."""
    processes = ranks * jobs
    share = _threads_each(cores, processes)
    if asked <= share:
        return None
    who = f"{jobs} jobs of {_counted(ranks, 'rank')}" if jobs > 1 else _counted(ranks, "rank")
    given = "" if processes == 1 else f" for {who} of {_counted(asked, 'thread')} = {asked * processes}"
    rule = f"at most the {_counted(cores, 'core')} {whose}{given}: more threads than cores wait for each other"
    return Problem(f"launch.threads={asked}", rule, f"launch.threads={share} or auto")


def _threads_each(cores: int, processes: int) -> int:
    return max(1, cores // processes)


def _device_choice(config: Config, machine: Machine) -> Choices:
    if config.launch.device != "auto":
        return []
    return [Choice("launch.device", machine.device, machine.device_reason.removeprefix("auto: "))]


def _micro_batch_finder(workload: Workload, machine: Machine) -> Callable[[int], tuple[int, Choice]]:
    """The micro-batch for `auto` as a function of a rank's batch."""

    def find(per_rank: int) -> tuple[int, Choice]:
        found = largest_micro_batch(
            per_rank,
            machine.memory_bytes,
            lambda micro, count: forecast_memory(replace(workload, micro_batch_size=micro, num_microbatches=count)),
        )
        if found is None:
            raise PlanError(_does_not_fit(replace(workload, num_microbatches=per_rank), machine))
        return found

    return find


def _does_not_fit(workload: Workload, machine: Machine) -> Problem:
    """Why a micro-batch of one sequence is too much, and the first change that makes it fit."""
    forecast, limit = forecast_memory(workload), int(MEMORY_SHARE * machine.memory_bytes)
    static = forecast.params + forecast.grads + forecast.optimizer
    share = f"{MEMORY_SHARE:.0%} of {format_bytes(machine.memory_bytes)}"
    rule = (
        f"one sequence of {workload.sequence_length} tokens needs {format_bytes(forecast.total)} ({format_bytes(static)} for "
        f"parameters, gradients and optimizer), limit {format_bytes(limit)} ({share})"
    )
    chunked = replace(workload, loss=ChunkedLoss(min(1024, workload.sequence_length)))
    recomputed = replace(workload, recompute=RecomputeConfig(RecomputeKind.FULL, ()))
    options = {
        "loss=chunked": chunked,
        "recompute=full": recomputed,
        "recompute=full loss=chunked": replace(recomputed, loss=chunked.loss),
    }
    needs = {words: forecast_memory(option).total for words, option in options.items() if option != workload}
    fitting = [f"{words} (needs {format_bytes(need)})" for words, need in needs.items() if need <= limit]
    cure = fitting[0] if fitting else "a smaller model (model.dim, model.num_layers) or a shorter data.sequence_length"
    return Problem("accumulation.micro_batch_size=auto", rule, cure)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
