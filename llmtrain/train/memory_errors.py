"""Out of memory, told once and with what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmtrain.config.errors import OutOfMemoryError, Problem
from llmtrain.config.typed import RecomputeKind
from llmtrain.plan.plan import Plan
from llmtrain.plan.report import format_bytes

_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""torch raises a plain RuntimeError when the host has no memory; its text names the allocator."""


@contextmanager
def explained_memory_errors(plan: Plan) -> Iterator[None]:
    """Turn the exceptions of device and host allocators into one OutOfMemoryError; let all others pass."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(plan, error) from error
    except RuntimeError as error:
        if _CPU_ALLOCATOR not in str(error):
            raise
        raise _out_of_memory(plan, error) from error


def _out_of_memory(plan: Plan, error: BaseException) -> OutOfMemoryError:
    batch = plan.batch
    wanted = (str(error).splitlines() or ["no memory"])[0]
    cures = [f"accumulation.micro_batch_size={batch.micro_batch_size // 2}"] if batch.micro_batch_size > 1 else []
    if plan.recompute.kind is not RecomputeKind.FULL:
        cures.append("recompute=full")
    if plan.loss.kind != "chunked":
        cures.append("loss=chunked")
    cures.append(f"data.sequence_length={max(batch.sequence_length // 2, 2)}")
    return OutOfMemoryError(
        Problem(
            f"out of memory on {plan.device}: {wanted}",
            f"micro-batch of {batch.micro_batch_size} sequences × {batch.sequence_length} tokens, forecast peak "
            f"{format_bytes(plan.forecast.total)}",
            " or ".join(cures[:3]),
        )
    )
