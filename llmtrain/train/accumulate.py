"""Cutting the batch of an update into the micro-batches one rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.plan.plan import BatchPlan


@dataclass(frozen=True)
class SampleRange:
    """`count` consecutive global sample indices from `first` on."""

    first: int
    count: int


def microbatch_ranges(batch: BatchPlan, consumed_samples: int, *, data_rank: int = 0) -> Iterator[SampleRange]:
    """The sample ranges of one update on one data rank, in the order they are run.

    The update takes samples consumed … consumed + global_batch_size - 1; each rank an equal contiguous share of them, cut into
    micro-batches. Which samples make an update therefore depends on neither the number of ranks nor the micro-batch size, and an
    update may reach over the end of an epoch (a full window, never a short one).
    """
    first = consumed_samples + data_rank * batch.num_microbatches * batch.micro_batch_size
    for index in range(batch.num_microbatches):
        yield SampleRange(first + index * batch.micro_batch_size, batch.micro_batch_size)
