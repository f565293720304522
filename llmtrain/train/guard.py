"""The bound on skipped updates."""

from __future__ import annotations

from llmtrain.config.errors import NumericsError, Problem
from llmtrain.train.engine import StepResult
from llmtrain.train.state import TrainState


def check_skips(state: TrainState, result: StepResult, limit: int) -> None:
    """Raise NumericsError when more than `limit` updates in a row had non-finite loss or gradients."""
    if state.skipped_since_step <= limit:
        return
    raise NumericsError(
        Problem(
            f"{state.skipped_since_step} updates in a row were not finite (loss {result.loss}, gradient norm {result.grad_norm})",
            f"at most train.max_consecutive_skips={limit} updates in a row may be skipped; weights are those of step {state.step}",
            "a lower optimizer.lr, optimizer.clip_norm=1.0 or precision=fp32; checkpoints saved before are intact",
        )
    )
