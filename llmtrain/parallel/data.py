"""Gradients of whole copies averaged over ranks, while backward still runs (Li et al. 2020, PyTorch Distributed).

torch's DistributedDataParallel cuts the gradients into buckets in the order in which backward makes them and calls a hook for each
that is full. The hook is ours: it averages, times and counts. The loss of a rank is scaled by the number of ranks (`num_ranks`), so
that the average of the gradients is that of all losses summed. An average and not a sum, because a gradient that was averaged before
stays what it is when it is averaged again.

Buckets are laid out anew once backward has shown its order, and gradients can only be put into buckets that stay. Both happens before
the first update, in a warm-up that runs a micro-batch a few times and drops what that gives. So every update, also the first one after a
resume, sums in the same order, sends its first bucket early, and has the same memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain.config.defaults import DEFAULT_BUCKET_MIB, DEFAULT_FIRST_BUCKET_MIB
from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.typed import DdpConfig
from llmtrain.dist.collectives import GroupCollectives

WARM_UP_PASSES = 2
"""The first shows the order of backward, the second runs on the buckets that stay. A static graph shows it a pass later."""


class GradientSync(Protocol):
    """How gradients of micro-batches become those of the update, over all ranks."""

    model: Callable[..., Tensor]
    """Takes and gives what `Transformer.forward` does."""
    num_ranks: int
    """What the loss of a rank has to be multiplied by."""

    def warm_up(self, forward_backward: Callable[[], object]) -> None:
        """Once, before the first update of a process: may call `forward_backward` and drops the gradients that it makes."""
        ...

    def begin_update(self) -> None:
        """Parameters have no gradients now; the next backward adds to nothing."""
        ...

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Context around forward and backward of one micro-batch; at the end of the last one gradients are those of all ranks."""
        ...


class LocalGradients:
    """One rank: the gradients are there."""

    num_ranks = 1

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def warm_up(self, forward_backward: Callable[[], object]) -> None:
        pass

    def begin_update(self) -> None:
        pass

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        yield


class _Buckets:
    """State of the communication hook; knows the buckets and not the module, which would never be freed."""

    def __init__(self, collectives: GroupCollectives, sent_as: torch.dtype | None, book: Callable[[Tensor], None]) -> None:
        self.collectives = collectives
        self.sent_as = sent_as
        self.book = book
        self.keeps = False
        """Whether buckets are noted down as they come by."""
        self.kept: list[tuple[Tensor, list[tuple[nn.Parameter, Tensor]]]] = []
        """Of each bucket the whole, and each parameter with its place in it."""

    # Without annotations: torch compares them to its own classes, and here they would be strings.
    def average(self, bucket):  # type: ignore[no-untyped-def]
        """A bucket is full: send it."""
        buffer: Tensor = bucket.buffer()
        self.book(buffer)
        if self.keeps:
            self.kept.append((buffer, list(zip(bucket.parameters(), bucket.gradients(), strict=True))))
        if self.sent_as is None or self.sent_as == buffer.dtype:
            return self.collectives.average_bucket(buffer, _itself)
        sent = buffer.to(self.sent_as)
        self.book(sent)
        return self.collectives.average_bucket(sent, buffer.copy_)

    def put_gradients_inside(self) -> None:
        """Make zeroed places in the buckets the gradients of the parameters, so that backward adds to them there."""
        for buffer, places in self.kept:
            buffer.zero_()
            for parameter, place in places:
                parameter.grad = place


class ReplicatedGradients:
    """Whole copies on every rank; buckets are averaged during the backward of the last micro-batch.

    Args:
        model: with its values, equal on all ranks; nothing is broadcast.
        ddp: bucket sizes and what is sent.
        collectives: of the group the copies are in.
        book: told of the memory of each bucket, and of what is sent in its place, whenever it is used.

    Raises:
        PlanError: the installed torch cannot do what `ddp` asks for.
    """

    def __init__(self, model: nn.Module, ddp: DdpConfig, collectives: GroupCollectives, book: Callable[[Tensor], None]) -> None:
        self.model = DistributedDataParallel(
            model,
            init_sync=False,
            process_group=collectives.group,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            static_graph=ddp.static_graph,
            **bucket_sizes(ddp, inspect.signature(DistributedDataParallel).parameters),
            **_buffers_stay(),
        )
        self.num_ranks = collectives.size
        self._collectives = collectives
        self._inside = ddp.gradient_as_bucket_view
        self._buckets = _Buckets(collectives, torch.bfloat16 if ddp.compression == "bf16" else None, book)
        self._num_passes = WARM_UP_PASSES + ddp.static_graph
        self.model.register_comm_hook(self._buckets, _Buckets.average)

    def warm_up(self, forward_backward: Callable[[], object]) -> None:
        """A few passes: the layout of buckets that the last one has stays."""
        for index in range(self._num_passes):
            self._buckets.keeps = self._inside and index == self._num_passes - 1
            with self.microbatch(is_last=True):
                forward_backward()
            self.model.zero_grad(set_to_none=True)
        self._buckets.keeps = False

    def begin_update(self) -> None:
        self._buckets.put_gradients_inside()

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Also the forward has to be inside: torch decides there whether the backward will send."""
        if not is_last:
            with self.model.no_sync():
                yield
            return
        yield
        self._collectives.meter.backward_done()


def bucket_sizes(ddp: DdpConfig, accepted: Container[str]) -> dict[str, Any]:
    """Arguments of DistributedDataParallel for the sizes, out of those that it accepts.

    Raises:
        PlanError: a first bucket of its own, where torch does not let one choose.
    """
    if "bucket_cap_mb_list" in accepted:
        return {"bucket_cap_mb_list": [ddp.first_bucket_mib, ddp.bucket_mib]}
    if ddp.first_bucket_mib == ddp.bucket_mib:
        return {"bucket_cap_mb": ddp.bucket_mib}
    if (ddp.first_bucket_mib, ddp.bucket_mib) == (DEFAULT_FIRST_BUCKET_MIB, DEFAULT_BUCKET_MIB):
        return {}  # that is what torch does when it is told nothing
    cure = f"parallelism.first_bucket_mib={ddp.bucket_mib:g}, or torch 2.13"
    rule = f"torch {torch.__version__} has a first bucket of another size only beside buckets of {DEFAULT_BUCKET_MIB:g} MiB"
    raise PlanError(Problem(f"parallelism.first_bucket_mib={ddp.first_bucket_mib:g}", rule, cure))


def _buffers_stay() -> dict[str, bool]:
    """The argument by which buffers are not sent around; its name has changed."""
    accepted = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers": False}


def _itself(average: Tensor) -> Tensor:
    return average
