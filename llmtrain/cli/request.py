"""What verbs share: composing the config they were given and finding the run folder they were pointed at."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.verbs import VERBS, Verb
from llmtrain.config.compose import Composed, compose_config
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.suggest import either, nearest_words
from llmtrain.config.sweep import split_word
from llmtrain.dist.world import read_launch

RUN_FILE = "config.yaml"
"""The file that makes a folder a run folder."""


def compose(arguments: Arguments) -> Composed:
    """The config of this command line.

    Raises:
        ConfigError: any problem of the config, a key the verb does not read, or several processes for a verb that is one.
    """
    verb = VERBS[arguments.verb]
    refuse_unread(verb, arguments.words, multirun=arguments.multirun)
    composed = compose_config(
        arguments.words,
        config_name=arguments.config_name,
        config_dirs=arguments.config_dirs,
        positions=arguments.positions,
    )
    if not (verb.on_ranks or arguments.cfg):
        _refuse_ranks(verb, composed, os.environ)
    return composed


def refuse_unread(verb: Verb, words: Sequence[str], *, multirun: bool = False) -> None:
    """Raise ConfigError for words that would be ignored: every one is named, with who reads it."""
    keys = {word: split_word(word).key for word in words}
    problems = [Problem(word, _what_is_read(verb, key), _reader(word)) for word, key in keys.items() if not verb.reads(key)]
    if verb.reads("sweep") and not multirun:
        rule = "only with -m, which runs every combination of the values of a sweep"
        sweeping = [word for word, key in keys.items() if key.partition(".")[0] == "sweep"]
        problems += [Problem(word, rule, f"leave it out, or llmtrain -m {shlex.quote(word)}") for word in sweeping]
    if problems:
        raise ConfigError(*problems)


def _refuse_ranks(verb: Verb, composed: Composed, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where several processes were started, or are asked for, to do the work of one."""
    rule = f"{verb.name} runs in one process"
    launched = read_launch(environ, None)
    if launched.world_size > 1:
        cure = f"llmtrain {verb.name} by itself, without torchrun or srun"
        raise ConfigError(
            Problem(f"{launched.source}={launched.world_size}", f"{rule}: each of these would do the whole work", cure)
        )
    nproc = composed.config.launch.nproc or 1
    # A file may say how a training is launched; a verb that does not read that has no reason to refuse it.
    if nproc > 1 and verb.reads("launch.nproc"):
        raise ConfigError(Problem(f"launch.nproc={nproc}", rule, "launch.nproc=1", composed.origins.get("launch.nproc", "")))


def _what_is_read(verb: Verb, key: str) -> str:
    if verb.sections is None:
        return f"{verb.name} reads neither {', '.join(verb.unread[:-1])} nor {verb.unread[-1]}"
    if key.partition(".")[0] in verb.sections:
        return f"{verb.name} does not read {', '.join(verb.unread)}"
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
