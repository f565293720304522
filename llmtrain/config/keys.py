"""The schema as a table: every key with its documentation, type, range and legal words, by dotted name.

`--help`, completion, error messages and the tests that walk every key all read this table and nothing else.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Union

from llmtrain.config import schema


class ValueKind(StrEnum):
    """What a key holds, apart from `null` and `auto`."""

    WHOLE = "whole number"
    NUMBER = "number"
    SWITCH = "true or false"
    TEXT = "text"
    LIST = "list of words"
    MAP = "map of words"


_KINDS = {int: ValueKind.WHOLE, float: ValueKind.NUMBER, bool: ValueKind.SWITCH, str: ValueKind.TEXT}


@dataclass(frozen=True)
class KeyInfo:
    """One leaf of the schema; the fields are those of `schema.key` plus what its annotation says."""

    name: str
    kind: ValueKind
    optional: bool
    """Whether `null` is legal; it means "not given"."""
    auto: bool
    """Whether a number may be left to the plan with the word `auto`."""
    default: Any
    doc: str
    unit: str
    ge: float | None
    gt: float | None
    le: float | None
    lt: float | None
    choices: tuple[str, ...]
    later: tuple[str, ...]
    kinds: tuple[str, ...]
    built: bool

    @property
    def section(self) -> str:
        """The dotted name without its last part; empty for a key at the root."""
        return self.name.rpartition(".")[0]

    def describe(self) -> str:
        """The legal values in words, e.g. `a whole number >= 1 (updates), or null`."""
        if self.kind in (ValueKind.LIST, ValueKind.TEXT) and self.choices:
            text = "one of " if self.kind is ValueKind.TEXT else "a list of "
            text += ", ".join(self.choices)
        elif self.kind is ValueKind.SWITCH:
            text = "true or false"
        else:
            text = f"a {self.kind}" if self.kind is not ValueKind.TEXT else "text"
        bounds = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        limits = " and ".join(f"{sign} {bound:.15g}" for sign, bound in bounds if bound is not None)
        text += f" {limits}" if limits else ""
        text += f" ({self.unit})" if self.unit else ""
        words = [word for word, legal in (("auto", self.auto), ("null", self.optional)) if legal]
        return f"{text}, or {' or '.join(words)}" if words else text


@cache
def leaves() -> Mapping[str, KeyInfo]:
    """Every key of the schema in the order of `--cfg job`, by dotted name."""
    return types.MappingProxyType({info.name: info for info in _walk(schema.Config, "")})


@cache
def sections() -> frozenset[str]:
    """Dotted names that hold keys, e.g. `model` and `model.attention`."""
    parents = [name.split(".") for name in leaves()]
    return frozenset(".".join(parts[:depth]) for parts in parents for depth in range(1, len(parts)))


def keys_of(section: str) -> list[str]:
    """Names of the keys inside a section, without the section's own name."""
    return [name.removeprefix(f"{section}.") for name in leaves() if name.startswith(f"{section}.")]


def choice_key(group: str) -> KeyInfo | None:
    """The key that an option of this group sets first (`precision.kind`, `attention.backend`); None if the group has no such key."""
    for name in ("kind", "backend", "kinds"):
        info = leaves().get(f"{group}.{name}")
        if info is not None:
            return info
    return None


def _walk(cls: type, prefix: str) -> typing.Iterator[KeyInfo]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        name, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _walk(hint, f"{name}.")
        else:
            yield _leaf(name, hint, item)


def _leaf(name: str, hint: Any, item: dataclasses.Field[Any]) -> KeyInfo:
    optional = auto = False
    if typing.get_origin(hint) is Union:
        members = typing.get_args(hint)
        optional, auto = type(None) in members, str in members and int in members
        hint = members[0]
    origin = typing.get_origin(hint)
    kind = ValueKind.LIST if origin is list else ValueKind.MAP if origin is dict else _KINDS[hint]
    default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return KeyInfo(name=name, kind=kind, optional=optional, auto=auto, default=default, **item.metadata)
