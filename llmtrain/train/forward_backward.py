"""One strategy for turning the micro-batches of an update into gradients; accumulation and clipping above it are written once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.data.loader import Batch
from llmtrain.metrics.format import format_duration
from llmtrain.metrics.memory import Ledger
from llmtrain.metrics.throughput import Clock
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import LossFunction
from llmtrain.ops.random import DropoutKey
from llmtrain.train.engine import EvaluationResult


class ForwardBackward(Protocol):
    """Accumulates gradients of the mean loss of an update."""

    def run(self, microbatches: Sequence[Batch], *, seed: int, update: int, num_targets: int) -> Tensor:
        """Add the gradient of (sum of losses / num_targets) to every parameter; returns the sum of losses (0-d, fp32)."""
        ...


class PlainForwardBackward:
    """Forward and backward of each micro-batch in turn, on a model that is whole."""

    def __init__(self, model: Transformer, loss: LossFunction, ledger: Ledger) -> None:
        self._model = model
        self._loss = loss
        self._ledger = ledger

    def run(self, microbatches: Sequence[Batch], *, seed: int, update: int, num_targets: int) -> Tensor:
        total = None
        for batch in microbatches:
            loss_sum = self._forward(batch, DropoutKey(seed, update, batch.sample_index))
            with self._ledger.backward():
                (loss_sum / num_targets).backward()
            loss_sum = loss_sum.detach()  # lets go of the graph before the next micro-batch makes its own
            total = loss_sum if total is None else total + loss_sum
        assert total is not None, "an update has at least one micro-batch"
        return total

    def _forward(self, batch: Batch, dropout_key: DropoutKey) -> Tensor:
        hidden = self._model(batch.tokens, batch.positions, batch.document_ids, dropout_key)  # [B, T, D]
        with self._ledger.loss(hidden):
            return self._loss(hidden.flatten(0, 1), self._model.head_weight, batch.targets.flatten())


@torch.no_grad()
def evaluate_batches(
    model: Transformer,
    loss: LossFunction,
    batches: Iterable[Batch],
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Sum of all losses / number of all targets, summed in fp64 so that the batch size does not show; the model is in eval mode.

    Args:
        progress: told after each batch how many rows are done.
    """
    total, num_targets, num_rows = 0.0, 0, 0
    for batch in batches:
        num_targets += batch.num_targets
        batch = batch.to(device)
        hidden = model(batch.tokens, batch.positions, batch.document_ids)  # [B, T, D]
        total += loss(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten()).item()
        num_rows += len(batch.tokens)
        if progress is not None:
            progress(num_rows)
    return EvaluationResult(loss=total / max(num_targets, 1), num_targets=num_targets)


def rows_told(show: Callable[[str], None], num_rows: int, clock: Clock = time.monotonic) -> Callable[[int], None]:
    """A `progress` for `evaluate_batches` over `num_rows` rows that shows how far it is and, from now on, how long it will take."""
    began = clock()

    def tell(done: int) -> None:
        left = (clock() - began) / done * (num_rows - done)
        show(f"scoring the validation text: {done:,} of {num_rows:,} rows, {format_duration(left)} left")

    return tell
