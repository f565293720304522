"""What a resumed run may have changed since its start: one table from keys to the effect of changing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from llmtrain.config.compose import config_from_wire
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.keys import leaves
from llmtrain.config.plugins import concerns_plugin
from llmtrain.config.settle import flatten
from llmtrain.config.typed import ScheduleKind
from llmtrain.config.values import show
from llmtrain.optim.schedule import learning_rate
from llmtrain.plan.plan import SchedulePlan


class Effect(StrEnum):
    """What a change of a key means for a run that has already made updates."""

    NONE = "none"
    """Not part of training at all; not even reported."""
    PASSES = "passes"
    """Where, how fast or how closely watched, but the same training."""
    HORIZON = "horizon"
    """Moves the end; passes as long as the learning rates already used stay right."""
    TRAINING = "training"
    """Another training from here on: needs `run.on_change=continue`."""
    SHAPE = "shape"
    """What is stored no longer fits: never."""


EFFECTS: Mapping[str, Effect] = {
    "run": Effect.NONE,
    "run.seed": Effect.TRAINING,
    "train": Effect.TRAINING,
    "train.steps": Effect.HORIZON,
    "train.tokens": Effect.HORIZON,
    "train.stop_after": Effect.PASSES,
    "train.eval_every": Effect.PASSES,
    "train.eval_tokens": Effect.PASSES,
    "train.log_every": Effect.PASSES,
    "train.gc_every": Effect.PASSES,
    "model": Effect.SHAPE,
    "model.dropout": Effect.TRAINING,
    "model.init_from": Effect.TRAINING,
    "data": Effect.SHAPE,
    "data.path": Effect.PASSES,
    "data.validation_path": Effect.PASSES,
    "data.cache_dir": Effect.PASSES,
    "data.on_bad": Effect.PASSES,
    "data.max_document_bytes": Effect.PASSES,
    "tokenizer": Effect.SHAPE,
    "tokenizer.path": Effect.PASSES,
    "precision": Effect.TRAINING,
    "recompute": Effect.PASSES,
    "accumulation": Effect.TRAINING,
    "accumulation.micro_batch_size": Effect.PASSES,
    "attention": Effect.PASSES,
    "loss": Effect.PASSES,
    "compile": Effect.PASSES,
    "optimizer": Effect.TRAINING,
    "schedule": Effect.TRAINING,
    "parallelism": Effect.PASSES,
    "parallelism.compression": Effect.TRAINING,
    "checkpoint": Effect.PASSES,
    "tracker": Effect.PASSES,
    "profile": Effect.PASSES,
    "cluster": Effect.NONE,
    "launch": Effect.PASSES,
    "sweep": Effect.NONE,
    "evaluate": Effect.NONE,
    "generate": Effect.NONE,
    "prepare": Effect.NONE,
    "convert": Effect.NONE,
    "output": Effect.NONE,
}
"""Key or section → effect; the longest one that leads to a key counts. Files may move: what counts is their content, and the
loader compares that itself."""

_ABSENT = "(absent)"


@dataclass(frozen=True)
class Change:
    """One key whose value differs from the one the run was made with."""

    key: str
    old: Any
    new: Any

    @property
    def effect(self) -> Effect:
        known = effect_of(self.key)
        return Effect.TRAINING if known is Effect.PASSES and concerns_plugin(self.key, self.old, self.new) else known

    def __str__(self) -> str:
        return f"{self.key}: {show(self.old)} -> {show(self.new)}"


def effect_of(key: str) -> Effect:
    """Effect of a dotted key; a key no row leads to counts as training."""
    parts = key.split(".")
    rows = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((EFFECTS[row] for row in rows if row in EFFECTS), Effect.TRAINING)


def find_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """Keys of two plain resolved configs that differ and matter, in the order of the schema.

    A key that the old config lacks is younger than it and had the default's effect; one that the schema lost is reported as absent.
    Two spellings of one thing (`null`, and the default it stands for) do not differ.
    """
    defaults = {key: info.default for key, info in leaves().items()}
    before, after = ({**defaults, **dict(flatten(config))} for config in (old, new))
    changes = [Change(key, before[key], after.get(key, _ABSENT)) for key in before if before[key] != after.get(key, _ABSENT)]
    return tuple(change for change in changes if change.effect is not Effect.NONE and not _means_the_same(after, change))


def _means_the_same(config: Mapping[str, Any], change: Change) -> bool:
    """Whether the old value in place of the new one would make the very same frozen config."""
    if change.key not in config:
        return False
    try:
        return config_from_wire({**config, change.key: change.old}) == config_from_wire(config)
    except ConfigError:
        return False


def with_settled_precision(changes: tuple[Change, ...], old: str, new: str) -> tuple[Change, ...]:
    """The changes with that of the precision as plans settled it: `auto` may have become another one on another machine."""
    others = tuple(change for change in changes if change.key != "precision.kind")
    return others if old == new else (*others, Change("precision.kind", old, new))


def refuse_changes(
    changes: tuple[Change, ...], *, keep_going: bool, horizon: Problem | None, where: str, origins: Mapping[str, str]
) -> list[Problem]:
    """Problems of the changes that do not pass, one each.

    Args:
        changes: from `find_changes`.
        keep_going: `run.on_change=continue`.
        horizon: from `check_horizon`.
        where: the run folder, for the text.
        origins: dotted key → where it was set.
    """
    problems = [] if horizon is None else [horizon]
    for change in changes:
        back = f"{change.key}={show(change.old)}"
        told = f"{show(change.old)} -> {show(change.new)} in {where}"
        what, origin = f"{change.key}={show(change.new)}", origins.get(change.key, "")
        if change.effect is Effect.SHAPE:
            rule = f"{told}: the saved weights and data position do not fit another model, tokenizer or data"
            problems.append(Problem(what, rule, f"{back}, or another run.name", origin))
        elif change.effect is Effect.TRAINING and not keep_going:
            rule = f"{told}: a resumed run goes on as it began"
            problems.append(Problem(what, rule, f"{back}, run.on_change=continue, or another run.name", origin))
    return problems


def check_horizon(old: SchedulePlan, new: SchedulePlan, *, reached: int, keep_going: bool) -> Problem | None:
    """Whether a run at update `reached` may end elsewhere: its learning rates so far must be those of the new schedule as well.

    They are under `constant` and `wsd` if the warm-up of both schedules is as long (`auto` follows the length of the run) and,
    under `wsd`, the decay of neither has begun.
    """
    what = f"train.steps={new.steps}"
    if new.steps < reached:
        return Problem(
            what, f"the run has already made {reached} updates", f"train.steps={reached} or more, or another run.name"
        )
    if keep_going or old.steps == new.steps:
        return None
    if old.kind in (ScheduleKind.CONSTANT, ScheduleKind.WSD):
        update = _first_difference(old, new, reached)
        if update is None:
            return None
        before, after = learning_rate(old, update), learning_rate(new, update)
        rule = (
            f"{old.steps} -> {new.steps}: the learning rate of update {update} was {before:.3g} and would have been {after:.3g}"
            f" (warm-up {old.warmup_steps} -> {new.warmup_steps}{_decay_starts(old, new)}); the run is at {reached}"
        )
    else:
        rule = f"{old.steps} -> {new.steps}: under schedule={old.kind} the length decides on every learning rate after warm-up"
    return Problem(what, rule, f"train.steps={old.steps}, run.on_change=continue, or another run.name")


def _first_difference(old: SchedulePlan, new: SchedulePlan, reached: int) -> int | None:
    """The first of the updates 1 … `reached` that has another learning rate in the new schedule; None if there is none.

    Both are straight lines between their corners, so where they agree at each corner and right behind it they agree everywhere.
    """
    corners = {corner for plan in (old, new) for corner in (plan.warmup_steps, plan.steps - plan.decay_steps, plan.steps)}
    updates = {1, reached} | corners | {corner + 1 for corner in corners}
    within = sorted(update for update in updates if 1 <= update <= reached)
    return next((update for update in within if learning_rate(old, update) != learning_rate(new, update)), None)


def _decay_starts(old: SchedulePlan, new: SchedulePlan) -> str:
    if old.kind is not ScheduleKind.WSD:
        return ""
    return f", decay after update {old.steps - old.decay_steps} -> {new.steps - new.decay_steps}"
