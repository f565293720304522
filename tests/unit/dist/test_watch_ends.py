"""When the watch ends its own process: stuck after a failure elsewhere, or its own thread has met what it cannot read."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.watched_ranks import LIMIT, SHORT_TIMEOUT, WatchedRank, WatchedRanks

from llmtrain.dist import watch as watch_module
from llmtrain.dist.failure import Failure

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[WatchedRanks]:
    started = WatchedRanks(tmp_path)
    try:
        yield started
    finally:
        started.end()


def _fails_elsewhere(me: WatchedRank) -> None:
    if me.rank == 1:
        me.board.post(Failure(1, "here", 1, "data", 0, 0, "error", 65, "error: no text", 1))
        me.leave("lost", me.watch.lost_rank())
        return
    time.sleep(LIMIT)


def test_a_rank_stuck_after_another_one_has_failed_is_ended_with_that_cause(
    ranks: WatchedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "FAILED_SECONDS", 1.0)
    ranks.start(_fails_elsewhere, 2, timeout_seconds=1000.0)
    assert ranks.verdict(0).text == "error: no text"
    assert ranks.code(0) == 65
    assert ranks.code(1) == 0 and ranks.found("lost", 1) is None


def _saves_while_another_fails(me: WatchedRank) -> None:
    if me.rank == 1:
        me.board.post(Failure(1, "here", 1, "data", 0, 0, "error", 65, "error: no text", 1))
        return
    me.position.enter("save")
    while me.watch._failed_at is None:
        time.sleep(0.05)
    deadline = time.monotonic() + 4.0
    while time.monotonic() < deadline:
        me.position.tick()
        time.sleep(0.1)
    me.leave("saved", True)


def test_a_rank_that_saves_is_not_ended_because_another_one_has_failed(
    ranks: WatchedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "FAILED_SECONDS", 1.5)
    ranks.start(_saves_while_another_fails, 2, timeout_seconds=1000.0)
    assert ranks.code(0) == 0 and ranks.found("saved", 0)


def _finds(me: WatchedRank, key: str, value: str) -> None:
    if me.rank == 1:
        me.store.set(key, value)
    deadline = time.monotonic() + SHORT_TIMEOUT
    while time.monotonic() < deadline:
        me.position.tick()
        time.sleep(0.1)
    if me.watch._has_fault:
        me.leave("lost", me.watch.lost_rank())
        time.sleep(LIMIT)


def test_what_nobody_can_read_ends_a_rank_that_stands_still_and_is_said(
    ranks: WatchedRanks, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.start(lambda me: _finds(me, "watch/verdict", "no json"), 2, serves=False)
    for rank in range(2):
        assert ranks.found("lost", rank) is None, "no rank is to blame"
        failure = ranks.verdict(rank)
        assert (failure.rank, failure.kind, ranks.code(rank)) == (rank, "hang", 71)
        assert "its watch has failed" in failure.text
    assert capfd.readouterr().err.count("in _talk") == 2


@pytest.mark.parametrize("value", [str(int(signal.SIGKILL)), "SIGTERM"])
def test_only_a_stop_signal_is_passed_on(ranks: WatchedRanks, value: str) -> None:
    ranks.start(lambda me: _finds(me, "watch/stop", value), 2, serves=False, timeout_seconds=20.0)
    assert [ranks.code(rank) for rank in range(2)] == [0, 0]
    assert not list(ranks.folder.glob("lost*")), "and nothing has failed"


def _hangs(me: WatchedRank) -> None:
    time.sleep(LIMIT)


def _cannot_say_why(failure: Failure) -> NoReturn:
    raise BrokenPipeError


def test_a_verdict_ends_the_process_whatever_happens_to_its_words(ranks: WatchedRanks) -> None:
    ranks.start(_hangs, 2, on_verdict=_cannot_say_why)
    assert [ranks.code(rank) for rank in range(2)] == [71, 71]
