"""Batch arithmetic of one update: global batch = micro-batch × micro-batches × data ranks, nothing rounded, nothing dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.suggest import divisors, divisors_near, either
from llmtrain.config.typed import AccumulationConfig
from llmtrain.plan.plan import BatchPlan, Choice, MemoryForecast
from llmtrain.plan.report import format_bytes

MEMORY_SHARE = 0.8
"""Part of a device that `micro_batch_size=auto` may fill; the rest is for the allocator, libraries and other programs."""


@dataclass(frozen=True)
class _Amount:
    """The asked size of an update in the user's unit, and how many of that unit one micro-batch of every data rank takes."""

    key: str
    value: int
    sequence_length: int
    data_ranks: int

    @property
    def in_tokens(self) -> bool:
        return self.key == "global_batch_tokens"

    def of(self, micro_batch_size: int) -> int:
        """One micro-batch on each data rank, in the unit of `key`."""
        return micro_batch_size * self.data_ranks * (self.sequence_length if self.in_tokens else 1)


def settle_batch(
    accumulation: AccumulationConfig,
    sequence_length: int,
    data_ranks: int,
    largest_that_fits: Callable[[int], tuple[int, Choice]],
) -> tuple[BatchPlan, list[Choice]]:
    """Sequences of an update, of a rank and of one forward.

    Args:
        accumulation: what was asked; `micro_batch_size` None is auto.
        sequence_length: tokens of a sequence.
        data_ranks: ranks that read different sequences.
        largest_that_fits: per-rank batch → micro-batch to use when it is auto, and the choice to show.

    Raises:
        PlanError: something does not divide, or a micro-batch is larger than a rank's share; names the nearest legal values.
    """
    tokens = accumulation.global_batch_tokens
    if tokens is None:
        assert accumulation.global_batch_size is not None
        amount = _Amount("global_batch_size", accumulation.global_batch_size, sequence_length, data_ranks)
    else:
        amount = _Amount("global_batch_tokens", tokens, sequence_length, data_ranks)
    micro = accumulation.micro_batch_size
    if micro is not None and amount.of(micro) > amount.value:
        raise PlanError(_too_large(micro, amount))
    if amount.value % amount.of(micro or 1):
        raise PlanError(_indivisible(micro, amount))
    per_rank = amount.value // amount.of(1)
    choices = []
    if micro is None:
        micro, choice = largest_that_fits(per_rank)
        choices.append(choice)
    return BatchPlan(per_rank * data_ranks, micro, per_rank // micro, sequence_length), choices


def largest_micro_batch(
    per_rank: int, memory_bytes: int, forecast: Callable[[int, int], MemoryForecast]
) -> tuple[int, Choice] | None:
    """The largest divisor of a rank's batch whose forecast fits in `MEMORY_SHARE` of the device; None if not even 1 does.

    `forecast` takes the sequences of a micro-batch and the number of micro-batches of an update.
    """
    limit = int(MEMORY_SHARE * memory_bytes)
    refused = ""
    for micro in reversed(divisors(per_rank)):
        need = forecast(micro, per_rank // micro).total
        if need <= limit:
            reason = f"forecast {format_bytes(need)}{refused}"
            return micro, Choice("accumulation.micro_batch_size", str(micro), reason)
        refused = f"; {micro} needs {format_bytes(need)} of {format_bytes(limit)}"
    return None


def _too_large(micro: int, amount: _Amount) -> Problem:
    sequences = f" / sequence_length {amount.sequence_length}" if amount.in_tokens else ""
    share = amount.value // amount.of(1)
    rule = (
        f"at most the sequences of one rank: {amount.key} {amount.value}{sequences} / data ranks {amount.data_ranks} = {share}"
    )
    cures = [f"accumulation.{amount.key}={amount.of(micro)}"]
    if share and amount.value % amount.of(1) == 0:
        cures.insert(0, f"accumulation.micro_batch_size={share}")
    return Problem(f"accumulation.micro_batch_size={micro}", rule, " or ".join(cures))


def _indivisible(micro: int | None, amount: _Amount) -> Problem:
    unit = amount.of(micro or 1)
    factors = [f"sequence_length {amount.sequence_length}"] if amount.in_tokens else []
    factors += [] if micro is None else [f"micro_batch_size {micro}"]
    factors.append(f"data ranks {amount.data_ranks}")
    below = amount.value // unit * unit
    cure = f"{below} or {below + unit}" if below else f"{unit}"
    if micro is not None and amount.value % amount.of(1) == 0:
        cure += f", or accumulation.micro_batch_size={either(divisors_near(amount.value // amount.of(1), micro))}"
    share = amount.value // (unit // amount.data_ranks)
    if amount.data_ranks > 1 and share * (unit // amount.data_ranks) == amount.value:
        cure += f", or {either(str(ranks) for ranks in divisors_near(share, amount.data_ranks))} data ranks"
    equals = f" = {unit}" if len(factors) > 1 else ""
    return Problem(f"accumulation.{amount.key}={amount.value}", f"divisible by {' × '.join(factors)}{equals}", cure)
