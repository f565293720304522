"""Batches by global sample index: what a run reads next follows from how many samples it has consumed, and from nothing else.

Shapes: B rows of a batch, T = sequence_length tokens a row.

Sample g of a run is row `shuffled(g mod n)` of epoch `g // n`, with n the rows of an epoch. No cursor, no generator state, no
worker state: a resumed run, another number of ranks or another micro-batch reads the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmtrain.data.order import shuffled
from llmtrain.data.packing import Rows
from llmtrain.ops.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """Rows of tokens and what is to be predicted from them; all int64.

    `targets[b, t]` is the token after `tokens[b, t]`, or IGNORE_INDEX: nothing downstream shifts again.
    """

    tokens: Tensor
    """[B, T]"""
    targets: Tensor
    """[B, T]"""
    positions: Tensor | None
    """[B, T], restarting at each document and each row; None = 0 … T - 1 in every row."""
    document_ids: Tensor | None
    """[B, T]: positions of a row attend to each other only where these agree; None = the whole row."""
    sample_index: Tensor
    """[B]: global index of each sample (in validation: number of the row)."""

    @property
    def num_targets(self) -> int:
        """Targets that are not ignored; counts on the device of the batch, so ask before moving it."""
        return int((self.targets != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        return Batch(
            self.tokens.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            None if self.positions is None else self.positions.to(device, non_blocking=True),
            None if self.document_ids is None else self.document_ids.to(device, non_blocking=True),
            self.sample_index.to(device, non_blocking=True),
        )


class TokenLoader:
    """Training batches. Its only state is the number of samples consumed, which the caller keeps."""

    def __init__(self, rows: Rows, *, seed: int, fingerprint: str) -> None:
        assert rows.num_rows > 0
        self._rows = rows
        self._seed = seed
        self.fingerprint = fingerprint
        """Hash of content, tokenizer, packing, sequence length and split, but not of the seed."""

    @property
    def samples_per_epoch(self) -> int:
        """Rows of an epoch; the last update of an epoch carries on into the next one."""
        return self._rows.num_rows

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples [first_sample, first_sample + count) of the run; may cross the end of an epoch."""
        assert first_sample >= 0 and count > 0
        samples = np.arange(first_sample, first_sample + count, dtype=np.int64)
        return _to_batch(self._rows, self._row_numbers(samples), samples)

    def _row_numbers(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(samples, self.samples_per_epoch)
        parts = [
            shuffled(places[epochs == epoch], self.samples_per_epoch, seed=self._seed, epoch=epoch)
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ]
        return np.concatenate(parts)


class ValidationLoader:
    """Every validation token once, in order."""

    def __init__(self, rows: Rows, *, sequence_length: int, fingerprint: str) -> None:
        assert rows.num_rows > 0
        self._rows = rows
        self._sequence_length = sequence_length
        self.fingerprint = fingerprint

    @property
    def num_rows(self) -> int:
        """Rows of the split."""
        return self._rows.num_rows

    @property
    def num_targets(self) -> int:
        """Target tokens of the split."""
        return self._rows.num_targets

    def num_scored_rows(self, max_tokens: int | None = None) -> int:
        """Rows that `batches` gives with the same `max_tokens`, over all ranks."""
        return self.num_rows if max_tokens is None else min(self.num_rows, max(1, max_tokens // self._sequence_length))

    def batches(self, batch_size: int, max_tokens: int | None = None, rank: int = 0, num_ranks: int = 1) -> Iterator[Batch]:
        """Rows in order, `batch_size` at a time; the last batch may be smaller.

        Args:
            max_tokens: score only the first max(1, max_tokens // T) rows: the same rows whatever the batch size. Counts input
                positions, padding included, so that the cost is known.
            rank: gives the share of this one of `num_ranks`: consecutive rows, as many as another's or one more or less. There may
                be none.
        """
        assert 0 <= rank < num_ranks
        num_scored = self.num_scored_rows(max_tokens)
        start, stop = (num_scored * border // num_ranks for border in (rank, rank + 1))
        for first in range(start, stop, batch_size):
            numbers = np.arange(first, min(first + batch_size, stop), dtype=np.int64)
            yield _to_batch(self._rows, numbers, numbers)


def _to_batch(rows: Rows, numbers: NDArray[np.int64], samples: NDArray[np.int64]) -> Batch:
    arrays = rows.read(numbers)
    return Batch(
        tokens=torch.from_numpy(arrays.tokens),
        targets=torch.from_numpy(arrays.targets),
        positions=None if arrays.positions is None else torch.from_numpy(arrays.positions),
        document_ids=None if arrays.document_ids is None else torch.from_numpy(arrays.document_ids),
        sample_index=torch.from_numpy(samples),
    )
