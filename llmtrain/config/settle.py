"""From everything that was set to one checked value per key: conversion, pairs, references, kinds, rules.

All problems are collected; a key whose value was refused keeps its default so that the rest can still be checked, and rules that read
such a key are left out.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.config import schema
from llmtrain.config.errors import Problem
from llmtrain.config.files import Entry, Setting
from llmtrain.config.keys import leaves, sections
from llmtrain.config.plugins import CHOOSERS, ENTRY_POINTS, SWITCHED, chosen, discover, installed, schema_class
from llmtrain.config.references import Unresolved, has_reference, resolve
from llmtrain.config.rules import PAIRS, check_rules
from llmtrain.config.suggest import either
from llmtrain.config.values import Refused, convert, show


@dataclass(frozen=True)
class Settled:
    """The outcome; `config` is only meaningful without problems."""

    config: schema.Config
    origins: dict[str, str]
    """Where each key that is not a default was set."""
    problems: tuple[Problem, ...]

    @property
    def wire(self) -> dict[str, Any]:
        """The config as plain nested dicts; sections of plugins that it does not use are not part of it."""
        wire, used = dataclasses.asdict(self.config), chosen(self.config)
        for one in installed():
            if one not in used:
                wire[one.plugin.group].pop(one.plugin.name, None)
        return wire


def settle(settings: Sequence[Setting], *, references: bool = True) -> Settled:
    """Give every key its value.

    Args:
        settings: weakest source first; the last setting of a key counts, but every one must be legal.
        references: whether `${key}` is followed; not in a saved config, whose values are final.
    """
    counting = _without_replaced(settings)
    values: dict[str, Any] = {name: copy.copy(info.default) for name, info in leaves().items()}
    problems = list(discover().problems)
    for setting in counting:
        try:
            written = references and has_reference(setting.value)
            value = setting.value if written else convert(leaves()[setting.key], setting.value)
            values[setting.key] = {**values[setting.key], **value} if isinstance(setting.value, Entry) else value
        except Refused as refused:
            values.pop(setting.key, None)
            problems.append(_refusal(setting, refused))
    given = {setting.key: setting for setting in counting}
    if references:
        values, unresolved = _follow_references(values, given)
        problems += unresolved
    problems += _of_other_kinds(values, given)
    refused_keys = leaves().keys() - values.keys()
    for name in refused_keys:
        values[name] = copy.copy(leaves()[name].default)
    config = _build(schema_class(), "", values)
    origins = {name: setting.origin for name, setting in given.items()}
    return Settled(config, origins, (*problems, *check_rules(config, without=refused_keys, origins=origins)))


def flatten(wire: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested dict; what is no section of the schema is not entered."""
    for name, value in wire.items():
        full = f"{prefix}{name}"
        if full in sections() and isinstance(value, Mapping):
            yield from flatten(value, f"{full}.")
        else:
            yield full, value


def absent_plugins(saved: Mapping[str, Any]) -> dict[str, Problem]:
    """What belongs to plugins that a saved config uses and that are not installed, by its names in the flattened config."""
    found: dict[str, Problem] = {}
    for group, last in CHOOSERS.items():
        name = f"{group}.{last}"
        info, word = leaves()[name], saved.get(name)
        if isinstance(word, str) and word not in (*info.choices, *info.later):
            problem = _absent(group, word, f"{name}={word}")
            found |= {name: problem, f"{group}.{word}": problem}
    for name, value in saved.items():
        group, _, word = name.partition(".")
        if group == SWITCHED and name not in leaves() and isinstance(value, Mapping) and value.get("enabled"):
            found[name] = _absent(group, word, f"{name}.enabled=true")
    return found


def _absent(group: str, word: str, what: str) -> Problem:
    rule = f"neither a part of llmtrain nor of an installed plugin: no package here registers {word} for {group}"
    return Problem(what, rule, f"install the package with the plugin {word} (entry point group {ENTRY_POINTS})")


def _without_replaced(settings: Sequence[Setting]) -> list[Setting]:
    """Drop what a stronger source has made moot: one key of a pair where it gives the other, keys of a kind where it takes another.

    Two that contradict each other within one source both stay, for the rules to refuse.
    """
    replaced: list[Setting] = []
    for pair in PAIRS:
        given = [setting for setting in settings if setting.key in pair and setting.value is not None]
        replaced += [setting for setting in given if setting.source != given[-1].source and setting.key != given[-1].key]
    taken = {setting.key: position for position, setting in enumerate(settings)}
    for position, setting in enumerate(settings):
        info = leaves()[setting.key]
        stronger = taken.get(info.chooser, -1)
        other_source = stronger > position and settings[stronger].source != setting.source
        kind = settings[stronger].value
        if info.kinds and other_source and not has_reference(kind) and show(kind) not in info.kinds:
            replaced.append(setting)
    return [setting for setting in settings if setting not in replaced]


def _refusal(setting: Setting, refused: Refused) -> Problem:
    return Problem(f"{setting.key}={show(setting.value)}", refused.rule, refused.cure, setting.origin)


def _follow_references(values: dict[str, Any], given: Mapping[str, Setting]) -> tuple[dict[str, Any], list[Problem]]:
    """The values with every reference replaced; a key whose reference leads nowhere is missing from them."""
    resolved, problems = dict(values), []
    for name, value in values.items():
        if name in given and has_reference(value):
            del resolved[name]
            try:
                resolved[name] = resolve(name, values)
            except Refused as refused:
                problems.append(_refusal(given[name], refused))
            except Unresolved:
                continue
    return resolved, problems


def _of_other_kinds(values: Mapping[str, Any], given: Mapping[str, Setting]) -> Iterator[Problem]:
    """Keys that were set although what is chosen does not read them."""
    for name, setting in given.items():
        info = leaves()[name]
        kind = values.get(info.chooser)
        if not info.kinds or kind is None or show(kind) in info.kinds or values.get(name, info.default) == info.default:
            continue
        reader = f"{info.switch}={either(info.kinds)}"
        rule = f"only {reader} reads it; {info.chooser} is {show(kind)}"
        cure = f"{reader}, or {f'{name}=null' if info.optional else f'leave out {name}'}"
        yield Problem(f"{name}={show(setting.value)}", rule, cure, setting.origin)


def _build(cls: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    """A dataclass of the schema from dotted names."""
    hints = typing.get_type_hints(cls)
    arguments = {}
    for item in dataclasses.fields(cls):
        name, hint = prefix + item.name, hints[item.name]
        arguments[item.name] = _build(hint, f"{name}.", values) if dataclasses.is_dataclass(hint) else values[name]
    return cls(**arguments)
