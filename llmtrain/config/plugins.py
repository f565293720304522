"""Options that installed packages add: found by entry point, checked, and made part of the schema.

A package names a `Plugin` in the entry point group `llmtrain.plugins`. Its name becomes one more word of its group's choosing key
(`attention.backend`, `optimizer.kind`, …), its options a section of that group (`attention.NAME`), and from then on the schema, the
command line, `--help`, completion and saved configs know it like any other. Without such packages the schema is that of `schema.py`.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from llmtrain.config import schema
from llmtrain.config.declare import AUTO, key
from llmtrain.config.errors import ConfigError, LlmtrainError, Problem
from llmtrain.config.key_info import ValueKind, value_of, walk

ENTRY_POINTS = "llmtrain.plugins"
CHOOSERS: Mapping[str, str] = {"attention": "backend", "optimizer": "kind", "data": "kind", "loss": "kind"}
"""Groups that have one option at a time and take plugins, each with the key of its section that chooses."""
SWITCHED = "tracker"
"""The group whose plugins are each switched on by a key of their own, `tracker.NAME.enabled`."""
GROUPS = (*CHOOSERS, SWITCHED)
OWN_KEYS: Mapping[str, tuple[str, ...]] = {"optimizer": ("beta1", "beta2", "eps")}
"""Keys of a group that only its built-in kinds read."""
SHARED_KEYS: Mapping[str, tuple[str, ...]] = {"data": ("validation_fraction", "cache_dir")}
"""Keys of some built-in kinds of a group that are those of its plugins too."""
DEVICES = ("cpu", "cuda")

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SUMMARY = re.compile(r"saves [^;]+; costs [^;]+; changes training: (no|rounding|yes)")


@dataclass(frozen=True)
class NoOptions:
    """Options of a plugin without any."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One option of a group; docs/plugins.md says what `build` is given and returns in each group."""

    group: str
    name: str
    """Lower-case letters, digits and underscores; the word that chooses it."""
    summary: str
    """`saves …; costs …; changes training: no | rounding | yes`, for `--help`."""
    build: Callable[..., Any]
    """Makes what the group needs; only here are torch and other large packages imported."""
    options: type = NoOptions
    """A dataclass whose fields are made by `key`."""
    devices: tuple[str, ...] = DEVICES
    """Where it runs; not for data and trackers, which compute nothing there."""


@dataclass(frozen=True)
class Installed:
    """A plugin and where it comes from."""

    plugin: Plugin
    package: str
    """Name and version."""
    entry_point: str

    @property
    def section(self) -> str:
        """Dotted name of its options."""
        return f"{self.plugin.group}.{self.plugin.name}"

    @property
    def chooser(self) -> str:
        """Dotted name of the key that chooses it."""
        group = self.plugin.group
        return f"{self.section}.enabled" if group == SWITCHED else f"{group}.{CHOOSERS[group]}"

    @property
    def word(self) -> str:
        """The value of `chooser` that does."""
        return "true" if self.plugin.group == SWITCHED else self.plugin.name


@dataclass(frozen=True)
class Discovery:
    """What the installed packages offer; a plugin that is part of a problem is left out."""

    plugins: tuple[Installed, ...]
    problems: tuple[Problem, ...]


@cache
def discover() -> Discovery:
    """Import the modules that hold plugins, once a process; what goes wrong is told when a config is composed."""
    from importlib import metadata  # here: `--version` need not wait for it

    found, problems = [], []
    entries = metadata.entry_points(group=ENTRY_POINTS)
    for entry in sorted(entries, key=lambda entry: (entry.name, entry.value)):
        package = "a package without a name" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        place = f"entry point {entry.name} = {entry.value} in {ENTRY_POINTS}"
        try:
            installed = Installed(entry.load(), package, place)
            rule = "; ".join(_faults(installed.plugin))
        except Exception as error:  # whatever a stranger's module raises
            rule = f"cannot be imported: {type(error).__name__}: {error}"
        if rule:
            problems.append(Problem(f"plugin {entry.name} of {package}", rule, f"repair or uninstall {package}", place))
        else:
            found.append(installed)
    times = Counter(one.section for one in found)
    twice = [one for one in found if times[one.section] > 1]
    problems += [_same_name(one, twice) for one in twice]
    return Discovery(tuple(one for one in found if one not in twice), tuple(problems))


def installed(group: str | None = None) -> tuple[Installed, ...]:
    """The plugins that can be chosen, of one group or of all."""
    return tuple(one for one in discover().plugins if group in (None, one.plugin.group))


def find(group: str, name: str) -> Installed | None:
    """The plugin of this name, or None."""
    return next((one for one in installed(group) if one.plugin.name == name), None)


def owner(name: str) -> Installed | None:
    """The plugin whose section a dotted key lies in, or None."""
    return next((one for one in installed() if name.startswith(f"{one.section}.")), None)


def chosen(wire: schema.Config) -> list[Installed]:
    """The plugins a wire config uses."""
    return [one for one in installed() if value_of(wire, one.chooser) in (one.word, True)]


def build(one: Installed, *arguments: Any) -> Any:
    """What the plugin makes of its options and whatever else its group is given.

    Raises:
        ConfigError: a package it needs is missing.
    """
    with blame(one):
        return one.plugin.build(*arguments)


@contextmanager
def blame(one: Installed) -> Iterator[None]:
    """What goes wrong inside is the plugin's: a missing package is a ConfigError, anything else gets a note of where it is from."""
    try:
        yield
    except ImportError as error:
        rule = f"the plugin of {one.package} cannot be used: {error}"
        raise ConfigError(Problem(f"{one.chooser}={one.word}", rule, f"install what {one.package} needs")) from error
    except LlmtrainError:
        raise
    except Exception as error:
        error.add_note(f"raised by the plugin of {one.package}, {one.entry_point}")
        raise


def makers(group: str, options: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """By name, the plugins of a group that are used, as functions of what the group is given besides `Config.plugins`."""
    return {one.plugin.name: partial(build, one, options[one.section]) for one in installed(group) if one.section in options}


def concerns_plugin(name: str, *values: Any) -> bool:
    """Whether a key belongs to a plugin, installed or not, or one of its values chooses one."""
    group, _, rest = name.partition(".")
    if group not in CHOOSERS:
        return False
    own = {item.name: item for item in dataclasses.fields(_section(group))}
    if rest.partition(".")[0] not in own:
        return True
    return rest == CHOOSERS[group] and not set(values) <= set(own[rest].metadata["choices"])


def plugin_options(section: Any, one: Installed) -> Any:
    """The options of a plugin in the section of its group, an instance of its own class."""
    return getattr(section, one.plugin.name) if hasattr(section, one.plugin.name) else one.plugin.options()


@cache
def schema_class() -> type[schema.Config]:
    """The wire form with the sections and words of the installed plugins."""
    grown = {group: _grown(group, installed(group)) for group in GROUPS if installed(group)}
    if not grown:
        return schema.Config
    fields = [(group, cls, dataclasses.field(default_factory=cls)) for group, cls in grown.items()]
    return dataclasses.make_dataclass("Config", fields, bases=(schema.Config,))


def _grown(group: str, plugins: Sequence[Installed]) -> type:
    """The section of a group with one more word and one more section for each plugin."""
    section = _section(group)
    hints, own = typing.get_type_hints(section), {item.name: item for item in dataclasses.fields(section)}
    fields: list[tuple[str, Any, Any]] = []
    if group in CHOOSERS:
        chooser = own[CHOOSERS[group]]
        words, names = chooser.metadata["choices"], tuple(one.plugin.name for one in plugins)
        changed = {chooser.name: {"choices": (*words, *names)}}
        changed |= {name: {"kinds": words} for name in OWN_KEYS.get(group, ())}
        changed |= {name: {"kinds": (*own[name].metadata["kinds"], *names)} for name in SHARED_KEYS.get(group, ())}
        fields += [(name, hints[name], _again(own[name], **metadata)) for name, metadata in changed.items()]
    for plugin in (one.plugin for one in plugins):
        options = _switched(plugin.options) if group == SWITCHED else plugin.options
        if dataclasses.fields(options):
            fields.append((plugin.name, options, dataclasses.field(default_factory=options)))
    return dataclasses.make_dataclass(section.__name__, fields, bases=(section,))


def _section(group: str) -> type:
    """The section of a group as `schema.py` has it."""
    section: type = typing.get_type_hints(schema.Config)[group]
    return section


def _again(item: dataclasses.Field[Any], **changed: Any) -> Any:
    """A key declared once more with other metadata."""
    return dataclasses.field(default=item.default, metadata={**item.metadata, **changed})


def _switched(options: type) -> type:
    """Options with the key that switches their plugin on."""
    frozen = options.__dataclass_params__.frozen  # type: ignore[attr-defined]
    enabled = ("enabled", bool, key(False, "use it"))
    return dataclasses.make_dataclass(options.__name__, [enabled], bases=(options,), frozen=frozen)


def _same_name(one: Installed, others: Sequence[Installed]) -> Problem:
    packages = sorted(other.package for other in others if other.section == one.section)
    rule = f"{' and '.join(packages)} both register {one.plugin.name} for {one.plugin.group}"
    return Problem(f"plugin {one.section} of {one.package}", rule, "uninstall one of them", one.entry_point)


def _faults(plugin: Any) -> Iterator[str]:
    """Why something that an entry point names cannot be an option."""
    if not isinstance(plugin, Plugin):
        yield f"is a {type(plugin).__name__} and not a llmtrain.plugins.Plugin"
        return
    if plugin.group not in GROUPS:
        yield f"plugins are for {', '.join(GROUPS)}, not for {plugin.group!r}"
        return
    if not _NAME.fullmatch(plugin.name):
        yield f"its name is lower-case letters, digits and underscores, not {plugin.name!r}"
    elif plugin.name in _taken(plugin.group):
        yield f"{plugin.group} has a {plugin.name} already"
    if not _SUMMARY.fullmatch(plugin.summary):
        yield "its summary has the form `saves …; costs …; changes training: no | rounding | yes`"
    if not plugin.devices or set(plugin.devices) - set(DEVICES):
        yield f"its devices are some of {', '.join(DEVICES)}"
    elif plugin.group in (SWITCHED, "data") and plugin.devices != DEVICES:
        yield f"devices are asked for of attention, optimizer and loss, not of {plugin.group}"
    yield from _option_faults(plugin)


def _taken(group: str) -> set[str]:
    """Names in a group that are something else."""
    names = {item.name for item in dataclasses.fields(_section(group))} | {AUTO, "none"}
    for item in dataclasses.fields(_section(group)):
        names |= {*item.metadata.get("choices", ()), *item.metadata.get("later", ())}
    return names


def _option_faults(plugin: Plugin) -> Iterator[str]:
    if not (isinstance(plugin.options, type) and dataclasses.is_dataclass(plugin.options)):
        yield "its options are a dataclass"
        return
    try:
        infos = list(walk(plugin.options))
    except (KeyError, TypeError, NameError) as error:
        names = ", ".join(item.name for item in dataclasses.fields(plugin.options))
        yield (
            f"its options ({names}) are declared by llmtrain.plugins.key and hold numbers, switches, text, lists or maps of text"
            f" ({type(error).__name__}: {error})"
        )
        return
    for info in infos:
        if info.kinds or info.later or not info.built:
            yield f"{info.name}: kinds, later and built are for the keys of llmtrain itself"
        if info.path and info.kind is not ValueKind.TEXT:
            yield f"{info.name}: path is for text, not for a {info.kind}"
        if plugin.group == SWITCHED and info.name == "enabled":
            yield "`enabled` is added by llmtrain"
