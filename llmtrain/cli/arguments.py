"""The command line's grammar: verb, run folders, overrides and a handful of options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain.cli.verbs import DEFAULT_VERB, NOT_AVAILABLE, VERBS, Verb
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.keys import leaves, sections
from llmtrain.config.schema import GROUPS
from llmtrain.config.suggest import either, nearest_words

SHELLS = ("bash", "zsh", "fish")

OPTIONS = {
    "--help": "this page; with a verb, section or key (`--help optimizer`): its keys",
    "--version": "print the version",
    "--cfg": "job: print the composed config instead of running, with where each key was set",
    "--resolve": "with --cfg job: values only, as config.yaml of a run folder holds them",
    "--multirun": "run every combination of swept values, sweep.jobs at a time",
    "--config-dir": "folder with options of your own, laid out like configs/; may be given more than once",
    "--config-name": "file with the defaults list, in place of train",
    "--completion": f"print the completion script for {', '.join(SHELLS)}",
}
FLAGS = {"--help": "help", "--version": "version", "--resolve": "resolve", "--multirun": "multirun"}
"""Options without a value, and the field each sets."""
SHORT = {"-h": "--help", "-m": "--multirun"}
_EXAMPLES = {1: "runs/NAME", 2: "hf:FOLDER runs/NAME"}
"""How the folders of a verb that takes so many are typed."""
COMPLETE = "--complete"
"""What the completion scripts call; not for people."""
VALUES: dict[str, tuple[str, ...]] = {
    "--cfg": ("job",),
    "--completion": SHELLS,
    "--config-dir": (),
    "--config-name": (),
    COMPLETE: (),
}
"""Options with a value: the words it may be; empty = any."""


@dataclass
class Arguments:
    """A parsed command line; filled in by `parse_arguments` and only read afterwards."""

    verb: str = DEFAULT_VERB
    verb_given: bool = False
    folders: list[Path] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Place of each of `words` on the command line, from 1."""
    """Overrides, in the order they were typed."""
    help: bool = False
    help_topic: str | None = None
    version: bool = False
    cfg: bool = False
    resolve: bool = False
    multirun: bool = False
    config_dirs: list[Path] = field(default_factory=list)
    config_name: str = "train"
    completion: str | None = None
    complete: str | None = None

    @property
    def runs_verb(self) -> bool:
        """Whether a verb is to be carried out, and not a page about it printed."""
        return not (self.help or self.version or self.completion or self.complete is not None)


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Read the words after the program's name.

    A word without `=` that is no option is the verb if it is the first one, else a run folder.

    Raises:
        ConfigError: an unknown verb or option (names the nearest one), an option without its value, folders the verb does not take.
    """
    parsed = Arguments()
    words = iter(enumerate(argv, start=1))
    for position, word in words:
        if word.startswith("-") and word != "-":
            _take_option(parsed, word, position, words)
        elif "=" in word or word.startswith("~"):
            parsed.words.append(word)
            parsed.positions.append(position)
        elif parsed.help and parsed.help_topic is None:
            parsed.help_topic = word
        elif parsed.verb_given:
            parsed.folders.append(Path(word))
        else:
            parsed.verb, parsed.verb_given = _verb(word, position), True
    if parsed.runs_verb:
        _check_together(parsed)
    return parsed


def _take_option(parsed: Arguments, word: str, position: int, words: Iterator[tuple[int, str]]) -> None:
    """Store one option; the value of `--name value` is taken from the words that follow."""
    name, has_value, value = word.partition("=")
    name = SHORT.get(name, name)
    origin = f"command line, word {position}"
    if name not in OPTIONS and name != COMPLETE:
        cure = either(nearest_words(name, OPTIONS)) or "llmtrain --help lists the options; everything else is key=value"
        raise ConfigError(Problem(word, "no option of this name", cure, origin))
    if name in FLAGS:
        if has_value:
            raise ConfigError(Problem(word, "takes no value", name, origin))
        setattr(parsed, FLAGS[name], True)
        return
    if not has_value:
        _, value = next(words, (0, ""))
        if not value and name != COMPLETE:
            raise ConfigError(Problem(word, "needs a value", f"{name} {either(VALUES[name]) or 'VALUE'}", origin))
    if VALUES[name] and value not in VALUES[name]:
        raise ConfigError(Problem(f"{name} {value}", f"one of {', '.join(VALUES[name])}", either(VALUES[name]), origin))
    _store_value(parsed, name, value)


def _store_value(parsed: Arguments, name: str, value: str) -> None:
    if name == "--cfg":
        parsed.cfg = True
    elif name == "--config-dir":
        parsed.config_dirs.append(Path(value))
    elif name == "--config-name":
        parsed.config_name = value.removesuffix(".yaml")
    elif name == "--completion":
        parsed.completion = value
    else:
        parsed.complete = value


def _verb(word: str, position: int) -> str:
    if word in VERBS and VERBS[word].built:
        return word
    origin = f"command line, word {position}"
    ready = [verb.name for verb in VERBS.values() if verb.built]
    if word in VERBS:
        raise ConfigError(Problem(word, NOT_AVAILABLE, f"the verbs of this version: {', '.join(ready)}", origin))
    if "/" in word or Path(word).is_dir():
        cure = f"llmtrain evaluate {word}, llmtrain generate {word}; training goes on with run.name={Path(word).name}"
        raise ConfigError(Problem(word, "the first word without `=` is a verb, run folders follow it", cure, origin))
    if word in leaves() or word in sections() or word in GROUPS:
        form = f"{word}=OPTION or {word}.KEY=VALUE" if word not in leaves() else f"{word}=VALUE"
        cure = f"{form}; llmtrain --help {word} tells what is legal"
        raise ConfigError(Problem(word, "the first word without `=` is a verb", cure, origin))
    cure = either(nearest_words(word, ready)) or f"one of {', '.join(ready)}"
    raise ConfigError(Problem(word, "no verb of this name", cure, origin))


def _check_together(parsed: Arguments) -> None:
    """Rules between words; a page (`--help`, `--version`) is shown whatever else was typed."""
    verb = VERBS[parsed.verb]
    if parsed.resolve and not parsed.cfg:
        raise ConfigError(Problem("--resolve", "only with --cfg job", "--cfg job --resolve"))
    if parsed.multirun and (parsed.verb != "train" or parsed.cfg):
        told = "--cfg job" if parsed.cfg else f"verb {parsed.verb}"
        raise ConfigError(Problem("--multirun", f"only for the verb train, here {told}", "one command for each job"))
    if len(parsed.folders) != len(verb.folders) and not (parsed.cfg and not parsed.folders):
        raise ConfigError(_wrong_folders(verb, parsed.folders))


def _wrong_folders(verb: Verb, folders: Sequence[Path]) -> Problem:
    told = " ".join(map(str, folders)) or "no folder"
    if verb.folders:
        return Problem(
            told, f"{verb.name} takes {' '.join(verb.folders)}", f"llmtrain {verb.name} {_EXAMPLES[len(verb.folders)]}"
        )
    cure = f"run.name={folders[0].name} run.dir={folders[0].parent}, which resumes that run"
    return Problem(told, f"{verb.name} takes no run folder", cure)
