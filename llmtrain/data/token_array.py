"""Token ids that lie in several files, read as one array.

The parts are memory maps: opening costs nothing, reading costs what is read. Ids leave as int64, checked against the vocabulary
where one is given, so an id that the embedding has no row for is an error that names file and byte and never a wrong token.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.dist.handles import raise_handle_limit

BLOCK_TOKENS = 1 << 20
"""Tokens that a pass over all of them holds at a time."""
MANY_MAPS = 32
_maps = itertools.count()


@dataclass(frozen=True)
class Origin:
    """Where the tokens of a part lie."""

    path: Path
    first_byte: int
    """Of the first token."""


class TokenArray:
    """Token ids of one split: N of them, part after part.

    Args:
        parts: 1-D arrays of any integer type, usually memory maps; empty ones are left out.
        vocab_size: ids at or above it, and ids below zero, raise on reading; None = they were checked before.
        origins: where each part lies, for that message.
    """

    def __init__(
        self, parts: Sequence[NDArray[Any]], *, vocab_size: int | None = None, origins: Sequence[Origin] | None = None
    ) -> None:
        assert origins is None or len(origins) == len(parts)
        kept = [index for index, part in enumerate(parts) if len(part)]
        # Plain arrays over the same memory: indexing a np.memmap makes another one each time.
        self._parts = [np.asarray(parts[index]) for index in kept]
        self._origins = None if origins is None else [origins[index] for index in kept]
        self._vocab_size = vocab_size
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)  # [parts]
        self._starts = self._ends - [len(part) for part in self._parts]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        return sum(part.nbytes for part in self._parts)

    def read(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids at `places`, an array of any shape with 0 <= place < N; the same shape.

        Raises:
            DataError: an id that the vocabulary does not have.
        """
        if len(self._parts) == 1:
            values = self._parts[0][places].astype(np.int64)
        elif places.size:
            values = self._read_rows(places.reshape(-1, places.shape[-1] if places.ndim else 1)).reshape(places.shape)
        else:
            values = np.empty(places.shape, np.int64)
        self._check(values, places)
        return values

    def check(self, start: int, stop: int) -> None:
        """Raise DataError if one of the ids [start, stop) is outside the vocabulary."""
        for piece, _ in self._cut(start, stop):
            if self._vocab_size is not None and (int(piece.max()) >= self._vocab_size or int(piece.min()) < 0):
                self._check(piece.astype(np.int64), start)
            start += len(piece)

    def blocks(self, block_tokens: int = BLOCK_TOKENS) -> Iterator[NDArray[np.int64]]:
        """All ids in order, at most `block_tokens` at a time, checked like those of `read`."""
        for start in range(0, len(self), block_tokens):
            yield self.read_range(start, min(start + block_tokens, len(self)))

    def read_range(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ids [start, stop)."""
        pieces = [piece.astype(np.int64) for piece, _ in self._cut(start, stop)]
        values = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        self._check(values, start)
        return values

    def slice(self, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) as an array of their own; nothing is copied."""
        cut = list(self._cut(start, stop))
        origins = None if self._origins is None else [origin for _, origin in cut if origin is not None]
        return TokenArray([piece for piece, _ in cut], vocab_size=self._vocab_size, origins=origins)

    def _cut(self, start: int, stop: int) -> Iterator[tuple[NDArray[Any], Origin | None]]:
        """The pieces of parts that make up [start, stop), with the origin of each."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        for index in range(first, len(self._parts)):
            begins, part = int(self._starts[index]), self._parts[index]
            if begins >= stop:
                return
            skipped = max(0, start - begins)
            yield part[skipped : stop - begins], self._origin(index, skipped)

    def _origin(self, index: int, tokens: int) -> Origin | None:
        if self._origins is None:
            return None
        origin = self._origins[index]
        return Origin(origin.path, origin.first_byte + tokens * self._parts[index].dtype.itemsize)

    def _read_rows(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of places; nearly all of them lie in one part, which their smallest and largest place tell."""
        values = np.empty(places.shape, np.int64)
        first = np.searchsorted(self._ends, places.min(axis=1), side="right").tolist()
        last = np.searchsorted(self._ends, places.max(axis=1), side="right").tolist()
        for row, (low, high) in enumerate(zip(first, last)):
            if low == high:
                values[row] = self._parts[low][places[row] - self._starts[low]]
                continue
            parts = np.searchsorted(self._ends, places[row], side="right")
            for part in range(low, high + 1):
                inside = parts == part
                values[row, inside] = self._parts[part][places[row, inside] - self._starts[part]]
        return values

    def _check(self, values: NDArray[np.int64], places: NDArray[np.int64] | int) -> None:
        if self._vocab_size is None or not values.size:
            return
        # One comparison for both ends: as unsigned numbers, negative ids are the largest.
        bad = values.view(np.uint64) >= np.uint64(self._vocab_size)
        if bad.any():
            first = int(np.flatnonzero(bad.reshape(-1))[0])
            place = places + first if isinstance(places, int) else int(places.reshape(-1)[first])
            raise self._outside(place, int(values.reshape(-1)[first]))

    def _outside(self, place: int, token: int) -> DataError:
        index = int(np.searchsorted(self._ends, place, side="right"))
        origin = self._origin(index, place - int(self._starts[index]))
        where = f"token {place}" if origin is None else f"{origin.path}: the token at byte {origin.first_byte}"
        return DataError(
            Problem(
                f"{where} has id {token}",
                f"the vocabulary has {self._vocab_size} ids, 0 to {(self._vocab_size or 0) - 1}",
                "model.vocab_size=N and a tokenizer that fit the data, or data.dtype if the ids were stored with another width",
            )
        )


def map_file(path: Path, dtype: np.dtype[Any], first_byte: int, count: int) -> NDArray[Any]:
    """`count` values of a file as a read-only memory map.

    A map keeps a file handle, and a folder may hold more files than a process may have handles by default: after MANY_MAPS of them the
    soft limit is raised to the hard one, while there are still handles for everything else that is opened.

    Raises:
        DataError: the file cannot be opened, or is too short.
    """
    if not count:
        return np.empty(0, dtype)
    if next(_maps) >= MANY_MAPS:
        raise_handle_limit()
    try:
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=first_byte, shape=(count,)))
    except OSError as error:
        cure = "a higher ulimit -n, or fewer and larger files" if error.errno == errno.EMFILE else ""
        raise DataError(Problem(str(path), f"it cannot be opened: {error.strerror}", cure)) from error
    except ValueError as error:
        rule = f"{count} values of {dtype.itemsize} bytes from byte {first_byte} on do not fit into it"
        raise DataError(Problem(str(path), rule)) from error
