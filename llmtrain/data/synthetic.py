"""Random tokens for benchmarks: a pure function of (seed, split, row), nothing on disk and nothing to learn.

Shapes: B rows, T = sequence_length tokens a row.

Each row is one document of T + 1 uniformly drawn ids (begin and end tokens included in the draw), so all packing rules cut it
alike; `document` and `padded` add the positions and document ids that their attention needs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.typed_data import Packing
from llmtrain.data.order import mix64, stream_keys
from llmtrain.data.packing import RowArrays

TRAIN_ROWS = 2**40
"""So many that no run repeats one."""
VALIDATION_ROWS = 64


class SyntheticRows:
    """Rows of random ids in [0, vocab_size)."""

    def __init__(
        self, split: str, *, num_rows: int, vocab_size: int, sequence_length: int, packing: Packing, seed: int
    ) -> None:
        assert 0 < vocab_size <= 2**32
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._length = sequence_length
        self._packing = packing
        self._keys = stream_keys("synthetic", split, seed)

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def num_targets(self) -> int:
        return self._num_rows * self._length

    def read(self, rows: NDArray[np.int64]) -> RowArrays:
        row_keys = mix64(rows.astype(np.uint64) + self._keys[0])[:, None]  # [B, 1]
        columns = np.arange(self._length + 1, dtype=np.uint64)  # [T + 1]
        words = mix64((row_keys ^ self._keys[1]) + columns * np.uint64(0x9E3779B97F4A7C15))  # [B, T + 1]
        # The high 32 bits as a fraction of the vocabulary: no division, bias below vocab_size / 2**32.
        values = ((words >> np.uint64(32)) * np.uint64(self._vocab_size) >> np.uint64(32)).astype(np.int64)
        tokens, targets = np.ascontiguousarray(values[:, :-1]), np.ascontiguousarray(values[:, 1:])
        if self._packing is Packing.CONCAT:
            return RowArrays(tokens, targets, None, None)
        positions = np.broadcast_to(np.arange(self._length), tokens.shape).copy()
        return RowArrays(tokens, targets, positions, np.zeros_like(tokens))
