"""How a key of the schema is declared: its default, documentation, range and legal words, kept beside the field."""

from __future__ import annotations

from dataclasses import field
from typing import Any

AUTO = "auto"

# Bounds of counts: beyond what anyone trains, small enough that no product or loop over divisors gets out of hand.
MAX_UPDATES = 2**40
MAX_TOKENS = 2**48
MAX_SEQUENCES = 2**24
MAX_BATCH_TOKENS = 2**36
MAX_WIDTH = 2**20
MAX_LAYERS = 2**12
MAX_ROWS = 2**24
MAX_RANKS = 2**20


def key(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] = (),
    later: tuple[str, ...] = (),
    kinds: tuple[str, ...] = (),
    path: bool = False,
    built: bool = True,
) -> Any:
    """Declare one key.

    Args:
        default: value when nobody sets the key; a list or dict is copied for each config.
        doc: one line for `--help`.
        unit: what a number counts.
        ge, gt, le, lt: bounds of a number (or of each number of a list).
        choices: the legal words of a text key; words in `later` are known but refused as not available in this version.
        kinds: the values of the section's `kind` that read this key; empty means all of them.
        path: whether a text names a file or folder that a run reads; the config it keeps has the whole path, for use from any folder.
        built: False for a key whose part does not exist yet; any value but the default is refused.
    """
    limits = dict(ge=ge, gt=gt, le=le, lt=lt, choices=choices, later=later)
    metadata = dict(doc=doc, unit=unit, kinds=kinds, path=path, built=built, **limits)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
