"""The schema as a table: every key with its documentation, type, range and legal words, by dotted name.

`--help`, completion, error messages and the tests that walk every key all read this table and nothing else.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from llmtrain.config.key_info import KeyInfo, ValueKind, walk
from llmtrain.config.plugins import owner, schema_class

__all__ = ["KeyInfo", "ValueKind", "choice_key", "keys_of", "leaves", "path_keys", "sections"]


@cache
def leaves() -> Mapping[str, KeyInfo]:
    """Every key of the schema, those of installed plugins included, in the order of `--cfg job`, by dotted name."""
    return types.MappingProxyType({info.name: _with_reader(info) for info in walk(schema_class())})


@cache
def sections() -> frozenset[str]:
    """Dotted names that hold keys, e.g. `model` and `model.attention`."""
    parents = [name.split(".") for name in leaves()]
    return frozenset(".".join(parts[:depth]) for parts in parents for depth in range(1, len(parts)))


def path_keys() -> list[str]:
    """Keys that name what a run reads, those of installed plugins included."""
    return [name for name, info in leaves().items() if info.path]


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


def _with_reader(info: KeyInfo) -> KeyInfo:
    """A key of a plugin is read where that plugin is chosen."""
    plugin = owner(info.name)
    if plugin is None or info.name == plugin.chooser:
        return info
    return replace(info, chooser=plugin.chooser, kinds=(plugin.word,))
