"""Rules between keys: every combination that could not be honoured, one function each.

A rule sees the whole wire config, in which each value is legal by itself, and returns the problem or None. Rules that need the machine
or the data belong to the plan and to the parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmtrain.config import schema
from llmtrain.config.defaults import (
    BYTE_VOCAB_SIZE,
    DEFAULT_BPE_VOCAB_SIZE,
    DEFAULT_GLOBAL_BATCH_SIZE,
    DEFAULT_STEPS,
    auto_decay_steps,
    auto_warmup_steps,
)
from llmtrain.config.errors import Problem
from llmtrain.config.keys import leaves
from llmtrain.config.suggest import divisors_near, either, multiples_near

PAIRS = (("train.steps", "train.tokens"), ("accumulation.global_batch_size", "accumulation.global_batch_tokens"))
"""Two ways to say one thing; at most one of a pair is given."""

DEGREES = (*(f"parallelism.{axis}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")), "launch.nproc")
"""Keys that say how many ranks there are along an axis, or in all."""

Check = Callable[[schema.Config], Problem | None]


@dataclass(frozen=True)
class Rule:
    """A check and the keys it reads; their origins are shown with its problem."""

    check: Check
    keys: tuple[str, ...]


def check_rules(
    wire: schema.Config, *, without: Collection[str] = (), origins: Mapping[str, str] | None = None
) -> list[Problem]:
    """Every rule that the config breaks.

    Args:
        wire: a config whose values are legal one by one.
        without: keys that hold no meaningful value; rules that read one are left out.
        origins: where keys were set, by dotted name.
    """
    problems = []
    for rule in RULES:
        problem = None if set(rule.keys) & set(without) else rule.check(wire)
        if problem is not None:
            places = dict.fromkeys((origins or {}).get(key, "") for key in rule.keys)
            problems.append(dataclasses.replace(problem, origin="; ".join(place for place in places if place)))
    return problems


def _steps(wire: schema.Config) -> int:
    """Updates of the run, as far as the config says it; tokens are rounded up to whole updates."""
    if wire.train.tokens is not None and wire.train.steps is None:
        return -(-wire.train.tokens // (_sequences(wire) * wire.data.sequence_length))
    return wire.train.steps or DEFAULT_STEPS


def _sequences(wire: schema.Config) -> int:
    """Sequences of one update over all ranks."""
    if wire.accumulation.global_batch_tokens is not None:
        return max(1, wire.accumulation.global_batch_tokens // wire.data.sequence_length)
    return wire.accumulation.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE


def _value(wire: schema.Config, name: str) -> Any:
    """The value of a key by its dotted name."""
    return functools.reduce(getattr, name.split("."), wire)


HORIZON = (
    "train.steps",
    "train.tokens",
    "accumulation.global_batch_size",
    "accumulation.global_batch_tokens",
    "data.sequence_length",
)
"""Keys that say how many updates a run makes."""


def run_name_is_a_folder_name(wire: schema.Config) -> Problem | None:
    name = wire.run.name
    if name is None or (
        name.isprintable()
        and name.strip(".")
        and name == name.strip()
        and not set(name) & set("/\\=")
        and len(name.encode()) <= 200
    ):
        return None
    rule = "the name of one folder: up to 200 bytes, no slash, backslash, = or control character, not only dots, no blank at either end"
    return Problem(f"run.name={name!r}", rule, "letters, digits, dot, dash and underscore; run.dir says where it lies")


def path_is_not_empty(wire: schema.Config, name: str) -> Problem | None:
    path = _value(wire, name)
    if path is None or (path.strip() and path.isprintable()):
        return None
    return Problem(f"{name}={path!r}", "a path: not empty, no control characters", f"{name}=FOLDER")


def steps_or_tokens(wire: schema.Config) -> Problem | None:
    steps, tokens = wire.train.steps, wire.train.tokens
    if steps is None or tokens is None:
        return None
    rule = "train.steps and train.tokens both say how long to train"
    return Problem(f"train.steps={steps} train.tokens={tokens}", rule, "leave one of them out")


def sequences_or_tokens(wire: schema.Config) -> Problem | None:
    batch = wire.accumulation
    if batch.global_batch_size is None or batch.global_batch_tokens is None:
        return None
    what = (
        f"accumulation.global_batch_size={batch.global_batch_size} accumulation.global_batch_tokens={batch.global_batch_tokens}"
    )
    return Problem(what, "both say how large one update is", "leave one of them out")


def stop_after_within_steps(wire: schema.Config) -> Problem | None:
    stop, steps = wire.train.stop_after, _steps(wire)
    if stop is None or stop <= steps:
        return None
    rule = f"at most the {steps} updates of the run"
    return Problem(f"train.stop_after={stop}", rule, f"train.stop_after={steps} or train.steps={stop}")


def batch_tokens_make_whole_sequences(wire: schema.Config) -> Problem | None:
    tokens, length = wire.accumulation.global_batch_tokens, wire.data.sequence_length
    if tokens is None or tokens % length == 0:
        return None
    near = either(f"accumulation.global_batch_tokens={value}" for value in multiples_near(tokens, length))
    return Problem(f"accumulation.global_batch_tokens={tokens}", f"divisible by data.sequence_length = {length}", near)


def micro_batches_fill_the_batch(wire: schema.Config) -> Problem | None:
    micro, sequences = wire.accumulation.micro_batch_size, _sequences(wire)
    if isinstance(micro, str) or sequences % micro == 0:
        return None
    near = [f"accumulation.micro_batch_size={value}" for value in divisors_near(sequences, micro)]
    near += [f"accumulation.global_batch_size={value}" for value in multiples_near(sequences, micro)]
    rule = f"the global batch of {sequences} sequences is divisible by micro_batch_size"
    return Problem(f"accumulation.micro_batch_size={micro}", rule, either(near))


def warmup_within_steps(wire: schema.Config) -> Problem | None:
    warmup, steps = wire.schedule.warmup_steps, _steps(wire)
    if isinstance(warmup, str) or warmup <= steps:
        return None
    cure = f"schedule.warmup_steps={auto_warmup_steps(steps)}"
    return Problem(f"schedule.warmup_steps={warmup}", f"at most the {steps} updates of the run", cure)


def wsd_phases_within_steps(wire: schema.Config) -> Problem | None:
    if wire.schedule.kind != "wsd":
        return None
    steps = _steps(wire)
    warmup = auto_warmup_steps(steps) if isinstance(wire.schedule.warmup_steps, str) else wire.schedule.warmup_steps
    decay = auto_decay_steps(steps) if wire.schedule.decay_steps is None else wire.schedule.decay_steps
    if warmup + decay <= steps or warmup > steps:
        return None
    rule = f"warm-up of {warmup} + decay of {decay} within the {steps} updates of the run"
    return Problem(f"schedule.decay_steps={decay}", rule, f"schedule.decay_steps={steps - warmup}, or a longer run")


def heads_divide_the_width(wire: schema.Config) -> Problem | None:
    dim, heads = wire.model.dim, wire.model.attention.num_heads
    if wire.model.attention.head_dim is not None or dim % heads == 0:
        return None
    near = [f"model.dim={value}" for value in multiples_near(dim, heads)]
    near += [f"model.attention.num_heads={value}" for value in divisors_near(dim, heads)]
    rule = f"divisible by model.attention.num_heads = {heads} unless model.attention.head_dim is given"
    return Problem(f"model.dim={dim}", rule, either(near))


def kv_heads_divide_the_heads(wire: schema.Config) -> Problem | None:
    heads, kv_heads = wire.model.attention.num_heads, wire.model.attention.num_kv_heads
    if kv_heads is None or heads % kv_heads == 0:
        return None
    near = either(f"model.attention.num_kv_heads={value}" for value in divisors_near(heads, kv_heads))
    return Problem(f"model.attention.num_kv_heads={kv_heads}", f"divides model.attention.num_heads = {heads}", near)


def rotary_turns_pairs_of_channels(wire: schema.Config) -> Problem | None:
    model, shape = wire.model, wire.model.attention
    head_dim = shape.head_dim or model.dim // shape.num_heads
    whole = shape.head_dim is not None or model.dim % shape.num_heads == 0
    if model.position != "rotary" or head_dim % 2 == 0 or not whole:
        return None
    cure = either(f"model.attention.head_dim={value}" for value in (head_dim - 1, head_dim + 1) if value > 0)
    return Problem(
        f"model.attention.head_dim={head_dim}", "even with model.position=rotary", f"{cure}, or model.position=learned"
    )


def position_table_covers_a_sequence(wire: schema.Config) -> Problem | None:
    rows, length = wire.model.max_positions, wire.data.sequence_length
    if wire.model.position != "learned" or isinstance(rows, str) or rows >= length:
        return None
    cure = f"model.max_positions={length} or data.sequence_length={rows}"
    return Problem(f"model.max_positions={rows}", f"at least data.sequence_length = {length} with learned positions", cure)


def position_table_needs_learned_positions(wire: schema.Config) -> Problem | None:
    rows = wire.model.max_positions
    if wire.model.position == "learned" or isinstance(rows, str):
        return None
    rule = f"only model.position=learned has a position table; model.position is {wire.model.position}"
    return Problem(f"model.max_positions={rows}", rule, "model.position=learned or model.max_positions=auto")


def theta_needs_rotary_positions(wire: schema.Config) -> Problem | None:
    theta, default = wire.model.rope.theta, leaves()["model.rope.theta"].default
    if wire.model.position == "rotary" or theta == default:
        return None
    rule = f"only model.position=rotary reads it; model.position is {wire.model.position}"
    return Problem(f"model.rope.theta={theta:g}", rule, f"model.position=rotary or model.rope.theta={default:g}")


def attention_dropout_needs_the_reference_backend(wire: schema.Config) -> Problem | None:
    dropout, backend = wire.model.dropout.attention, wire.attention.backend
    if dropout == 0 or backend == "reference":
        return None
    rule = f"only attention=reference drops attention weights by counted random numbers; attention.backend is {backend}"
    return Problem(f"model.dropout.attention={dropout:g}", rule, "attention=reference or model.dropout.attention=0")


def vocabulary_holds_the_tokenizer(wire: schema.Config) -> Problem | None:
    rows, tokenizer = wire.model.vocab_size, wire.tokenizer
    needed = {"byte": BYTE_VOCAB_SIZE, "bpe": tokenizer.vocab_size or DEFAULT_BPE_VOCAB_SIZE}.get(tokenizer.kind)
    if isinstance(rows, str) or needed is None or rows >= needed:
        return None
    cure = f"model.vocab_size={needed} or auto"
    cure += f", or tokenizer.vocab_size={rows}" if tokenizer.kind == "bpe" and rows >= BYTE_VOCAB_SIZE + 2 else ""
    return Problem(f"model.vocab_size={rows}", f"at least the {needed} tokens of tokenizer={tokenizer.kind}", cure)


def text_needs_a_path(wire: schema.Config) -> Problem | None:
    if wire.data.kind != "text" or wire.data.path is not None:
        return None
    return Problem("data=text", "needs the file or folder to read", "data.path=FILE_OR_FOLDER")


def synthetic_data_has_no_text_to_learn_tokens_from(wire: schema.Config) -> Problem | None:
    kind = wire.tokenizer.kind
    if wire.data.kind != "synthetic" or kind == "byte":
        return None
    return Problem(f"tokenizer={kind}", "made from text, which data=synthetic does not have", "tokenizer=byte or data=stdlib")


def synthetic_data_has_no_marks_to_leave_out(wire: schema.Config) -> Problem | None:
    left_out = [name for name, value in (("bos", wire.data.bos), ("eos", wire.data.eos)) if not value]
    if wire.data.kind != "synthetic" or not left_out:
        return None
    rule = "data=synthetic draws every token at random and puts no marks around documents"
    return Problem(f"data.{left_out[0]}=false", rule, f"data.{left_out[0]}=true or data=stdlib")


def one_process_only(wire: schema.Config, name: str) -> Problem | None:
    degree = _value(wire, name)
    if not isinstance(degree, int) or degree == 1:
        return None
    return Problem(f"{name}={degree}", "not available in this version, which runs one process", f"{name}=1")


def ddp_keeps_whole_copies(wire: schema.Config) -> Problem | None:
    if wire.parallelism.dp_shard != schema.AUTO:
        return None
    rule = "parallelism=ddp keeps a whole copy on every rank: dp_replicate takes the ranks, dp_shard is 1"
    return Problem("parallelism.dp_shard=auto", rule, "parallelism.dp_shard=1")


def greedy_sampling_has_no_candidates(wire: schema.Config) -> Problem | None:
    settings = wire.generate
    name = "top_k" if settings.top_k is not None else "top_p"
    if settings.temperature > 0 or (settings.top_k is None and settings.top_p is None):
        return None
    rule = "generate.temperature=0 always takes the likeliest token, whatever else is left"
    return Problem(
        f"generate.{name}={getattr(settings, name):g}", rule, f"leave out generate.{name}, or generate.temperature=0.8"
    )


RULES = (
    Rule(run_name_is_a_folder_name, ("run.name",)),
    *(Rule(partial(path_is_not_empty, name=name), (name,)) for name in ("run.dir", "data.path", "data.cache_dir")),
    Rule(steps_or_tokens, PAIRS[0]),
    Rule(sequences_or_tokens, PAIRS[1]),
    Rule(stop_after_within_steps, ("train.stop_after", *HORIZON)),
    Rule(batch_tokens_make_whole_sequences, ("accumulation.global_batch_tokens", "data.sequence_length")),
    Rule(micro_batches_fill_the_batch, ("accumulation.micro_batch_size", *PAIRS[1], "data.sequence_length")),
    Rule(warmup_within_steps, ("schedule.warmup_steps", *HORIZON)),
    Rule(wsd_phases_within_steps, ("schedule.decay_steps", "schedule.kind", "schedule.warmup_steps", *HORIZON)),
    Rule(heads_divide_the_width, ("model.dim", "model.attention.num_heads", "model.attention.head_dim")),
    Rule(kv_heads_divide_the_heads, ("model.attention.num_kv_heads", "model.attention.num_heads")),
    Rule(
        rotary_turns_pairs_of_channels,
        ("model.attention.head_dim", "model.dim", "model.attention.num_heads", "model.position"),
    ),
    Rule(position_table_covers_a_sequence, ("model.max_positions", "data.sequence_length", "model.position")),
    Rule(position_table_needs_learned_positions, ("model.max_positions", "model.position")),
    Rule(theta_needs_rotary_positions, ("model.rope.theta", "model.position")),
    Rule(attention_dropout_needs_the_reference_backend, ("model.dropout.attention", "attention.backend")),
    Rule(vocabulary_holds_the_tokenizer, ("model.vocab_size", "tokenizer.kind", "tokenizer.vocab_size")),
    Rule(text_needs_a_path, ("data.kind", "data.path")),
    Rule(synthetic_data_has_no_text_to_learn_tokens_from, ("tokenizer.kind", "data.kind")),
    Rule(synthetic_data_has_no_marks_to_leave_out, ("data.bos", "data.eos", "data.kind")),
    *(Rule(partial(one_process_only, name=name), (name,)) for name in DEGREES),
    Rule(ddp_keeps_whole_copies, ("parallelism.dp_shard", "parallelism.kind")),
    Rule(greedy_sampling_has_no_candidates, ("generate.temperature", "generate.top_k", "generate.top_p")),
)
