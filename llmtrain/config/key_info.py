"""What is known about one key, read from the dataclass field that declares it."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Union


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
    """One leaf of the schema; the fields are those of `declare.key` plus what its annotation says."""

    name: str
    kind: ValueKind
    optional: bool
    """Whether `null` is legal; it means "not given"."""
    auto: bool
    """Whether a number or switch may be left open with the word `auto`."""
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
    """Values of `chooser` with which this key is read; empty = all of them."""
    chooser: str
    """Dotted name of the key that decides whether this one is read."""
    path: bool
    """Whether it names a file or folder that a run reads."""
    built: bool

    @property
    def section(self) -> str:
        """The dotted name without its last part; empty for a key at the root."""
        return self.name.rpartition(".")[0]

    @property
    def switch(self) -> str:
        """What is typed before `=` and one of `kinds`: the section where its options are named after its kinds, else `chooser`."""
        section, _, last = self.chooser.rpartition(".")
        return section if last == "kind" and "." not in section else self.chooser

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


def walk(cls: type, prefix: str = "") -> Iterator[KeyInfo]:
    """Every key of a dataclass and of those inside it, in order, by dotted name.

    Raises:
        KeyError, TypeError, NameError: a field that `declare.key` did not make, or of a type no key has.
    """
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        name, hint = prefix + item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from walk(hint, f"{name}.")
        else:
            yield _leaf(name, hint, item)


def value_of(wire: Any, name: str) -> Any:
    """The value of a key in an instance of the schema, by its dotted name."""
    return functools.reduce(getattr, name.split("."), wire)


def _leaf(name: str, hint: Any, item: dataclasses.Field[Any]) -> KeyInfo:
    optional = auto = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = typing.get_args(hint)
        optional, auto = type(None) in members, str in members and bool({int, bool} & set(members))
        hint = members[0]
    origin = typing.get_origin(hint)
    kind = ValueKind.LIST if origin is list else ValueKind.MAP if origin is dict else _KINDS[hint]
    default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    chooser = f"{name.rpartition('.')[0]}.kind" if item.metadata["kinds"] else ""
    return KeyInfo(name=name, kind=kind, optional=optional, auto=auto, default=default, chooser=chooser, **item.metadata)
