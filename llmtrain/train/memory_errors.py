"""Out of memory, told once and with what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from llmtrain.config.errors import OutOfMemoryError, Problem
from llmtrain.config.typed import RecomputeKind
from llmtrain.plan.plan import Plan
from llmtrain.plan.report import format_bytes

_MARKS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
"""What the plain RuntimeErrors say that torch raises when the host, a CUDA library or the driver has no memory."""


@contextmanager
def explained_memory_errors(plan: Plan, cures: Sequence[str] = ()) -> Iterator[None]:
    """Turn the exceptions of device and host allocators into one OutOfMemoryError; let all others pass.

    Args:
        plan: what was run.
        cures: overrides to try; without any, those that make a training smaller.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(plan, error, cures) from error
    except RuntimeError as error:
        if not any(mark in str(error) for mark in _MARKS):
            raise
        raise _out_of_memory(plan, error, cures) from error


def _out_of_memory(plan: Plan, error: BaseException, cures: Sequence[str]) -> OutOfMemoryError:
    batch = plan.batch
    wanted = (str(error).splitlines() or ["no memory"])[0]
    return OutOfMemoryError(
        Problem(
            f"out of memory on {plan.device}: {wanted}",
            f"micro-batch of {batch.micro_batch_size} sequences × {batch.sequence_length} tokens, forecast peak "
            f"{format_bytes(plan.forecast.total)}",
            " or ".join(cures or _smaller_trainings(plan)[:3]),
        )
    )


def _smaller_trainings(plan: Plan) -> list[str]:
    """Overrides that need less memory, those that cost least first."""
    batch = plan.batch
    per_rank = batch.micro_batch_size * batch.num_microbatches
    smaller = [size for size in range(1, batch.micro_batch_size) if per_rank % size == 0]
    cures = [f"accumulation.micro_batch_size={smaller[-1]}"] if smaller else []
    if plan.recompute.kind is not RecomputeKind.FULL:
        cures.append("recompute=full")
    if plan.loss.kind != "chunked":
        cures.append("loss=chunked")
    return [*cures, f"data.sequence_length={max(batch.sequence_length // 2, 2)}"]
