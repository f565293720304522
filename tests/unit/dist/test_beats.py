"""What ranks know of each other by their beats: ages by the reader's clock, ranks that have left, time that nobody ran."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from helpers.played_time import Time

from llmtrain.dist.beats import Beats, StoreLine
from llmtrain.dist.position import Position, Snapshot


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def _pair(time: Time) -> tuple[Beats, Beats, Position]:
    """Two ranks of three on one store, and the position of the first."""
    store = dist.HashStore()
    positions = Position(), Position()
    ranks = []
    for rank in range(2):
        clock = time.clock()
        line = StoreLine(store, clock)
        ranks.append(Beats(line, clock, rank=rank, size=3, host=f"node{rank}", position=positions[rank]))
    return ranks[0], ranks[1], positions[0]


def test_a_time_in_which_the_process_was_stopped_does_not_count(time: Time) -> None:
    clock = time.clock()
    began = clock.now()
    time.passes(10.0)
    assert clock.now() - began == 10.0
    time.seconds += 3600.0
    assert clock.now() - began == 10.0
    time.passes(1.0)
    assert clock.now() - began == 11.0


def test_what_a_rank_tells_is_known_to_the_reader(time: Time) -> None:
    told, reader, position = _pair(time)
    position.at_step(4)
    position.enter("save")
    told.publish()
    assert reader.place(0) == Snapshot("start", 0, 0, 0, 0) and reader.process(0) == ("?", 0)
    reader.read(range(3))
    assert reader.place(0) == reader.known[0] == Snapshot("save", 4, 0, 0, 0)
    assert reader.process(0) == ("node0", os.getpid()) and reader.process(1) == ("node1", os.getpid())
    assert sorted(reader.known) == [0]


def test_silence_counts_from_the_last_beat_that_was_seen(time: Time) -> None:
    told, reader, _ = _pair(time)
    told.publish()
    time.passes(100.0)
    reader.read([0])
    assert reader.silent_seconds(0) == 0.0, "an old beat is new to who reads it first"
    time.passes(3.0)
    reader.read([0])
    assert not reader.is_silent(0)
    time.passes(0.5)
    reader.read([0])
    assert reader.is_silent(0)
    told.publish()
    reader.read([0])
    time.passes(100.0)
    assert not reader.is_silent(0), "nobody has looked since"


def test_a_rank_that_has_not_come_is_silent_only_to_who_has_looked_for_it(time: Time) -> None:
    _, reader, _ = _pair(time)
    time.passes(50.0)
    assert not reader.is_silent(2)
    reader.read([2])
    assert not reader.is_silent(2)
    time.passes(4.0)
    assert not reader.is_silent(2), "nobody has looked again"
    reader.read([2])
    assert reader.is_silent(2) and reader.still_seconds(2) == 4.0
    assert not reader.is_silent(1), "oneself"


def test_standing_still_is_told_by_the_rank_itself_and_goes_on_while_it_is_silent(time: Time) -> None:
    told, reader, position = _pair(time)
    position.tick()
    told.look_at_self()
    time.passes(20.0)
    told.look_at_self()
    told.publish()
    reader.read([0])
    assert reader.still_seconds(0) == 20.0
    time.passes(5.0)
    reader.read([0])
    assert reader.still_seconds(0) == 25.0
    position.tick()
    told.look_at_self()
    told.publish()
    reader.read([0])
    assert reader.still_seconds(0) == 0.0


def test_a_rank_that_has_left_is_not_silent_and_no_longer_here(time: Time) -> None:
    told, reader, _ = _pair(time)
    told.publish()
    reader.read([0])
    assert reader.here() == [0, 1, 2]
    told.publish(has_left=True)
    reader.read([0])
    time.passes(100.0)
    assert reader.has_left(0) and not reader.is_silent(0)
    assert reader.here() == [1, 2]


def test_a_beat_is_later_than_the_look_that_did_not_find_it(time: Time) -> None:
    told, reader, _ = _pair(time)
    told.publish()
    time.passes(1.0)
    reader.read([0])
    assert reader.unseen_since(999.0) == [0, 2], "it may be old"
    time.passes(1.0)
    told.publish()
    time.passes(1.0)
    moment = time.seconds
    reader.read([0])
    assert reader.unseen_since(moment) == [0, 2], "read after the moment, but told before"
    time.passes(1.0)
    told.publish()
    reader.read([0])
    assert reader.unseen_since(moment) == [2]
    told.publish(has_left=True)
    reader.read([0])
    assert reader.unseen_since(time.seconds) == [2]


class _Counted(dist.HashStore):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.calls.append(f"check {len(keys)}")
        return super().check(keys)

    def get(self, key: str) -> bytes:
        self.calls.append("get")
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls.append(f"get {len(keys)}")
        return super().multi_get(keys)


def test_all_records_are_read_in_one_call(time: Time) -> None:
    store = _Counted()
    ranks = []
    for rank in range(6):
        clock = time.clock()
        ranks.append(Beats(StoreLine(store, clock), clock, rank=rank, size=6, host="", position=Position()))
    for rank in ranks[:5]:
        rank.publish()
    ranks[0].read(range(6))
    assert store.calls == ["check 5", *["check 1"] * 5, "get 4"]
    ranks[5].publish()
    ranks[0].read(range(6))
    store.calls.clear()
    ranks[0].read(range(6))
    assert store.calls == ["get 5"] and sorted(ranks[0].known) == [1, 2, 3, 4, 5]


class _BrokenStore:
    """A store whose server is gone; its last call took a while to find out."""

    def __init__(self, time: Time) -> None:
        self._time = time

    def check(self, keys: list[str]) -> bool:
        self._time.passes(2.0)
        raise dist.DistNetworkError("Broken pipe")


def test_a_store_that_is_gone_stays_silent(time: Time) -> None:
    line = StoreLine(_BrokenStore(time), time.clock())  # type: ignore[arg-type]
    assert (line.is_gone, line.silent_seconds) == (False, 0.0)
    with pytest.raises(dist.DistNetworkError):
        line.check("any")
    time.passes(5.0)
    assert (line.is_gone, line.silent_seconds) == (True, 7.0)
