"""The override words of a command line: which keys they set and which options they choose.

Every word is looked up in the schema before anything is composed, so all mistakes are found together, whatever sign stands before a
word. `+` and `++` mean the same as no sign: an existing key is set, a group gets the one option named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmtrain.config import schema
from llmtrain.config.errors import Problem
from llmtrain.config.files import Entry, Setting
from llmtrain.config.keys import ValueKind, leaves, sections
from llmtrain.config.plugins import installed
from llmtrain.config.problems import is_a_section, no_such_key, no_such_option
from llmtrain.config.sweep import Several, Word, read_value, split_word
from llmtrain.config.values import Raw, show

COMMAND_LINE = "command line"
STACKING = "tracker"
"""The one group that may have several options at once."""


@dataclass
class Request:
    """What a command line asks for."""

    settings: list[Setting] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    """Options chosen by group, in the order typed; those of plugins, which have no file, are `settings`."""
    named: dict[str, list[str]] = field(default_factory=dict)
    """The same with those of plugins."""
    origins: dict[str, str] = field(default_factory=dict)
    """By group, the word that chose."""
    problems: list[Problem] = field(default_factory=list)


def read_words(words: Sequence[str], options: Mapping[str, Sequence[str]], positions: Sequence[int] | None = None) -> Request:
    """Look up every word.

    Args:
        options: names of each group's options.
        positions: place of each word on the command line, for messages; None = they are all there is.
    """
    request = Request()
    for number, word in zip(positions or range(1, len(words) + 1), words, strict=True):
        origin = f"{COMMAND_LINE}, word {number}"
        parts = split_word(word)
        known_problems = len(request.problems)
        problem = _form_problem(word, parts, origin)
        if problem is not None:
            request.problems.append(problem)
        elif parts.key in schema.GROUPS:
            _choose(parts.key, parts.text or "", origin, options, request)
        else:
            _set(parts.key, parts.text or "", origin, request)
        request.problems[known_problems:] = [
            replace(found, what=show(Raw(word))) for found in request.problems[known_problems:]
        ]
    return request


def _form_problem(word: str, parts: Word, origin: str) -> Problem | None:
    """A word that is no `key=value`, for whatever key."""
    known = parts.key in leaves() or parts.key in schema.GROUPS or parts.key in sections()
    if parts.sign == "~":
        info = leaves().get(parts.key)
        cure = f"{parts.key}=null" if info is not None and info.optional else f"leave out {parts.key}"
        return (
            Problem(word, "a config has all its keys; none can be removed", cure, origin) if known else _unknown(parts, origin)
        )
    if parts.text is None:
        cure = f"{parts.key}=VALUE" if known else ""
        return Problem(word, "a setting is written key=value", cure, origin)
    if parts.package:
        return Problem(word, "an option always goes to the section of its group", f"{parts.key}={parts.text}", origin)
    return None


def _unknown(parts: Word, origin: str) -> Problem:
    return no_such_key(parts.key, parts.text or "", origin)


def _set(key: str, text: str, origin: str, request: Request) -> None:
    parent = key.rpartition(".")[0]
    if key not in leaves() and parent in leaves() and leaves()[parent].kind is ValueKind.MAP:
        entry = Entry({key.removeprefix(f"{parent}."): Raw(text)})
        request.settings.append(Setting(parent, entry, origin, COMMAND_LINE))
    elif key in sections():
        request.problems.append(is_a_section(key, text, origin))
    elif key not in leaves():
        request.problems.append(no_such_key(key, text, origin))
    else:
        value = read_value(key, text)
        if isinstance(value, Several):
            request.problems.append(_needs_m(key, text, origin))
        else:
            request.settings.append(Setting(key, value, origin, COMMAND_LINE))


def _choose(group: str, text: str, origin: str, options: Mapping[str, Sequence[str]], request: Request) -> None:
    value = read_value(group, text)
    if isinstance(value, Several):
        request.problems.append(_needs_m(group, text, origin))
        return
    chosen = list(_option_names(value))
    files = options.get(group, ())
    plugins = {one.plugin.name: one for one in installed(group) if one.plugin.name not in files}
    known = [*files, *plugins]
    unknown = [option for option in chosen if option not in known]
    request.problems += [no_such_option(group, option, known, origin) for option in unknown]
    if unknown:
        return
    before = request.named.get(group, [])
    together = list(dict.fromkeys([*before, *chosen]))
    if len(together) > 1 and group != STACKING:
        rule = f"{group} has one option at a time, not {' and '.join(together)}"
        where = f"{request.origins[group]} and {origin.rpartition(', ')[2]}" if before else origin
        request.problems.append(Problem(f"{group}={text}", rule, f"{group}={together[-1]}", where))
        return
    request.named[group] = together
    request.origins[group] = origin
    if set(together) & set(files):
        request.options[group] = [option for option in together if option in files]
    for plugin in (plugins[option] for option in chosen if option in plugins):
        # First, so that any key of the command line is stronger, as it is than the keys of an option's file.
        request.settings.insert(0, Setting(plugin.chooser, Raw(plugin.word), origin, COMMAND_LINE))


def _option_names(value: Any) -> Iterator[str]:
    """Names of `bf16`, `[bf16]`, `[a,b]`; anything else is taken for one unknown name."""
    for item in value if isinstance(value, list) else [value]:
        yield show(item).strip()


def _needs_m(key: str, text: str, origin: str) -> Problem:
    info = leaves().get(key)
    cure = f"-m {key}={text}"
    if info is not None and info.kind is ValueKind.LIST:
        cure += f" to run once for each, or {key}=[{text}] for a list"
    elif info is not None and info.kind is ValueKind.TEXT:
        cure += f" to run once for each, or {key}=\"'{text}'\" for text with a comma"
    return Problem(f"{key}={text}", "several values are a sweep, which needs -m", cure, origin)
