"""References between keys: `train.eval_every=${checkpoint.every}`.

Only keys can be referred to. Hydra's resolvers (`${oc.env:HOME}`, `${now:%H}`) are refused: a config that reads the environment or
the clock is another config on every rank and at every resume.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmtrain.config.keys import leaves, sections
from llmtrain.config.suggest import either, nearest_keys
from llmtrain.config.values import Raw, Refused, convert, show

# An escaped dollar, a reference to a key, or any other opening.
_REFERENCE = re.compile(r"\\\$\{|\$\{\s*(?P<key>[A-Za-z_][\w.]*)\s*\}|\$\{(?P<other>[^}]*)")


class Unresolved(Exception):
    """The value a reference points at was refused itself, which is reported there."""


def has_reference(value: Any) -> bool:
    """Whether a scalar holds `${`, escaped or not."""
    text = value.text if isinstance(value, Raw) else value
    return isinstance(text, str) and "${" in text


def resolve(key: str, values: Mapping[str, Any], trail: tuple[str, ...] = ()) -> Any:
    """What `key` holds once its references are followed.

    Args:
        key: a leaf of the schema.
        values: every leaf with its converted value, or as written where it has references; a key that is absent was refused.
        trail: keys being resolved, to find circles.

    Raises:
        Refused: it refers to no key, to itself, or to something the key cannot hold.
        Unresolved: it refers to a key that was refused.
    """
    if key not in values:
        raise Unresolved(key)
    value = values[key]
    if not has_reference(value):
        return value
    if key in trail:
        raise Refused(f"refers to itself: {' → '.join([*trail, key])}", f"give {key} a value")
    text = value.text if isinstance(value, Raw) else str(value)
    whole = _REFERENCE.fullmatch(text)
    if whole is not None and whole["key"] is not None:
        found = _target(whole, values, (*trail, key))
        if isinstance(found, list) or (found is None and leaves()[key].optional):
            return convert(leaves()[key], found)
        return convert(leaves()[key], Raw(_spelled(found, whole)))
    replaced = _REFERENCE.sub(lambda match: _replacement(match, values, (*trail, key)), text)
    return convert(leaves()[key], Raw(replaced))


def _replacement(match: re.Match[str], values: Mapping[str, Any], trail: tuple[str, ...]) -> str:
    escaped = match["key"] is None and match["other"] is None
    return "${" if escaped else _spelled(_target(match, values, trail), match)


def _spelled(value: Any, match: re.Match[str]) -> str:
    """A value as it would be typed in place of the reference."""
    if value is None:
        raise Refused(f"{match['key']} is not given, so there is nothing to refer to", f"{match['key']}=VALUE")
    return value if isinstance(value, str) else show(value)


def _target(match: re.Match[str], values: Mapping[str, Any], trail: tuple[str, ...]) -> Any:
    """The value one reference stands for."""
    name = match["key"]
    if name is None:
        what = "resolvers are not run" if ":" in match["other"] else "not a reference"
        raise Refused(
            f"{match[0]}…: {what}; only keys can be referred to, as ${{section.key}}", r"\${ for the characters themselves"
        )
    if name in sections():
        raise Refused(f"${{{name}}} is a section; only keys can be referred to", f"${{{name}.KEY}}")
    if name not in leaves():
        near = [f"${{{key}}}" for key in nearest_keys(name) if key in leaves()]
        raise Refused(f"${{{name}}} refers to no key", either(near) or r"\${ for the characters themselves")
    return resolve(name, values, trail)
