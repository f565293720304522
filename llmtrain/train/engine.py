"""How one update happens, as a protocol; `engine_native.py` implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llmtrain.data.loader import Batch


@dataclass(frozen=True)
class StepResult:
    """What one update did."""

    loss: float
    """Sum over target tokens / number of target tokens, over all micro-batches and ranks."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    skipped: bool
    """The gradients were not finite: weights and moments were left untouched."""


@dataclass(frozen=True)
class EvaluationResult:
    """Token mean of the loss over some validation rows."""

    loss: float
    num_targets: int


class Engine(Protocol):
    """Model, loss and optimizer behind the four things a trainer needs of them."""

    def warm_up(self, microbatch: Batch) -> None:
        """Before the first update of a process: may run a micro-batch and drops what that gives; changes no weight or moment."""
        ...

    def train_step(self, update: int, microbatches: Sequence[Batch], num_targets: int) -> StepResult:
        """Run the micro-batches of update number `update` (from 1) and change the weights.

        Args:
            microbatches: those of this rank; as many on every rank.
            num_targets: target tokens of the update over all ranks.
        """
        ...

    def evaluate(self, batches: Iterable[Batch], should_stop: Callable[[], bool]) -> EvaluationResult | None:
        """Score the batches of all ranks together; changes no state of the training.

        Args:
            batches: those of this rank; how many it has, or whether any, is its own affair.
            should_stop: asked after each batch; once it says so this rank scores no further.

        Returns:
            The same on every rank; None when any rank had to stop.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """Every tensor a resume needs, by name: `model/…` and `optimizer/…`."""
        ...

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over tensors saved by `state`; names, shapes and dtypes must match exactly."""
        ...
