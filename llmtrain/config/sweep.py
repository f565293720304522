"""Values as Hydra's override grammar reads them, and the jobs of a sweep (`-m`).

The grammar decides what is quoted text, a list, a reference or several values to sweep over; scalars keep their spelling (`values.Raw`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString
from hydra.errors import HydraException

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.files import group_options
from llmtrain.config.keys import ValueKind, leaves
from llmtrain.config.values import Raw

MAX_JOBS = 10_000
_WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=@]*)(?P<package>@[^=]*)?(=(?P<text>.*))?", re.DOTALL)
_CHOICE = re.compile(r"\s*choice\((?P<inside>.*)\)\s*", re.DOTALL)
# Quoted text, an escaped character, a bracket or a comma; what lies between has no meaning for the split.
_MARK = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\\.|[\[\](){},]", re.DOTALL)


@dataclass(frozen=True)
class Word:
    """One word of the command line, cut into its parts."""

    sign: str
    """`+`, `++`, `~` or empty."""
    key: str
    package: str
    """From `@` on; empty as a rule."""
    text: str | None
    """What follows the first `=`; None without one."""


@dataclass(frozen=True)
class Several:
    """A value that stands for several: `a,b`, `choice(a,b)`, `range(1,4)`, `glob(*)`."""

    text: str
    parsed: Override

    def values(self, options: Sequence[str]) -> Iterator[str]:
        """Each value as one would type it alone; `options` are those of the group, for `glob`.

        Raises:
            HydraException, ValueError, ArithmeticError: it cannot be listed.
        """
        value = self.parsed.value()
        if isinstance(value, Glob):
            yield from value.filter(list(options))
            return
        if isinstance(value, ChoiceSweep) and not value.shuffle:
            choice = _CHOICE.fullmatch(self.text)
            pieces = _split(choice["inside"] if choice else self.text)
            if len(pieces) == len(value.list):
                yield from pieces
                return
        yield from self.parsed.sweep_string_iterator()


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    words: tuple[str, ...]
    """The command line of this run: one value per word, in the places where they were typed."""
    changed: dict[str, str]
    """The swept keys and groups with this run's value, as typed."""


def split_word(word: str) -> Word:
    """Cut `+group@package=value` apart; never fails."""
    match = _WORD.fullmatch(word)
    assert match is not None
    return Word(match["sign"] or "", match["key"].strip(), match["package"] or "", match["text"])


def read_value(key: str, text: str) -> Any:
    """What stands behind `key=`: `Raw`, quoted `str`, `None`, a list or dict of these, or `Several`.

    Text that the grammar cannot read is `Raw` too: a prompt may hold any character, and a number key says itself what it wants.
    """
    try:
        parsed = OverridesParser.create().parse_override(f"key={text}")
    except (HydraException, RecursionError):
        return Raw(text)
    if parsed.is_sweep_override():
        return Several(text, parsed)
    info = leaves().get(key)
    value = parsed._value
    if isinstance(value, (list, dict)):
        return Raw(text) if info is not None and info.kind is ValueKind.TEXT else _plain(value)
    # A backslash in bare text is the grammar's escape, so there its reading counts; else only the spelling is exact.
    return Raw(value) if isinstance(value, str) and "\\" in text else _plain(value, text)


def _plain(value: Any, text: str = "") -> Any:
    """A parsed value without the grammar's classes; `text` is the spelling of a scalar, where it is known."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return None if value is None else Raw(text or str(value))


def expand_sweep(words: Sequence[str], *, config_dirs: Sequence[Path] = ()) -> list[Job]:
    """Every combination of the swept values; the last swept word changes fastest. Without any, one job.

    Raises:
        ConfigError: a sweep that has no values, cannot be listed or has more than `MAX_JOBS` jobs.
    """
    problems: list[Problem] = []
    axes: list[list[str]] = []
    swept: list[tuple[int, str]] = []
    for number, word in enumerate(words):
        parts = split_word(word)
        value = None if parts.text is None else read_value(parts.key, parts.text)
        if not isinstance(value, Several):
            axes.append([word])
            continue
        swept.append((number, parts.key))
        try:
            axes.append(_axis(word, value, list(group_options(config_dirs).get(parts.key, {}))))
        except (HydraException, ValueError, ArithmeticError) as error:
            cure = f"{parts.key}=A,B or {parts.key}=range(START,STOP,STEP)"
            problems.append(Problem(word, f"a sweep lists its values: {error}", cure, f"command line, word {number + 1}"))
    count = math.prod(len(axis) for axis in axes)
    if count > MAX_JOBS:
        problems.append(Problem(f"{count} combinations", f"a sweep has at most {MAX_JOBS} jobs", "sweep fewer keys or values"))
    if problems:
        raise ConfigError(*problems)
    return [Job(job, {key: split_word(job[number]).text or "" for number, key in swept}) for job in itertools.product(*axes)]


def _axis(word: str, several: Several, options: Sequence[str]) -> list[str]:
    """The word once for each of its values."""
    values = list(itertools.islice(several.values(options), MAX_JOBS + 1))
    if not values:
        raise ValueError("there is none")
    return [word.removesuffix(several.text) + value for value in values]


def _split(text: str) -> list[str]:
    """Pieces between the commas that stand outside quotes and brackets."""
    pieces, start, depth = [], 0, 0
    for mark in _MARK.finditer(text):
        sign = mark[0]
        depth += (sign in ("[", "(", "{")) - (sign in ("]", ")", "}"))
        if sign == "," and depth == 0:
            pieces.append(text[start : mark.start()].strip())
            start = mark.end()
    return [*pieces, text[start:].strip()]
