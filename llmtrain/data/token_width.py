"""Whether raw ids are read with the width they were written with: nothing in such a file says so, but the ids themselves do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem

SAMPLE_BYTES = 1 << 21
"""Of the beginning of a file."""
MIN_INTERLEAVED = 256
"""Fewer ids than this may alternate by chance."""
LARGEST_VOCABULARY = 1 << 22
"""No tokenizer has more tokens; a larger id is a wrong width."""
_TYPES = ("uint16", "uint32", "int32", "int64")


def check_width(path: Path, tokens: NDArray[Any], vocab_size: int) -> None:
    """Raise DataError if the beginning of a file of raw ids reads like ids of another width.

    Read too narrow, every second id is the upper half of one: zero, or as small as the vocabulary is large. Read too wide, two ids
    are one that no vocabulary has.
    """
    head = tokens[: SAMPLE_BYTES // tokens.dtype.itemsize]
    if not len(head):
        return
    too_narrow = _interleaved(head, vocab_size)
    if not too_narrow and 0 <= int(head.min()) and int(head.max()) < vocab_size:
        return
    fitting = [name for name in _TYPES if name != tokens.dtype.name and _fits(head, name, vocab_size)]
    if too_narrow and not fitting:
        return
    largest = "; ".join(f"as {name} the largest id is {_largest(head, name)}" for name in _TYPES if _readable(head, name))
    what = (
        f"every second id read as {tokens.dtype.name} is the upper half of one" if too_narrow else f"{vocab_size} ids are known"
    )
    cures = [f"data.dtype={fitting[0] if fitting else 'TYPE'}"]
    if not too_narrow and 0 <= int(head.min()) and int(head.max()) < LARGEST_VOCABULARY:
        cures.append(f"model.vocab_size={int(head.max()) + 1} or more")
    raise DataError(Problem(str(path), f"{what}; {largest}", ", or ".join(cures)))


def _interleaved(head: NDArray[Any], vocab_size: int) -> bool:
    upper = (vocab_size - 1) >> 8 * head.dtype.itemsize
    return len(head) >= MIN_INTERLEAVED and int(head[1::2].max()) <= upper < int(head[::2].max())


def _readable(head: NDArray[Any], name: str) -> bool:
    return head.nbytes % np.dtype(name).itemsize == 0


def _as(head: NDArray[Any], name: str) -> NDArray[Any]:
    return np.frombuffer(head.tobytes(), dtype=np.dtype(name).newbyteorder("<"))


def _largest(head: NDArray[Any], name: str) -> int:
    return int(_as(head, name).max())


def _fits(head: NDArray[Any], name: str, vocab_size: int) -> bool:
    if not _readable(head, name):
        return False
    ids = _as(head, name)
    return 0 <= int(ids.min()) and int(ids.max()) < vocab_size and not _interleaved(ids, vocab_size)
