"""Sums over ranks: exact, in order, counted and timed."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.group import grouped
from torch import Tensor

from llmtrain.dist import collectives
from llmtrain.dist.collectives import CommSummary, GroupCollectives, Meter, NoCollectives
from llmtrain.dist.position import Position

WAIT = 0.3
"""Seconds that one rank lets the others wait."""


def every_call(place: Any, folder: str) -> dict[str, Any]:
    with grouped(place, folder) as world:
        many = world.collectives
        many.meter.start_step()
        # Beyond what a double can tell apart.
        counts = many.sum_counts([2**60 + world.rank, world.rank])
        total = many.sum(torch.tensor([1.5 * (world.rank + 1), -1.0]))
        rows = many.gather(torch.tensor([world.rank, 7], dtype=torch.int64))
        scalars = many.gather(torch.tensor(0.5 * world.rank, dtype=torch.float64))
        return {
            "counts": counts,
            "sum": total.tolist(),
            "rows": rows.tolist(),
            "scalars": scalars.tolist(),
            "who": (many.rank, many.size),
            "meter": many.meter.summary(),
            "collectives": world.position.collectives,
        }


def test_sums_are_exact_and_rows_are_by_rank(ranks, tmp_path) -> None:
    for rank, got in enumerate(ranks.run(every_call, 3, str(tmp_path))):
        assert got["counts"] == [3 * 2**60 + 3, 3]
        assert got["sum"] == [9.0, -3.0]
        assert got["rows"] == [[0, 7], [1, 7], [2, 7]]
        assert got["scalars"] == [0.0, 0.5, 1.0]
        assert got["who"] == (rank, 3)
        assert got["collectives"] == got["meter"].num_calls == 4
        assert got["meter"].nbytes == 16 + 8 + 16 + 8
        assert 0 < got["meter"].exposed_seconds == got["meter"].total_seconds


def test_one_rank_is_its_own_sum_and_counts_nothing() -> None:
    position = Position()
    one = NoCollectives(position)
    one.meter.start_step()
    tensor = torch.tensor([1.0, 2.0])
    assert one.sum_counts([3, 4]) == [3, 4]
    assert one.sum(tensor) is tensor
    assert torch.equal(one.gather(tensor), tensor[None])
    assert (one.rank, one.size) == (0, 1)
    assert one.meter.summary() == CommSummary(0.0, 0.0, 0, 0)
    assert position.collectives == 0


def late_rank(place: Any, folder: str) -> CommSummary:
    """Rank 1 comes late to everything."""
    with grouped(place, folder) as world:
        many = world.collectives
        many.sum_counts([0])  # both have connected
        many.meter.start_step()
        time.sleep(WAIT * world.rank)
        many.sum(torch.zeros(2))
        return many.meter.summary()


def test_a_blocking_call_is_exposed_for_as_long_as_it_blocks(ranks, tmp_path) -> None:
    early, late = ranks.run(late_rank, 2, str(tmp_path))
    assert early.exposed_seconds == early.total_seconds > 0.8 * WAIT
    assert late.exposed_seconds < 0.5 * WAIT


def overlapping(place: Any, folder: str) -> tuple[CommSummary, list[Tensor]]:
    """Two buckets in a backward of which rank 1's first part takes long."""
    with grouped(place, folder) as world:
        many = world.collectives
        assert isinstance(many, GroupCollectives)
        many.sum_counts([0])
        many.meter.start_step()
        whole = torch.full((3,), float(world.rank + 1))
        if world.rank == 1:
            time.sleep(WAIT)
        first = many.average_bucket(whole, lambda average: average)
        if world.rank == 0:
            time.sleep(WAIT)
        small = torch.full((5,), 2.0 * world.rank, dtype=torch.bfloat16)
        second = many.average_bucket(small, lambda average: average.float() + 1)
        results = [first.wait(), second.wait()]
        many.meter.backward_done()
        return many.meter.summary(), results


def test_a_bucket_is_exposed_only_after_the_last_one_is_sent(ranks, tmp_path) -> None:
    outcomes = ranks.run(overlapping, 2, str(tmp_path))
    for summary, (first, second) in outcomes:
        assert torch.equal(first, torch.full((3,), 1.5))
        assert second.dtype == torch.float32 and torch.equal(second, torch.full((5,), 2.0))
        assert summary.num_calls == 2 and summary.nbytes == 3 * 4 + 5 * 2
        assert summary.exposed_seconds < 0.5 * WAIT
    early, late = (summary for summary, _ in outcomes)
    assert early.total_seconds > 0.8 * WAIT > 2 * late.total_seconds


def dying_peer(place: Any, folder: str) -> str:
    with grouped(place, folder) as world:
        many = world.collectives
        assert isinstance(many, GroupCollectives)
        many.sum_counts([0])
        if world.rank == 1:
            os._exit(0)
        future = many.average_bucket(torch.zeros(4), lambda average: average)
        with pytest.raises(RuntimeError) as waiting:
            future.wait()
        with pytest.raises(RuntimeError):
            many.sum(torch.zeros(4))
        return str(waiting.value)


def test_the_end_of_another_rank_is_an_error_where_the_sum_is_waited_for(ranks, tmp_path) -> None:
    job = ranks.start(dying_peer, 2, str(tmp_path))
    try:
        job.wait()
        kind, told = job.outcome(0)
    finally:
        ranks.finish(job)
    assert kind == "value" and "onnection" in told


class FakeEvent:
    """A CUDA event that the device passes when the test says so."""

    passed = 0.0
    made: list[FakeEvent] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0
        FakeEvent.made.append(self)

    def record(self) -> None:
        self.at = float(len(FakeEvent.made))

    def query(self) -> bool:
        return self.at <= FakeEvent.passed

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query() and end.query(), "torch would raise"
        return 1000 * (end.at - self.at)


def test_on_a_device_a_step_is_read_once_it_is_done_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.torch.cuda, "Event", FakeEvent)
    FakeEvent.made, FakeEvent.passed = [], 0.0
    tensor: Any = SimpleNamespace(nbytes=10, device=SimpleNamespace(type="cuda"))
    meter = Meter("dp_replicate")
    for step in (1, 2):
        meter.start_step()
        begun = meter.begin(tensor)
        meter.end(begun, tensor, exposed=False)
        meter.backward_done()
        if step == 1:
            assert meter.summary() == CommSummary(0.0, 0.0, 0, 0)
            FakeEvent.passed = 3.0
            assert meter.summary() == CommSummary(2.0, 1.0, 10, 1)
    assert meter.summary() == CommSummary(2.0, 1.0, 10, 1), "the device is still in step 2"
    FakeEvent.passed = 6.0
    assert meter.summary().nbytes == 10
