"""What verbs share: composing the config they were given and finding the run folder they were pointed at."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.verbs import VERBS, Verb
from llmtrain.config.compose import Composed, compose_config
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.suggest import either, nearest_words
from llmtrain.config.sweep import split_word

RUN_FILE = "config.yaml"
"""The file that makes a folder a run folder."""


def compose(arguments: Arguments) -> Composed:
    """The config of this command line.

    Raises:
        ConfigError: any problem of the config, or a key the verb does not read.
    """
    refuse_unread(VERBS[arguments.verb], arguments.words)
    return compose_config(
        arguments.words,
        config_name=arguments.config_name,
        config_dirs=arguments.config_dirs,
        positions=arguments.positions,
    )


def refuse_unread(verb: Verb, words: Sequence[str]) -> None:
    """Raise ConfigError for words that would be ignored: every one is named, with who reads it."""
    unread = [word for word in words if not verb.reads(split_word(word).key)]
    if unread:
        raise ConfigError(*(Problem(word, _what_is_read(verb), _reader(word)) for word in unread))


def _what_is_read(verb: Verb) -> str:
    if verb.sections is None:
        return f"{verb.name} reads neither {', '.join(verb.unread[:-1])} nor {verb.unread[-1]}"
    *first, last = verb.sections
    rule = f"{verb.name} reads {', '.join(first)} and {last} only"
    return f"{rule}; the rest comes from the run folder's {RUN_FILE}" if verb.folders else rule


def _reader(word: str) -> str:
    """The command that reads what a word sets, if a verb has a section of that name."""
    reader = VERBS.get(split_word(word).key.partition(".")[0])
    if reader is None or not reader.folders or not reader.built:
        return "leave it out"
    return f"leave it out, or llmtrain {reader.name} RUN_FOLDER {shlex.quote(word)}"


def run_folder(arguments: Arguments) -> Path:
    """The run folder named on the command line; no verb decides again what a run folder is.

    Raises:
        ConfigError: it is no run folder or cannot be looked into; names those that are near.
    """
    folder = arguments.folders[0]
    rule = f"not a run folder: it has no {RUN_FILE}"
    try:
        # `is_file` says no to what is not there, but not to a folder that may not be entered or a name nobody can have.
        if (folder / RUN_FILE).is_file():
            return folder
        below = run_folders(folder)
    except OSError as error:
        rule, below = f"it cannot be looked into: {error.strerror}", []
    raise ConfigError(Problem(str(folder), rule, _near(folder, below)))


def _near(folder: Path, below: Sequence[Path]) -> str:
    """Run folders that may have been meant: those inside (of a sweep), else those beside with a like name, else the newest."""
    try:
        beside = run_folders(folder.parent)
    except OSError:
        beside = []
    close = nearest_words(folder.name, [other.name for other in beside]) or [other.name for other in beside[-3:]]
    found = below[-3:] or [folder.parent / name for name in close]
    return either(found) or "train a run first: llmtrain run.name=NAME"


def run_folders(parent: Path) -> list[Path]:
    """Run folders directly below `parent`, oldest first.

    Raises:
        OSError: it may not be read.
    """
    files = parent.glob(f"*/{RUN_FILE}") if parent.is_dir() else ()
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime)]
