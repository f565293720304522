"""One strategy for turning the micro-batches of an update into gradients; accumulation and clipping above it are written once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.data.loader import Batch
from llmtrain.dist.position import Position
from llmtrain.metrics.format import format_duration
from llmtrain.metrics.memory import Ledger
from llmtrain.metrics.throughput import Clock
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import LossFunction
from llmtrain.ops.random import DropoutKey
from llmtrain.parallel.data import GradientSync
from llmtrain.train.engine import EvaluationResult


class ForwardBackward(Protocol):
    """Makes the gradients of the mean loss of an update."""

    def warm_up(self, microbatch: Batch, *, seed: int) -> None:
        """Before the first update of a process: settle what depends on the order of backward; leaves no gradients."""
        ...

    def run(self, microbatches: Sequence[Batch], *, seed: int, update: int, num_targets: int) -> Tensor:
        """Give every parameter the gradient of (sum of losses of all ranks / num_targets).

        Args:
            microbatches: of this rank, as many as any other has; parameters have no gradients yet.
            num_targets: over all ranks.

        Returns:
            The sum of losses of this rank (0-d, fp32).
        """
        ...


class PlainForwardBackward:
    """Forward and backward of each micro-batch in turn, on a model that is whole.

    Args:
        gradients: how those of this rank become those of all.
        position: is told of every micro-batch and phase.
    """

    def __init__(
        self, model: Transformer, loss: LossFunction, ledger: Ledger, gradients: GradientSync, position: Position
    ) -> None:
        self._model = model
        self._loss = loss
        self._ledger = ledger
        self._gradients = gradients
        self._position = position

    def run(self, microbatches: Sequence[Batch], *, seed: int, update: int, num_targets: int) -> Tensor:
        assert microbatches, "an update has at least one micro-batch"
        self._gradients.begin_update()
        total = None
        for index, batch in enumerate(microbatches):
            self._position.at_microbatch(index)
            with self._gradients.microbatch(is_last=index == len(microbatches) - 1):
                loss_sum = self._forward_backward(batch, DropoutKey(seed, update, batch.sample_index), num_targets)
            total = loss_sum if total is None else total + loss_sum
        assert total is not None
        return total

    def warm_up(self, microbatch: Batch, *, seed: int) -> None:
        key = DropoutKey(seed, 0, microbatch.sample_index)
        self._gradients.warm_up(lambda: self._forward_backward(microbatch, key, num_targets=1))

    def _forward_backward(self, batch: Batch, dropout_key: DropoutKey, num_targets: int) -> Tensor:
        loss_sum = self._forward(batch, dropout_key)
        self._position.enter("backward")
        with self._ledger.backward():
            (loss_sum / (num_targets / self._gradients.num_ranks)).backward()
        return loss_sum.detach()  # lets go of the graph before the next micro-batch makes its own

    def _forward(self, batch: Batch, dropout_key: DropoutKey) -> Tensor:
        self._position.enter("forward")
        hidden = self._gradients.model(batch.tokens, batch.positions, batch.document_ids, dropout_key)  # [B, T, D]
        with self._ledger.loss(hidden):
            return self._loss(hidden.flatten(0, 1), self._model.head_weight, batch.targets.flatten())


@dataclass(frozen=True)
class ScoredText:
    """Losses of some validation rows, summed in fp64."""

    loss_sum: float
    num_targets: int
    was_stopped: bool
    """Not all rows were scored."""


@torch.no_grad()
def score_batches(
    model: Transformer,
    loss: LossFunction,
    batches: Iterable[Batch],
    device: torch.device,
    after_batch: Callable[[Batch], bool],
) -> ScoredText:
    """Sum of the losses of all targets; the model is in eval mode.

    Args:
        after_batch: told of each batch when it is scored; returns whether to stop there.
    """
    total, num_targets = 0.0, 0
    for batch in batches:
        num_targets += batch.num_targets
        batch = batch.to(device)
        hidden = model(batch.tokens, batch.positions, batch.document_ids)  # [B, T, D]
        total += loss(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten()).item()
        if after_batch(batch):
            return ScoredText(total, num_targets, was_stopped=True)
    return ScoredText(total, num_targets, was_stopped=False)


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
    num_rows = 0

    def tell(batch: Batch) -> bool:
        nonlocal num_rows
        num_rows += len(batch.tokens)
        if progress is not None:
            progress(num_rows)
        return False

    scored = score_batches(model, loss, batches, device, tell)
    return EvaluationResult(loss=scored.loss_sum / max(scored.num_targets, 1), num_targets=scored.num_targets)


def rows_told(show: Callable[[str], None], num_rows: int, clock: Clock = time.monotonic) -> Callable[[int], None]:
    """A `progress` for `evaluate_batches` over `num_rows` rows that shows how far it is and, from now on, how long it will take."""
    began = clock()

    def tell(done: int) -> None:
        left = (clock() - began) / done * (num_rows - done)
        show(f"scoring the validation text: {done:,} of {num_rows:,} rows, {format_duration(left)} left")

    return tell
