"""`--help`: the verbs, the groups with their options, and the keys of one section."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain import __version__
from llmtrain.cli.arguments import OPTIONS, SHORT, Arguments
from llmtrain.cli.text import name_rows, page_width
from llmtrain.cli.verbs import DEFAULT_VERB, NOT_AVAILABLE, PHASES, VERBS
from llmtrain.config.compose import group_options
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.keys import KeyInfo, leaves
from llmtrain.config.schema import GROUPS
from llmtrain.config.suggest import either, nearest_keys, nearest_words

COMMON_KEYS = (
    "run.name",
    "train.steps",
    "data.path",
    "data.sequence_length",
    "accumulation.global_batch_size",
    "accumulation.micro_batch_size",
    "optimizer.lr",
    "checkpoint.every",
    "launch.device",
    "output",
)
EXIT_CODES = (
    "0 done · 1 a claim failed or a job of a sweep did · 2 config or plan · 65 data · 74 storage · 75 saved, start again to go on · "
    "77 numerics · 78 out of memory · 70 fault of llmtrain · 130 interrupted with nothing to save"
)


def run(arguments: Arguments) -> int:
    """Print the overview, or the page of the topic."""
    topic = arguments.help_topic or (arguments.verb if arguments.verb_given else None)
    width = page_width()
    lines = overview(arguments.config_dirs, width) if topic is None else topic_page(topic, arguments.config_dirs, width)
    print("\n".join(lines))
    return 0


def overview(config_dirs: Sequence[Path], width: int) -> list[str]:
    """Usage, verbs by phase, groups with their options, the keys used most, options, exit codes."""
    return [
        f"llmtrain {__version__}: pretrain language models from one config",
        "",
        f"usage      llmtrain [verb] [run folders] [overrides]      without a verb: {DEFAULT_VERB}",
        *_indented(
            "overrides  group=option or +group=option, section.key=value; llmtrain --help SECTION lists the keys", width
        ),
        "",
        *_verbs(width),
        "",
        "groups and their options",
        *_groups(GROUPS, config_dirs, width),
        "",
        "keys used most",
        *name_rows([(name, _short(leaves()[name])) for name in COMMON_KEYS], width),
        "",
        "options",
        *name_rows([(_spellings(name), doc) for name, doc in OPTIONS.items()], width),
        "",
        *_indented(f"exit codes {EXIT_CODES}", width),
    ]


def topic_page(topic: str, config_dirs: Sequence[Path], width: int) -> list[str]:
    """Everything known about a verb, a section (with its options, if it is a group) or one key.

    Raises:
        ConfigError: there is no such thing.
    """
    keys = leaves()
    wanted = {name: info for name, info in keys.items() if name == topic or name.startswith(f"{topic}.")}
    lines = []
    if topic in VERBS:
        verb = VERBS[topic]
        usage = " ".join(["llmtrain", topic, *verb.folders, "[overrides]"])
        lines += [usage, f"    {verb.summary if verb.built else NOT_AVAILABLE}", ""]
    if topic in GROUPS:
        lines += ["options", *_groups((topic,), config_dirs, width), ""]
    for name, info in wanted.items():
        lines += [name, *textwrap.wrap(_full(info), width, initial_indent="    ", subsequent_indent="    ")]
    if not lines:
        close = dict.fromkeys((*nearest_words(topic, VERBS), *nearest_keys(topic)))
        cure = either(f"llmtrain --help {name}" for name in close) or "llmtrain --help"
        raise ConfigError(Problem(f"--help {topic}", "no verb, section or key of this name", cure))
    return lines


def _verbs(width: int) -> Iterator[str]:
    for phase in PHASES:
        rows = [(verb.name, verb.summary) for verb in VERBS.values() if verb.phase == phase and verb.built]
        yield from name_rows(rows, width, phase)
    later = ", ".join(verb.name for verb in VERBS.values() if not verb.built)
    yield f"  {NOT_AVAILABLE}: {later}"


def _groups(groups: Sequence[str], config_dirs: Sequence[Path], width: int) -> Iterator[str]:
    options = group_options(config_dirs)
    for group in groups:
        yield from name_rows(list(options.get(group, {}).items()) or [("", "no options in this version")], width, group)


def _indented(text: str, width: int) -> list[str]:
    """A label and its text, wrapped to stand below each other."""
    return textwrap.wrap(text, width, subsequent_indent=" " * 11)


def _spellings(option: str) -> str:
    return ", ".join([option, *(short for short, long in SHORT.items() if long == option)])


def _short(info: KeyInfo) -> str:
    return f"{info.doc} [{_shown(info)}]"


def _full(info: KeyInfo) -> str:
    """Documentation, legal values, default, and where the key applies or that it is not built."""
    parts = [info.doc, info.describe(), f"default {_shown(info)}"]
    if info.kinds:
        parts.append(f"only with {info.switch}={' or '.join(info.kinds)}")
    if info.later:
        parts.append(f"{NOT_AVAILABLE}: {', '.join(info.later)}")
    if not info.built:
        parts.append(NOT_AVAILABLE)
    return "; ".join(parts)


def _shown(info: KeyInfo) -> str:
    """A default as it would be typed."""
    return json.dumps(info.default) if not isinstance(info.default, str) else info.default
