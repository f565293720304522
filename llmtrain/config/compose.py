"""From the words of a command line to a checked, frozen config.

Precedence, weakest first: defaults of the schema, the model of `model.init_from`, option files, the primary file, the experiment, options chosen on the command
line, keys set on the command line. Hydra decides which files take part (its defaults lists); every value is then looked up in the
schema, and all problems come in one report, each with the file line or the word that caused it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from llmtrain.config import schema
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.files import Default, Folders, Setting, group_options, parse, read_document, unreadable
from llmtrain.config.freeze import build_config
from llmtrain.config.inherit import inherited
from llmtrain.config.keys import leaves
from llmtrain.config.problems import no_such_key, no_such_option
from llmtrain.config.settle import Settled, absent_plugins, flatten, settle
from llmtrain.config.suggest import either, nearest_words
from llmtrain.config.typed import Config
from llmtrain.config.words import STACKING, Request, read_words

__all__ = ["Composed", "compose_config", "config_from_wire", "group_options", "to_yaml"]


@dataclass(frozen=True)
class Composed:
    """A config with the story of where it came from."""

    config: Config
    wire: dict[str, Any]
    """Every key with its final value, as plain nested dicts; what `config.yaml` of a run folder holds."""
    words: tuple[str, ...]
    options: tuple[str, ...]
    """`--config-dir` and `--config-name` as they have to be typed to compose the same again; empty for the package's own."""
    origins: Mapping[str, str]
    """By dotted key, where it was set (`command line, word 3`, `configs/precision/bf16.yaml:2`); defaults are absent."""
    groups: Mapping[str, str | None]
    """By group, the option that was chosen; those of a group with several are joined by commas."""


def compose_config(
    words: Sequence[str],
    *,
    config_name: str = "train",
    config_dirs: Sequence[Path] = (),
    positions: Sequence[int] | None = None,
) -> Composed:
    """Compose a config.

    Args:
        words: overrides (`+precision=bf16`, `train.steps=10`), without verb, options and run folders.
        config_name: the primary file, in the package's folder or one of `config_dirs`.
        config_dirs: folders with further options and primary files.
        positions: place of each word on the command line, for messages; None = the words are all of it.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    folders = Folders.of(config_dirs)
    options = {group: [path.stem for path in folders.options(group)] for group in schema.GROUPS}
    request = read_words(words, options, positions)
    layers = _read_layers(config_name.removesuffix(".yaml"), folders, request, options)
    below = inherited([*layers.settings, *request.settings])
    settled = settle([*below.settings, *layers.settings, *request.settings])
    config = _checked([*request.problems, *layers.problems, *below.problems, *settled.problems], settled)
    return Composed(
        config=config,
        wire=settled.wire,
        words=tuple(words),
        options=(*(f"--config-dir={folder}" for folder in config_dirs), *_name_option(config_name)),
        origins=types.MappingProxyType(settled.origins),
        groups=types.MappingProxyType(layers.groups | {group: ",".join(names) for group, names in request.named.items()}),
    )


def _name_option(config_name: str) -> list[str]:
    return [] if config_name == "train" else [f"--config-name={config_name}"]


def config_from_wire(wire: Mapping[str, Any]) -> Config:
    """The config that `Composed.wire` stands for, e.g. read back from `config.yaml`.

    Keys may be nested or dotted; one that is absent has its default.

    Raises:
        ConfigError: unknown keys, illegal values and broken rules, as when composing.
    """
    problems, settings, saved = [], [], dict(flatten(wire))
    absent = absent_plugins(saved)
    for name, value in saved.items():
        if name in absent:
            problems.append(absent[name])
        elif name in leaves():
            settings.append(Setting(name, value, origin="", source="saved config"))
        else:
            problems.append(no_such_key(name, "" if isinstance(value, Mapping) else str(value), ""))
    settled = settle(settings, references=False)
    return _checked([*problems, *settled.problems], settled)


def _checked(problems: Sequence[Problem], settled: Settled) -> Config:
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return build_config(settled.config)


def to_yaml(wire: Mapping[str, Any]) -> str:
    """A resolved config as YAML; reading it gives the same values, text that looks like a number included."""
    text: str = yaml.safe_dump(dict(wire), sort_keys=False, allow_unicode=True, width=128)
    return text


@dataclass
class _Layers:
    """What the files of a config say."""

    settings: list[Setting] = field(default_factory=list)
    """Weakest file first."""
    groups: dict[str, str | None] = field(default_factory=lambda: dict.fromkeys(schema.GROUPS))
    problems: list[Problem] = field(default_factory=list)


def _read_layers(primary: str, folders: Folders, request: Request, options: Mapping[str, Sequence[str]]) -> _Layers:
    """Read every file that takes part, in order of precedence."""
    chosen = [f"{group}/{option}" for group, names in request.options.items() for option in names]
    layers = _Layers(problems=_unusable(primary, chosen, folders))
    if layers.problems:
        return layers
    listed = _listed_defaults(primary, folders, set())
    entries = [*listed, *(entry for name in chosen for entry in _listed_defaults(name, folders, set()))]
    layers.problems = [problem for entry in entries for problem in _entry_problems(entry)]
    if layers.problems:
        return layers
    try:
        files = _defaults_list(primary, _overrides(request, listed), folders)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        layers.problems.append(_hydra_problem(error, primary, folders, entries, options))
        return layers
    for file in _chosen_last(files, chosen):
        _read_file(file, folders, layers)
    return layers


def _unusable(primary: str, chosen: Sequence[str], folders: Folders) -> list[Problem]:
    """What keeps Hydra from starting: folders or a primary file that are not there, files that are no YAML."""
    problems = [Problem(f"--config-dir={folder}", "no such folder") for folder in folders.extra if not folder.is_dir()]
    if not folders.find(primary):
        near = nearest_words(primary, folders.primary_names())
        cure = f"--config-name={either(near)}" if near else ""
        problems.append(Problem(f"--config-name={primary}", f"no {primary}.yaml in the config folders", cure))
    for name in (primary, *chosen):
        for path, label in folders.find(name):
            problem = parse(path, label)[1]
            problems += [] if problem is None else [problem]
    return problems


def _listed_defaults(name: str, folders: Folders, entered: set[str]) -> list[Default]:
    """Entries of a file's defaults list and of the files it names, without those of options."""
    if name in entered:
        return []
    entered.add(name)
    entries = [entry for path, label in folders.find(name)[:1] for entry in read_document(path, label, "").defaults]
    nested = [below for entry in entries if entry.options is None for below in _listed_defaults(entry.name, folders, entered)]
    return [*entries, *nested]


def _entry_problems(entry: Default) -> Iterator[Problem]:
    """What no defaults list may say although Hydra would go along: several options of a group, references to who knows what."""
    options = entry.options or ()
    shown = f"{entry.name}: [{', '.join(options)}]"
    if entry.name in schema.GROUPS and len(options) > 1 and entry.name != STACKING:
        yield Problem(shown, f"{entry.name} has one option at a time", "leave all but one out", entry.origin)
    if "${" in shown:
        yield Problem(shown, "a defaults list names files; references are for values", "", entry.origin)


def _overrides(request: Request, listed: Sequence[Default]) -> list[str]:
    """The chosen groups as Hydra takes them: `g=x` replaces an entry of the defaults lists, `+g=x` is for a group without one."""
    groups = {entry.name for entry in listed if entry.options is not None}
    words = []
    for group, names in request.options.items():
        value = names[0] if len(names) == 1 else f"[{','.join(names)}]"
        words.append(f"{'' if group in groups else '+'}{group}={value}")
    return words


def _defaults_list(primary: str, overrides: Sequence[str], folders: Folders) -> list[ResultDefault]:
    """The files of the config in Hydra's order, with the section each belongs to."""
    # The folder of the primary file comes first: Hydra looks for that file before it knows the other folders.
    main = next(folder for folder in folders.all if (folder / f"{primary}.yaml").is_file())
    others = [QuotedString(f"file://{folder.resolve()}", Quote.single) for folder in folders.all if folder != main]
    search_path = f"hydra.searchpath=[{','.join(other.with_quotes() for other in others)}]"
    with initialize_config_dir(config_dir=str(main.resolve()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        found = loader.compute_defaults_list(primary, [*overrides, search_path], RunMode.RUN)
    return [file for file in found.defaults if file.config_path and not file.config_path.startswith("hydra/")]


def _chosen_last(files: Sequence[ResultDefault], chosen: Sequence[str]) -> list[ResultDefault]:
    """Move what the command line chose behind everything else, the experiment first: a word beats a file, whatever that file sets."""
    parents = {file.config_path or "": file.parent or "" for file in files}

    def rank(file: ResultDefault) -> int:
        name = file.config_path or ""
        while name in parents and name not in chosen:
            name = parents[name]
        return 0 if name not in chosen else 1 if name.startswith("experiment/") else 2

    return sorted(files, key=rank)


def _read_file(file: ResultDefault, folders: Folders, layers: _Layers) -> None:
    name = file.config_path or ""
    found = folders.find(name)
    if len(found) > 1:
        labels = " and ".join(label for _, label in found)
        layers.problems.append(Problem(name, f"in two folders: {labels}", "rename one of them"))
    path, label = found[0]
    document = read_document(path, label, file.package or "")
    layers.settings += document.settings
    layers.problems += document.problems
    layers.problems += [problem for entry in document.defaults for problem in _entry_problems(entry)]
    group, _, option = name.partition("/")
    if group in schema.GROUPS and option and not (file.parent or "").startswith(f"{group}/"):
        before = layers.groups[group]
        layers.groups[group] = option if before is None else f"{before},{option}"


def _hydra_problem(
    error: Exception, primary: str, folders: Folders, entries: Sequence[Default], options: Mapping[str, Sequence[str]]
) -> Problem:
    """What Hydra found wrong with the defaults lists, in our form."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        missing = str(error.missing_cfg_file)
        group, _, option = missing.rpartition("/")
        origin = next((entry.origin for entry in entries if entry.name == group and option in (entry.options or ())), "")
        origin = origin or next((entry.origin for entry in entries if entry.name == missing), "")
        if group in schema.GROUPS:
            return no_such_option(group, option, options[group], origin)
        return Problem(f"{missing}.yaml", "no such file in the config folders", "", origin)
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return unreadable(error, folders.label(Path(mark.name)))
    rule = str(error).strip().split("\n")[0] or type(error).__name__
    cure = "defaults: [train, _self_] in the primary file" if "No match in the defaults list" in rule else ""
    return Problem(f"--config-name={primary}", rule, cure)
