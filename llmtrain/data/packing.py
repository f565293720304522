"""How the token stream of a split is cut into rows: `concat`, `document` and `padded`.

Shapes: B rows, T = sequence_length tokens a row, N tokens of the split, D documents.

A row is T input tokens and, for each, the token that follows it as its target. Which tokens are targets, once an epoch each:

    concat    every token but the first of the split. Row i reads tokens [iT, iT + T] of the stream; documents attend across
              borders.
    document  every token but the first of its document. Rows as in concat, but positions restart and attention ends at a
              border, and the target across a border (last token of one document, first of the next) is ignored. A document
              that a row end cuts goes on in the next row at position 0.
    padded    every token but the first of its document. A document of L tokens takes ceil((L - 1) / T) rows of its own; its
              last token is a target only. A document of fewer than two tokens has nothing to predict and no row.

Nothing is dropped: a row that runs out of tokens is filled up with padding whose targets are ignored. Where document ids exist
the padding has the id -1, so it is never attended to by text and each padding position still attends to something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.typed_data import Packing
from llmtrain.data.token_array import TokenArray
from llmtrain.ops.cross_entropy import IGNORE_INDEX

PADDING_TOKEN = 0
"""Any valid id would do: padding is neither a target nor attended to."""
PADDING_DOCUMENT = -1
"""The document that padding belongs to; a model knows padding by an id below zero."""


@dataclass(frozen=True)
class RowArrays:
    """Rows as arrays of int64 [B, T]; positions and document ids are None where rows attend as a whole."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64] | None
    document_ids: NDArray[np.int64] | None


class Rows(Protocol):
    """The rows of a split, by number."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_targets(self) -> int:
        """Targets of all rows that are not ignored."""
        ...

    def read(self, rows: NDArray[np.int64]) -> RowArrays:
        """The rows of these numbers [B], in this order."""
        ...


class TokenStream:
    """Tokens of one split, document after document.

    Args:
        tokens: N of them.
        offsets: [D + 1], document d is tokens [offsets[d], offsets[d + 1]); or what finds them. That is called when a packing rule
            first asks for documents, since it may have to read every token.
    """

    def __init__(self, tokens: TokenArray, offsets: NDArray[np.int64] | Callable[[], NDArray[np.int64]]) -> None:
        self.tokens = tokens
        self._offsets = offsets

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[D + 1] document borders, from 0 to N."""
        return self._offsets() if callable(self._offsets) else np.asarray(self._offsets, dtype=np.int64)


def pack(stream: TokenStream, packing: Packing, sequence_length: int) -> Rows:
    """The rows of a split under a packing rule."""
    if packing is Packing.PADDED:
        return PaddedRows(stream, sequence_length)
    if packing is Packing.DOCUMENT:
        return DocumentRows(stream, sequence_length)
    return ConcatRows(stream, sequence_length)


class ConcatRows:
    """Packing `concat`."""

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        self._stream = stream
        self._length = sequence_length

    @property
    def num_targets(self) -> int:
        return max(0, len(self._stream.tokens) - 1)

    @property
    def num_rows(self) -> int:
        return -(-self.num_targets // self._length)

    def read(self, rows: NDArray[np.int64]) -> RowArrays:
        starts = rows * self._length  # [B]
        stops = np.minimum(starts + self._length, self.num_targets)
        tokens, targets = _gather(self._stream.tokens, starts, stops, self._length)
        return RowArrays(tokens, targets, None, None)


class DocumentRows:
    """Packing `document`."""

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        self._offsets = stream.offsets
        self._rows = ConcatRows(stream, sequence_length)
        self._length = sequence_length
        self._last = self._rows.num_targets

    @property
    def num_targets(self) -> int:
        return _targets_inside_documents(self._offsets)

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    def read(self, rows: NDArray[np.int64]) -> RowArrays:
        plain = self._rows.read(rows)
        starts = (rows * self._length)[:, None]  # [B, 1]
        places = starts + np.arange(self._length)  # [B, T] in the stream
        padding = places >= self._last
        documents = np.searchsorted(self._offsets, places, side="right") - 1  # [B, T]
        begins = np.maximum(self._offsets[documents], starts)
        begins[padding], documents[padding] = self._last, len(self._offsets)
        crosses = places + 1 >= self._offsets[np.minimum(documents + 1, len(self._offsets) - 1)]
        return RowArrays(
            tokens=plain.tokens,
            targets=np.where(crosses, IGNORE_INDEX, plain.targets),
            positions=places - begins,
            document_ids=np.where(padding, PADDING_DOCUMENT, documents - documents[:, :1]),
        )


class PaddedRows:
    """Packing `padded`."""

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        self._tokens = stream.tokens
        self._offsets = stream.offsets
        self._length = sequence_length
        pieces = -(-np.maximum(np.diff(self._offsets) - 1, 0) // sequence_length)  # [D] rows of each document
        self._first_rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces)])  # [D + 1]

    @property
    def num_targets(self) -> int:
        return _targets_inside_documents(self._offsets)

    @property
    def num_rows(self) -> int:
        return int(self._first_rows[-1])

    def read(self, rows: NDArray[np.int64]) -> RowArrays:
        documents = np.searchsorted(self._first_rows, rows, side="right") - 1  # [B]
        starts = self._offsets[documents] + (rows - self._first_rows[documents]) * self._length
        stops = np.minimum(starts + self._length, self._offsets[documents + 1] - 1)
        tokens, targets = _gather(self._tokens, starts, stops, self._length)
        columns = np.arange(self._length)[None, :]
        filled = (stops - starts)[:, None]  # [B, 1]
        padding = columns >= filled  # [B, T]
        return RowArrays(tokens, targets, columns - np.where(padding, filled, 0), np.where(padding, PADDING_DOCUMENT, 0))


def _targets_inside_documents(offsets: NDArray[np.int64]) -> int:
    return int(np.maximum(np.diff(offsets) - 1, 0).sum())


def _gather(
    stream: TokenArray, starts: NDArray[np.int64], stops: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs stream[start : stop] and the targets one later, filled up with padding to `length`: two arrays [B, T]."""
    places = starts[:, None] + np.arange(length + 1)  # [B, T + 1]
    full = bool((stops - starts == length).all())
    values = stream.read(places if full else np.minimum(places, len(stream) - 1))
    tokens, targets = values[:, :-1], values[:, 1:]
    if not full:
        padding = places[:, :-1] >= stops[:, None]
        tokens, targets = np.where(padding, PADDING_TOKEN, tokens), np.where(padding, IGNORE_INDEX, targets)
    return np.ascontiguousarray(tokens), np.ascontiguousarray(targets)
