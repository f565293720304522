"""What verbs share: composing the config they were given and finding the run folder they were pointed at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.verbs import VERBS
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
    sections = VERBS[arguments.verb].sections
    if sections is not None:
        refuse_unread(arguments.verb, sections, arguments.words)
    return compose_config(arguments.words, config_name=arguments.config_name, config_dirs=arguments.config_dirs)


def refuse_unread(verb: str, sections: Sequence[str], words: Sequence[str]) -> None:
    """A verb on a run folder takes model, data and precision from there; saying them again would be ignored, so it is an error."""
    unread = [word for word in words if section_of(word) not in sections]
    if unread:
        *first, last = sections
        rule = f"{verb} reads {', '.join(first)} and {last} only; the rest comes from the run folder's {RUN_FILE}"
        raise ConfigError(*(Problem(word, rule, "leave it out") for word in unread))


def section_of(word: str) -> str:
    """Group or section an override belongs to: `+precision=bf16` → `precision`, `optimizer.lr=1` → `optimizer`."""
    return split_word(word).key.partition(".")[0]


def run_folder(arguments: Arguments) -> Path:
    """The run folder named on the command line.

    Raises:
        ConfigError: it is no run folder; names those that are there.
    """
    folder = arguments.folders[0]
    if (folder / RUN_FILE).is_file():
        return folder
    others = run_folders(folder.parent)
    close = nearest_words(folder.name, [other.name for other in others]) or [other.name for other in others[-3:]]
    cure = either(folder.parent / name for name in close) or "train a run first: llmtrain run.name=NAME"
    raise ConfigError(Problem(str(folder), f"not a run folder: it has no {RUN_FILE}", cure))


def run_folders(parent: Path) -> list[Path]:
    """Run folders directly below `parent`, oldest first."""
    files = parent.glob(f"*/{RUN_FILE}") if parent.is_dir() else ()
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime)]
