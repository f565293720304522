"""`--cfg job`: the composed config instead of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose
from llmtrain.config.compose import to_yaml
from llmtrain.config.keys import sections


def run(arguments: Arguments) -> int:
    """Print every key with its value; without --resolve also where each key that is no default was set."""
    composed = compose(arguments)
    if composed.config.output == "json":
        origins = {} if arguments.resolve else {"origins": dict(composed.origins)}
        print(json.dumps({"config": composed.wire, **origins}, indent=2))
    elif arguments.resolve:
        print(to_yaml(composed.wire), end="")
    else:
        print("\n".join(with_origins(composed.wire, composed.origins)))
    return 0


def with_origins(wire: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Lines of the config as YAML; a key that was set carries its origin as a comment.

    Args:
        wire: a resolved config or a section of it.
        origins: by dotted key.
        prefix: dotted name of the section with a final dot; empty for the whole config.
    """
    for name, value in wire.items():
        key = prefix + name
        if key in sections():
            yield f"{name}:"
            yield from (f"  {line}" for line in with_origins(value, origins, f"{key}."))
            continue
        lines = to_yaml({name: value}).splitlines()
        if key in origins and len(lines) == 1:
            yield f"{lines[0]}  # {origins[key]}"
        elif key in origins:
            # A comment at the end of the first line would become part of a text that goes on.
            yield from (f"# {origins[key]}", *lines)
        else:
            yield from lines
