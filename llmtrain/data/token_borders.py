"""Where documents begin in a stream of tokens: told by an index, by a token that stands between documents, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.token_array import BLOCK_TOKENS, TokenArray

Progress = Callable[[str], None]
"""Gets a line whenever there is news; it decides which to show."""
SEARCH_TOKENS = 1 << 26
"""How far from a wanted place a border is looked for."""


class Borders(Protocol):
    """The documents of N tokens."""

    def offsets(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) as a split of its own: its document borders [D + 1], from 0 to stop - start."""
        ...

    def nearest(self, place: int) -> int | None:
        """The border next to a place; None where there is none, or none within reach. 0 and N do not count."""
        ...


class OneDocument:
    """Nothing is known: all of it is one document."""

    def offsets(self, start: int, stop: int) -> NDArray[np.int64]:
        return np.array([0, stop - start], dtype=np.int64)

    def nearest(self, place: int) -> int | None:
        return None


class IndexedBorders:
    """Borders from an index.

    Args:
        read: gives all borders, from 0 to N; called when they are first needed.
    """

    def __init__(self, read: Callable[[], NDArray[np.int64]]) -> None:
        self._read = read

    @cached_property
    def _all(self) -> NDArray[np.int64]:
        return self._read()

    def offsets(self, start: int, stop: int) -> NDArray[np.int64]:
        inside = self._all[np.searchsorted(self._all, start, side="right") : np.searchsorted(self._all, stop, side="left")]
        return np.concatenate([[0], inside - start, [stop - start]]).astype(np.int64)

    def nearest(self, place: int) -> int | None:
        ends = np.searchsorted(self._all, 0, side="right"), np.searchsorted(self._all, self._all[-1])
        inner = self._all[slice(*ends)]
        right = int(np.searchsorted(inner, place))
        near = inner[max(0, right - 1) : right + 1].tolist()
        return min(near, key=lambda border: abs(border - place), default=None)


@dataclass(frozen=True)
class MarkedBorders:
    """Borders told by a token: it is the first of its document, or the last."""

    tokens: TokenArray
    mark: int
    begins: bool
    progress: Progress

    def offsets(self, start: int, stop: int) -> NDArray[np.int64]:
        """Reads every token of the split."""
        found = [np.zeros(1, np.int64)]
        for low in range(start, stop, BLOCK_TOKENS):
            self.progress(f"looking for documents: {(low - start) / (stop - start):.0%}")
            found.append(self._inside(low, min(low + BLOCK_TOKENS, stop)) - start)
        borders = np.concatenate([*found, [stop - start]])
        return borders[np.concatenate([[True], np.diff(borders) > 0])]

    def nearest(self, place: int) -> int | None:
        reach = BLOCK_TOKENS // 64
        while True:
            low, high = max(0, place - reach), min(len(self.tokens), place + reach)
            near = [border for border in self._inside(low, high).tolist() if 0 < border < len(self.tokens)]
            if near or reach >= SEARCH_TOKENS or high - low == len(self.tokens):
                return min(near, key=lambda border: abs(border - place), default=None)
            reach *= 8

    def _inside(self, start: int, stop: int) -> NDArray[np.int64]:
        """Borders that the tokens [start, stop) tell of."""
        return np.flatnonzero(self.tokens.read_range(start, stop) == self.mark) + start + (not self.begins)
