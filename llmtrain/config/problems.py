"""The problems that a name can have, in one wording for command line, files and saved configs."""

from __future__ import annotations

from collections.abc import Collection

from llmtrain.config.errors import Problem
from llmtrain.config.keys import choice_key, keys_of
from llmtrain.config.suggest import either, nearest_keys, nearest_words


def no_such_key(name: str, shown: str, origin: str) -> Problem:
    """A key that is not in the schema."""
    cure = either(nearest_keys(name)) or "llmtrain --help lists all groups and sections"
    return Problem(f"{name}={shown}" if shown else name, "no such group, section or key", cure, origin)


def is_a_section(name: str, shown: str, origin: str) -> Problem:
    """A value given to a section as a whole."""
    keys = keys_of(name)
    return Problem(f"{name}={shown}", f"a section with keys of its own: {', '.join(keys)}", f"{name}.{keys[0]}=…", origin)


def no_such_option(group: str, option: str, options: Collection[str], origin: str) -> Problem:
    """An option that no folder has: known to a later version, misspelt, or from nowhere."""
    info = choice_key(group)
    listed = f"{group}={either(options)}" if options else f"leave out {group}"
    if not options or (info is not None and option in info.later):
        return Problem(f"{group}={option}", "not available in this version", listed, origin)
    near = nearest_words(option, options)
    cure = f"{group}={either(near)}" if near else listed
    return Problem(f"{group}={option}", f"the options of {group} are {', '.join(options)}", cure, origin)
