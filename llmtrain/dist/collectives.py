"""Sums over the ranks of a run, and a meter that knows what each of them costs.

Everything that this package sends between ranks during an update goes through here, so that the position of a rank counts it and the
meter times it. Not seen: the one broadcast of bucket numbers inside torch's DistributedDataParallel, once a process.

Legend: R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from llmtrain.dist.position import Position

DATA_AXIS = "dp_replicate"

Moment: TypeAlias = "float | torch.cuda.Event"
"""Seconds of the host's clock, or what a CUDA stream passes."""


@dataclass(frozen=True)
class CommSummary:
    """Communication of one update on one axis, on this rank."""

    exposed_seconds: float
    """Time in which this rank did nothing but wait: blocking calls, and of the buckets what was left when backward had no more to do."""
    total_seconds: float
    """From issue to completion, summed over the calls; calls that overlap count each."""
    nbytes: int
    """Payload handed to the calls; what goes over the wire depends on the algorithm."""
    num_calls: int


@dataclass
class _Step:
    """What one update has communicated; pairs of moments are subtracted when somebody asks."""

    exposed: list[tuple[Moment, Moment]] = field(default_factory=list)
    total: list[tuple[Moment, Moment]] = field(default_factory=list)
    nbytes: int = 0
    num_calls: int = 0

    def read(self) -> CommSummary | None:
        """None while the device has not passed every moment."""
        if not all(_is_past(end) for _, end in (*self.exposed, *self.total)):
            return None
        exposed = sum(_seconds(begin, end) for begin, end in self.exposed)
        return CommSummary(exposed, sum(_seconds(begin, end) for begin, end in self.total), self.nbytes, self.num_calls)


class Meter:
    """Times the collectives of an axis. It never waits for the device.

    An update that the device has not finished cannot be read yet; then `summary` still describes the one before.
    """

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self._step, self._before = _Step(), _Step()
        self._last_issue: tuple[Moment, str] | None = None

    def start_step(self) -> None:
        """Begin an update; what was counted until now is that of the one before."""
        self._before, self._step = self._step, _Step()

    def summary(self) -> CommSummary:
        """The newest update that can be read: the running one as far as it is, or the one before."""
        return self._step.read() or self._before.read() or CommSummary(0.0, 0.0, 0, 0)

    def begin(self, tensor: Tensor) -> Moment:
        """A call with this payload is issued."""
        self._step.nbytes += tensor.nbytes
        self._step.num_calls += 1
        begun = _now(tensor.device.type)
        self._last_issue = begun, tensor.device.type
        return begun

    def end(self, begun: Moment, tensor: Tensor, *, exposed: bool) -> None:
        """The call is complete; `exposed` if nothing else was done meanwhile. May be told by another thread."""
        span = begun, _now(tensor.device.type)
        self._step.total.append(span)
        if exposed:
            self._step.exposed.append(span)

    def backward_done(self) -> None:
        """A backward that has issued calls has come to its end: since the last of them there was only waiting."""
        assert self._last_issue is not None, "this backward has sent nothing"
        begun, device_type = self._last_issue
        self._step.exposed.append((begun, _now(device_type)))


class NoMeter:
    """The meter of one rank: nothing is sent."""

    axis = DATA_AXIS

    def start_step(self) -> None:
        pass

    def summary(self) -> CommSummary:
        return CommSummary(0.0, 0.0, 0, 0)


class Collectives(Protocol):
    """Blocking sums over ranks; every rank makes the same calls in the same order."""

    size: int
    rank: int

    @property
    def meter(self) -> Meter | NoMeter:
        """Of the axis that the ranks are on."""
        ...

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Exact sums, on the host."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` becomes its sum over ranks, in place; gives it back."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """[R, *shape]: `tensor` of each rank, by rank; shape and dtype agree on all."""
        ...


class NoCollectives:
    """One rank: everything is its own sum."""

    def __init__(self, position: Position) -> None:
        self.size, self.rank = 1, 0
        self.meter = NoMeter()

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        return list(counts)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]


class GroupCollectives:
    """Sums over a process group of torch.

    Args:
        group: all ranks; has to serve CPU tensors and those of `device`.
        position: counts the calls.
        device: where gradients live.

    Raises:
        RuntimeError: each method does, in torch's words, when another rank is gone or the group's time is over.
    """

    def __init__(self, group: dist.ProcessGroup, position: Position, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size, self.rank = group.size(), group.rank()
        self.meter = Meter(DATA_AXIS)
        self._position = position

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        total: list[int] = self.sum(torch.tensor(list(counts), dtype=torch.int64)).tolist()
        return total

    def sum(self, tensor: Tensor) -> Tensor:
        begun = self._issue(tensor)
        dist.all_reduce(tensor, group=self.group)
        self.meter.end(begun, tensor, exposed=True)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        begun = self._issue(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        self.meter.end(begun, tensor, exposed=True)
        return torch.stack(parts)

    def average_bucket(self, sent: Tensor, finish: Callable[[Tensor], Tensor]) -> Future[Tensor]:
        """Begin to average `sent` over ranks, in place.

        Args:
            sent: [n], not to be touched until the future is done.
            finish: makes of the average what the future gives; called by the thread that completes the call.
        """
        begun = self._issue(sent)
        sent.div_(self.size)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        assert work is not None, "this process is one of the group"
        meter = self.meter

        # Knows nothing of the group: a thread of the group lets go of it, and must not be the last that held the group, whose end
        # waits for its threads.
        def complete(done: Future[list[Tensor]]) -> Tensor:
            result = finish(done.value()[0])
            meter.end(begun, sent, exposed=False)
            return result

        future: Future[Tensor] = work.get_future().then(complete)
        return future

    def _issue(self, tensor: Tensor) -> Moment:
        self._position.issued()
        return self.meter.begin(tensor)


def _now(device_type: str) -> Moment:
    if device_type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_past(moment: Moment) -> bool:
    return isinstance(moment, float) or moment.query()


def _seconds(begin: Moment, end: Moment) -> float:
    """Both are of one clock."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    return float(begin.elapsed_time(end)) / 1000
