"""Which rank is named as lost: one that is gone, not one that speaks again, and none because there are many or the store is slow."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch.distributed as dist
from helpers.played_time import Time

from llmtrain.dist.beats import Beats, Clock, StoreLine
from llmtrain.dist.lost import LOST_SECONDS, NOBODY, LostRank
from llmtrain.dist.position import Position

PERIOD = 0.5


class Ranks:
    """Ranks on one store of which the first judges and the last asks; a call to the store takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, call_seconds: float = 0.0) -> None:
        self.time = Time(monkeypatch)
        self.call_seconds = call_seconds
        store = dist.HashStore()
        self.beats = [self._beats(store, self.time.clock(), rank, size) for rank in range(size)]
        line, clock = StoreLine(_Slow(store, self), self.time.clock()), self.time.clock()  # type: ignore[arg-type]
        self.reader = Beats(line, clock, rank=0, size=size, host="", position=Position())
        self.judge = LostRank(line, clock, self.reader)
        clock = self.time.clock()
        asker = Beats(StoreLine(store, clock), clock, rank=size - 1, size=size, host="", position=Position())
        self.asker = LostRank(asker.line, clock, asker)

    def _beats(self, store: dist.Store, clock: Clock, rank: int, size: int) -> Beats:
        return Beats(StoreLine(store, clock), clock, rank=rank, size=size, host="", position=Position())

    def pass_seconds(self, seconds: float, silent: Collection[int] = (), *, asked: bool = True) -> int | None:
        """All but the silent ranks beat, the judge reads and answers, the asker looks; what that one has been told."""
        end = self.time.seconds + seconds
        while self.time.seconds < end and self.asker.found is None:
            self.beat(silent)
            self.time.passes(PERIOD)
            self.reader.read(range(len(self.beats)))
            self.judge.look()
            if asked:
                self.asker.ask()
        return self.asker.found

    def beat(self, silent: Collection[int]) -> None:
        for rank, beats in enumerate(self.beats):
            if rank not in silent:
                beats.publish()


class _Slow:
    """A store of which each call takes a while, in which the ranks beat on."""

    def __init__(self, store: dist.Store, ranks: Ranks) -> None:
        self._store = store
        self._ranks = ranks

    def __getattr__(self, name: str) -> object:
        def call(*args: object) -> object:
            self._ranks.time.passes(self._ranks.call_seconds)
            return getattr(self._store, name)(*args)

        return call


def test_one_silent_rank_is_named_as_soon_as_all_others_have_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 5)
    assert ranks.pass_seconds(10.0, asked=False) is None and not ranks.judge.is_looked_for
    began = ranks.time.seconds
    assert ranks.pass_seconds(60.0, silent=[2]) == 2
    assert ranks.time.seconds - began <= 4.5


def test_one_that_was_silent_before_and_speaks_again_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 4)
    ranks.pass_seconds(5.0, asked=False)
    ranks.pass_seconds(4.0, silent=[1], asked=False)
    assert ranks.pass_seconds(5.5, silent=[1, 2]) is None, "it may be either"
    assert ranks.pass_seconds(3.0, silent=[2]) == 2


def test_of_several_that_stay_silent_the_one_for_longest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 5)
    ranks.pass_seconds(5.0, asked=False)
    ranks.pass_seconds(2.0, silent=[3], asked=False)
    began = ranks.time.seconds
    assert ranks.pass_seconds(60.0, silent=[1, 3]) == 3
    assert LOST_SECONDS < ranks.time.seconds - began <= LOST_SECONDS + 2.0


def test_nobody_is_named_when_all_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 3)
    ranks.pass_seconds(5.0, asked=False)
    assert ranks.pass_seconds(60.0) == NOBODY


def test_a_rank_that_has_never_come_is_the_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 4)
    assert ranks.pass_seconds(60.0, silent=[2]) == 2


@pytest.mark.parametrize("call_seconds", [0.5, 1.5, 4.0])
def test_a_slow_store_makes_no_rank_silent(monkeypatch: pytest.MonkeyPatch, call_seconds: float) -> None:
    ranks = Ranks(monkeypatch, 100, call_seconds)
    assert ranks.pass_seconds(300.0) == NOBODY


def test_the_place_of_the_lost_rank_is_known_to_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 4)
    ranks.pass_seconds(5.0, asked=False)
    assert ranks.pass_seconds(60.0, silent=[1]) == 1
    assert sorted(ranks.asker._beats.known) == [1]
