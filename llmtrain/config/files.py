"""The YAML files of a config: where options are found, what each file sets and on which line.

Files are read as nodes, not as values: a node knows its line, and its scalar keeps the spelling that `values.convert` needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config import schema
from llmtrain.config.errors import Problem
from llmtrain.config.keys import leaves, sections
from llmtrain.config.plugins import installed
from llmtrain.config.problems import is_a_section, no_such_key
from llmtrain.config.values import Raw, show

_NULLS = ("", "~", "null", "Null", "NULL")
NO_KEYS = ("defaults", "format_version")
"""Names at the top of a file that set nothing: its defaults list, and what a run folder writes into its `config.yaml`."""

# `override /precision`, `optional local`, `experiment@_global_` → precision, local, experiment.
_DEFAULT = re.compile(r"((override|optional)\s+)*/?(?P<name>[^@]*)(@.*)?")


class Entry(dict[str, Any]):
    """One entry of a key that is a map, as `launch.env.NAME=VALUE` sets it; the others stay."""


@dataclass(frozen=True)
class Setting:
    """One key as one source sets it."""

    key: str
    value: Any
    """As `values.convert` takes it."""
    origin: str
    """What a user reads: `command line, word 3` or `configs/precision/bf16.yaml:2`."""
    source: str
    """The file, or `command line`."""


@dataclass(frozen=True)
class Default:
    """One entry of a file's defaults list."""

    name: str
    """A group, or a file when `options` is None."""
    options: tuple[str, ...] | None
    origin: str


@dataclass
class Document:
    """What a YAML file says."""

    settings: list[Setting] = field(default_factory=list)
    defaults: list[Default] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Folders:
    """Where options and primary files are looked up: the package's own folder, then those of `--config-dir`."""

    extra: tuple[Path, ...] = ()

    @classmethod
    def of(cls, config_dirs: Iterable[Path]) -> Folders:
        """The folders of `--config-dir`, each once."""
        by_place = {Path(folder).resolve(): Path(folder) for folder in config_dirs}
        return cls(tuple(folder for place, folder in by_place.items() if place != cls().shipped.resolve()))

    @property
    def shipped(self) -> Path:
        """The package's own options; found from the package, so that any working folder and a wheel will do."""
        return Path(__file__).resolve().parents[1] / "configs"

    @property
    def all(self) -> tuple[Path, ...]:
        """Every folder, the package's own first."""
        return (self.shipped, *self.extra)

    @property
    def _labelled(self) -> list[tuple[Path, str]]:
        """Every folder with the name that messages call it by."""
        return [(self.shipped, "configs"), *((folder, str(folder)) for folder in self.extra)]

    def find(self, name: str) -> list[tuple[Path, str]]:
        """Every file called `<name>.yaml`, each with its label."""
        found = [(folder / f"{name}.yaml", f"{label}/{name}.yaml") for folder, label in self._labelled]
        return [(path, label) for path, label in found if path.is_file()]

    def primary_names(self) -> list[str]:
        """Files that can be the primary one."""
        return [path.stem for folder, _ in self._labelled for path in sorted(folder.glob("*.yaml"))]

    def label(self, path: Path) -> str:
        """The label of a file, from its path."""
        for folder, label in self._labelled:
            if path.resolve().is_relative_to(folder.resolve()):
                return f"{label}/{path.resolve().relative_to(folder.resolve())}"
        return str(path)

    def options(self, group: str) -> list[Path]:
        """The files of a group's options."""
        return [path for folder in self.all for path in sorted((folder / group).glob("*.yaml"))]


def group_options(config_dirs: Sequence[Path] = ()) -> dict[str, dict[str, str]]:
    """The options of every group, each with its one-line summary (`saves …; costs …; changes training: …`); plugins come last."""
    folders, found = Folders.of(config_dirs), {}
    for group in schema.GROUPS:
        files = {path.stem: _summary(path) for path in folders.options(group)}
        found[group] = files | {one.plugin.name: one.plugin.summary for one in installed(group) if one.plugin.name not in files}
    return found


def _summary(path: Path) -> str:
    """The first line that is no Hydra header (`# @package …`), without its `#`; empty if it is no comment."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((line for line in lines if line.strip() and not line.startswith("# @")), "")
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def read_document(path: Path, label: str, package: str) -> Document:
    """Read a config file whose keys stand below `package` (empty for a file of whole sections).

    Unknown keys, and whatever `parse` finds, are part of the result.
    """
    node, problem = parse(path, label)
    document = Document(problems=[] if problem is None else [problem])
    if node is not None:
        for key, value in node.value:
            if key.value == "defaults":
                document.defaults += _read_defaults(value, label)
        own = [(key, value) for key, value in node.value if key.value not in NO_KEYS]
        _read_mapping(own, package, label, document)
    return document


def parse(path: Path, label: str) -> tuple[yaml.MappingNode | None, Problem | None]:
    """The mapping a file consists of, None for an empty file, or what is wrong with its form."""
    try:
        with path.open(encoding="utf-8") as stream:
            node = yaml.compose(stream, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        return None, unreadable(error, label)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value in _NULLS):
        return None, None
    if not isinstance(node, yaml.MappingNode):
        return None, Problem(label, "a config file holds sections and keys", "key: value", f"{label}:1")
    fault = _fault(node, set(), set())
    return (node, None) if fault is None else (None, replace(fault[1], origin=f"{label}:{fault[0].start_mark.line + 1}"))


def unreadable(error: Exception, label: str) -> Problem:
    """The problem of a file that cannot be read; names the line where its YAML breaks."""
    mark = getattr(error, "problem_mark", None)
    rule = getattr(error, "problem", None) or " ".join(str(error).split())
    return Problem(label, f"not readable: {rule}", "", label if mark is None else f"{label}:{mark.line + 1}")


def _fault(node: yaml.Node, above: set[int], done: set[int]) -> tuple[yaml.Node, Problem] | None:
    """The first key that stands twice in its mapping, or alias that stands inside what it names, at any depth.

    `above` holds the nodes around this one, `done` those already looked at through another alias.
    """
    if id(node) in above:
        return node, Problem("&anchor", "an alias inside what it names", "write the value out")
    if isinstance(node, yaml.ScalarNode) or id(node) in done:
        return None
    seen: set[str] = set()
    above, found = {*above, id(node)}, None
    for item in node.value:
        key, value = item if isinstance(node, yaml.MappingNode) else (None, item)
        name = "" if key is None else show(_node_value(key))
        if name and name in seen:
            return key, Problem(name, "a key stands once in its section", "leave one of them out")
        seen.add(name)
        found = found or _fault(value, above, done)
    done.add(id(node))
    return found


def _read_mapping(entries: Iterable[tuple[yaml.Node, yaml.Node]], prefix: str, label: str, document: Document) -> None:
    for key_node, node in entries:
        origin = f"{label}:{key_node.start_mark.line + 1}"
        name = show(_node_value(key_node))
        full = f"{prefix}.{name}" if prefix else name
        shown = "" if isinstance(node, yaml.MappingNode) else show(_node_value(node))
        if "." in name or (full not in leaves() and full not in sections()):
            document.problems.append(no_such_key(full, shown, origin))
        elif full in leaves():
            document.settings.append(Setting(full, _node_value(node), origin, label))
        elif isinstance(node, yaml.MappingNode):
            _read_mapping(node.value, full, label, document)
        elif _node_value(node) is not None:
            document.problems.append(is_a_section(full, shown, origin))


def _node_value(node: yaml.Node, depth: int = 0) -> Any:
    """A node as `values.convert` takes it; what is nested deeper than any key holds is only hinted at."""
    if isinstance(node, yaml.ScalarNode):
        plain = node.style is None
        return None if plain and node.value in _NULLS else Raw(node.value) if plain else str(node.value)
    if depth > 0:
        return Raw("…")
    if isinstance(node, yaml.SequenceNode):
        return [_node_value(item, depth + 1) for item in node.value]
    return {show(_node_value(key, depth + 1)): _node_value(value, depth + 1) for key, value in node.value}


def _read_defaults(node: yaml.Node, label: str) -> list[Default]:
    """Entries of a defaults list as far as they have a usual form; Hydra says what is wrong with the others."""
    entries = []
    for item in node.value if isinstance(node, yaml.SequenceNode) else []:
        origin = f"{label}:{item.start_mark.line + 1}"
        if isinstance(item, yaml.ScalarNode) and item.value != "_self_":
            entries.append(Default(_default_name(item.value), None, origin))
        elif isinstance(item, yaml.MappingNode):
            for key, value in item.value:
                options = [value] if isinstance(value, yaml.ScalarNode) else value.value
                words = tuple(option.value for option in options if isinstance(option, yaml.ScalarNode))
                entries.append(Default(_default_name(show(_node_value(key))), words, origin))
    return entries


def _default_name(text: str) -> str:
    match = _DEFAULT.fullmatch(text)
    return match["name"] if match else text
