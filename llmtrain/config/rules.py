"""Rules between keys: every combination that could not be honoured, one function each.

A rule sees the whole wire config, in which each value is legal by itself, and returns the problem or None. Rules that need the machine
or the data belong to the plan and to the parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from llmtrain.config import rules_data as data
from llmtrain.config import rules_launch as launch
from llmtrain.config import rules_model as model
from llmtrain.config import schema
from llmtrain.config.defaults import (
    DEFAULT_GLOBAL_BATCH_SIZE,
    DEFAULT_STEPS,
    auto_decay_steps,
    auto_warmup_steps,
)
from llmtrain.config.errors import Problem
from llmtrain.config.key_info import value_of
from llmtrain.config.keys import leaves, path_keys
from llmtrain.config.suggest import divisors_near, either, multiples_near

PAIRS = (("train.steps", "train.tokens"), ("accumulation.global_batch_size", "accumulation.global_batch_tokens"))
"""Two ways to say one thing; at most one of a pair is given."""

WRITTEN_PATHS = ("run.dir", "prepare.path")
"""Keys that name a folder to write into; those that name what is read are marked in the schema."""

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
    for rule in all_rules():
        problem = None if set(rule.keys) & set(without) else rule.check(wire)
        if problem is not None:
            places = dict.fromkeys((origins or {}).get(key, "") for key in rule.keys)
            problems.append(dataclasses.replace(problem, origin="; ".join(place for place in places if place)))
    return problems


def all_rules() -> tuple[Rule, ...]:
    """Those of `RULES`, and one for each key that names a file or folder; which these are depends on the plugins installed."""
    paths = (Rule(partial(path_is_not_empty, name=name), (name,)) for name in (*WRITTEN_PATHS, *path_keys()))
    return (*RULES, *paths)


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
    path = value_of(wire, name)
    if path == leaves()[name].default or path is None or (path.strip() and path.isprintable()):
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


def greedy_sampling_has_no_candidates(wire: schema.Config) -> Problem | None:
    settings = wire.generate
    name = "top_k" if settings.top_k is not None else "top_p"
    if settings.temperature > 0 or (settings.top_k is None and settings.top_p is None):
        return None
    rule = "generate.temperature=0 always takes the likeliest token, whatever else is left"
    return Problem(
        f"generate.{name}={getattr(settings, name):g}", rule, f"leave out generate.{name}, or generate.temperature=0.8"
    )


def trackers_are_on(wire: schema.Config) -> Problem | None:
    if wire.tracker.wandb.enabled:
        return None
    defaults = schema.Wandb()
    for name, value in vars(wire.tracker.wandb).items():
        if value != getattr(defaults, name):
            what = f"tracker.wandb.{name}={','.join(value) if isinstance(value, list) else value}"
            return Problem(what, "Weights & Biases is not used", f"tracker=wandb, or leave out tracker.wandb.{name}")
    return None


RULES = (
    Rule(run_name_is_a_folder_name, ("run.name",)),
    Rule(steps_or_tokens, PAIRS[0]),
    Rule(sequences_or_tokens, PAIRS[1]),
    Rule(stop_after_within_steps, ("train.stop_after", *HORIZON)),
    Rule(batch_tokens_make_whole_sequences, ("accumulation.global_batch_tokens", "data.sequence_length")),
    Rule(micro_batches_fill_the_batch, ("accumulation.micro_batch_size", *PAIRS[1], "data.sequence_length")),
    Rule(warmup_within_steps, ("schedule.warmup_steps", *HORIZON)),
    Rule(wsd_phases_within_steps, ("schedule.decay_steps", "schedule.kind", "schedule.warmup_steps", *HORIZON)),
    Rule(model.heads_divide_the_width, ("model.dim", "model.attention.num_heads", "model.attention.head_dim")),
    Rule(model.kv_heads_divide_the_heads, ("model.attention.num_kv_heads", "model.attention.num_heads")),
    Rule(
        model.rotary_turns_pairs_of_channels,
        ("model.attention.head_dim", "model.dim", "model.attention.num_heads", "model.position"),
    ),
    Rule(model.longest_text_covers_a_sequence, ("model.max_positions", "data.sequence_length")),
    Rule(model.theta_needs_rotary_positions, ("model.rope.theta", "model.position")),
    Rule(model.scaling_needs_rotary_positions, ("model.rope.scaling.kind", "model.position")),
    Rule(
        model.rope_scaling_is_complete,
        tuple(f"model.rope.scaling.{name}" for name in ("kind", "factor", "original_max_positions")),
    ),
    Rule(
        model.rope_ramp_rises,
        tuple(f"model.rope.scaling.{n}" for n in ("kind", "low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast")),
    ),
    Rule(model.window_pattern_has_two_letters, ("model.attention.window_pattern",)),
    Rule(model.windows_are_used, ("model.attention.window", "model.attention.window_pattern", "model.num_layers")),
    Rule(model.attention_dropout_needs_the_reference_backend, ("model.dropout.attention", "attention.backend")),
    Rule(model.kernel_belongs_to_the_backend, ("attention.kernel", "attention.backend")),
    Rule(
        data.vocabulary_holds_the_tokenizer,
        ("model.vocab_size", "tokenizer.kind", "tokenizer.vocab_size", "data.kind", "model.init_from"),
    ),
    Rule(data.files_need_a_path, ("data.kind", "data.path")),
    Rule(data.one_way_to_hold_out, ("data.validation_path", "data.validation_fraction")),
    Rule(data.validation_is_other_text, ("data.path", "data.validation_path")),
    Rule(data.dtype_is_for_raw_files, ("data.dtype", "data.format")),
    Rule(data.tokens_have_their_marks, ("data.bos", "data.eos", "data.kind")),
    Rule(data.tokenizer_files_need_a_path, ("tokenizer.kind", "tokenizer.path")),
    Rule(data.learnt_tokenizers_need_text, ("tokenizer.kind", "data.kind")),
    Rule(data.plain_ids_come_from_token_files, ("tokenizer.kind", "data.kind")),
    Rule(data.plain_ids_need_a_vocabulary, ("tokenizer.kind", "model.vocab_size")),
    Rule(data.end_of_text_is_in_the_vocabulary, ("tokenizer.eos_id", "model.vocab_size")),
    Rule(data.synthetic_data_has_no_text, ("tokenizer.kind", "data.kind")),
    *(Rule(partial(launch.one_data_axis_only, name=name), (name,)) for name in launch.OTHER_AXES),
    Rule(launch.ddp_keeps_whole_copies, ("parallelism.dp_shard", "parallelism.kind")),
    Rule(launch.first_bucket_is_no_larger, ("parallelism.first_bucket_mib", "parallelism.bucket_mib")),
    Rule(launch.environment_is_plain, ("launch.env",)),
    Rule(trackers_are_on, tuple(f"tracker.wandb.{item.name}" for item in dataclasses.fields(schema.Wandb))),
    Rule(greedy_sampling_has_no_candidates, ("generate.temperature", "generate.top_k", "generate.top_p")),
)
