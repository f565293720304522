"""The watch with real processes: what hangs is named, stop signals reach all, lost ranks are told from those that have left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.watched_ranks import LIMIT, SHORT_TIMEOUT, WatchedRank, WatchedRanks, connect

from llmtrain.dist import watch as watch_module
from llmtrain.dist.beats import SILENT_SECONDS
from llmtrain.dist.failure import is_peer_trouble
from llmtrain.dist.position import Snapshot

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[WatchedRanks]:
    started = WatchedRanks(tmp_path)
    try:
        yield started
    finally:
        started.end()


def _stands_in_forward() -> None:
    time.sleep(LIMIT)


def _one_does_not_come(me: WatchedRank, absent: int) -> None:
    me.join_group()
    me.position.at_step(1)
    me.meet()
    me.position.at_step(7)
    me.position.enter("forward")
    me.position.at_microbatch(2)
    if me.rank == absent:
        _stands_in_forward()
    me.position.enter("reduce")
    me.meet()


@pytest.mark.parametrize("absent", [0, 1])
def test_b54_a_rank_that_hangs_is_named_and_not_the_one_that_waits(ranks: WatchedRanks, absent: int) -> None:
    ranks.start(lambda me: _one_does_not_come(me, absent), 2)
    failures = [ranks.verdict(rank) for rank in range(2)]
    assert [ranks.code(rank) for rank in range(2)] == [71, 71]
    assert failures[0] == failures[1], "both tell the same, the store's own rank not too early"
    failure = failures[0]
    assert (failure.kind, failure.rank, failure.reporter, failure.code) == ("hang", absent, 0, 71)
    assert (failure.phase, failure.step, failure.microbatch) == ("forward", 7, 2)
    assert "_stands_in_forward" in failure.stacks[absent] and "all_reduce" in failure.stacks[1 - absent]
    assert f"rank {absent} is behind" in failure.text and "does not answer" not in failure.text


def _stop(me: WatchedRank, stopped: int) -> None:
    me.join_group()
    me.position.at_step(3)
    me.meet()
    if me.rank == stopped:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        me.meet()
    except RuntimeError:
        # One of the others has given its verdict a moment earlier.
        me.leave("broken", True)
        time.sleep(LIMIT)


@pytest.mark.parametrize(("stopped", "serves", "judge"), [(1, True, 0), (0, False, 1)])
def test_a_stopped_rank_is_named_and_the_next_one_judges_when_it_is_the_judge(
    ranks: WatchedRanks, stopped: int, serves: bool, judge: int
) -> None:
    ranks.start(lambda me: _stop(me, stopped), 3, serves=serves)
    alive = [rank for rank in range(3) if rank != stopped]
    failures = [ranks.verdict(rank) for rank in alive]
    assert [ranks.code(rank) for rank in alive] == [71, 71]
    assert failures[0] == failures[1]
    assert (failures[0].rank, failures[0].reporter, failures[0].step) == (stopped, judge, 3)
    assert failures[0].pid == ranks.pids[stopped]
    assert f"rank {stopped} does not answer" in failures[0].text
    assert sorted(failures[0].stacks) == alive


def _ends_within_a_verdict(me: WatchedRank) -> None:
    me.position.at_step(me.rank)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while not me.watch._has_verdict:
        time.sleep(0.01)


def test_a_rank_that_ends_while_a_verdict_is_made_leaves_it_to_the_verdict(ranks: WatchedRanks) -> None:
    """As when the ranks that hang are ended first, which breaks the collective that the judge's rank waits in."""
    ranks.start(_ends_within_a_verdict, 2)
    assert ranks.code(0) == 71
    assert ranks.verdict(0).kind == "hang"


def test_a_stopped_server_of_the_store_is_named_by_each_of_the_others(ranks: WatchedRanks) -> None:
    ranks.start(lambda me: _stop(me, 0), 3)
    for rank in (1, 2):
        failure = ranks.verdict(rank)
        assert ranks.code(rank) == 71
        assert (failure.rank, failure.reporter, failure.kind) == (0, rank, "hang")
        assert "rank 0 does not answer" in failure.text
        assert "all_reduce" in failure.stacks[rank] or (ranks.folder / f"broken{rank}").exists()


def _one_ticks(me: WatchedRank) -> None:
    deadline = time.monotonic() + 4 * SHORT_TIMEOUT
    while time.monotonic() < deadline:
        if me.rank == 1:
            me.position.tick()
        time.sleep(SHORT_TIMEOUT / 4)


def test_no_verdict_while_any_rank_moves(ranks: WatchedRanks) -> None:
    ranks.start(_one_ticks, 3, serves=False)
    assert [ranks.code(rank) for rank in range(3)] == [0, 0, 0]


def test_time_in_which_all_ranks_are_stopped_is_no_hang(ranks: WatchedRanks) -> None:
    ranks.start(_ticks_often, 2, serves=False)
    for rank in range(2):
        ranks.found("began", rank)
    for number, pause in ((signal.SIGSTOP, 3 * SHORT_TIMEOUT), (signal.SIGCONT, 0.0)):
        for pid in ranks.pids:
            os.kill(pid, number)
        time.sleep(pause)
    assert [ranks.code(rank) for rank in range(2)] == [0, 0]


def _ticks_often(me: WatchedRank) -> None:
    me.leave("began", True)
    for _ in range(40):
        me.position.tick()
        time.sleep(SHORT_TIMEOUT / 10)


def _waits_for_a_stop(me: WatchedRank) -> None:
    me.leave("began", True)
    while not me.signals:
        time.sleep(0.01)
    me.leave("stopped", [int(number) for number in me.signals])
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        me.position.tick()
        time.sleep(0.05)
    me.leave("all", [int(number) for number in me.signals])


def _begin_waiting(ranks: WatchedRanks, size: int) -> None:
    ranks.start(_waits_for_a_stop, size, serves=False, timeout_seconds=20.0)
    for rank in range(size):
        ranks.found("began", rank)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("first", [0, 2])
def test_b55_a_stop_signal_to_any_rank_reaches_all_once(ranks: WatchedRanks, number: int, first: int) -> None:
    _begin_waiting(ranks, 3)
    sent = time.monotonic()
    os.kill(ranks.pids[first], number)
    # Passed on as another signal, because two of SIGINT end a run at once.
    passed_on = signal.SIGTERM if number == signal.SIGINT else number
    for rank in range(3):
        assert ranks.found("stopped", rank) == [number if rank == first else passed_on]
    assert time.monotonic() - sent < 4.0
    for rank in range(3):
        assert ranks.found("all", rank) == [number if rank == first else passed_on]
        assert ranks.code(rank) == 0


def test_a_stop_signal_to_all_ranks_counts_once_and_a_second_one_stays_where_it_is(ranks: WatchedRanks) -> None:
    _begin_waiting(ranks, 2)
    for pid in ranks.pids:
        os.kill(pid, signal.SIGINT)
    for rank in range(2):
        assert ranks.found("stopped", rank) == [signal.SIGINT]
    os.kill(ranks.pids[1], signal.SIGINT)
    assert ranks.found("all", 0) == [signal.SIGINT]
    assert ranks.found("all", 1) == [signal.SIGINT, signal.SIGINT]


def _loses(me: WatchedRank, killed: int, number: int) -> None:
    me.join_group()
    me.position.at_step(5)
    me.position.enter("backward")
    me.meet()
    time.sleep(1.0)
    if me.rank == killed:
        os.kill(os.getpid(), number)
    began = time.monotonic()
    try:
        me.meet()
    except RuntimeError as error:
        assert is_peer_trouble(error), error
    lost = me.watch.lost_rank()
    seconds = time.monotonic() - began
    known = me.watch.known.get(lost if lost is not None else -1)
    me.leave("lost", [lost, known and known.to_dict(), me.watch.process(lost or 0), seconds])
    # Frees a rank that waits for this one instead of the lost one; whoever serves the store waits until all have found out.
    dist.destroy_process_group()
    me.wait_for("lost", [rank for rank in range(me.size) if rank != killed])


@pytest.mark.parametrize(("killed", "serves"), [(1, True), (0, False), (0, True)])
def test_b54_a_killed_rank_is_named_by_all_others(ranks: WatchedRanks, killed: int, serves: bool) -> None:
    ranks.start(lambda me: _loses(me, killed, signal.SIGKILL), 3, serves=serves, timeout_seconds=30.0)
    pid = ranks.pids[killed]
    for rank in range(3):
        if rank == killed:
            assert ranks.code(rank) == -signal.SIGKILL
            continue
        found = ranks.found("lost", rank)
        assert isinstance(found, list)
        assert found[0] == killed
        assert Snapshot.from_dict(found[1]) == Snapshot("backward", 5, 0, 1, 0)
        assert found[2] == ["here", pid]
        assert found[3] < 10.0
        assert ranks.code(rank) == 0


def test_the_store_of_another_process_blames_no_rank_when_it_is_gone(ranks: WatchedRanks) -> None:
    """As when torchrun dies: rank 0 does not serve it, and is not lost."""
    port_holder = socket.create_server(("127.0.0.1", 0))
    port = port_holder.getsockname()[1]
    ranks.fork(lambda: _serve(os.dup(port_holder.fileno()), port))
    ranks.fork(lambda: _outlives_the_store(WatchedRank(1, 2, port, None, ranks.folder)))
    ranks.found("began", 1)
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert ranks.found("lost", 1) is None
    failure = ranks.verdict(1)
    assert (failure.rank, failure.kind) == (1, "hang") and "torchrun" in failure.text
    assert ranks.code(1) == 71


def _serve(listener: int, port: int) -> None:
    store = connect(port, listener)
    time.sleep(LIMIT)
    del store


def _outlives_the_store(me: WatchedRank) -> None:
    me.leave("began", True)
    while not me.watch._line.is_gone:
        me.position.tick()
        time.sleep(0.05)
    me.leave("lost", me.watch.lost_rank())
    time.sleep(LIMIT)


def _is_lost_or_only_stopped(me: WatchedRank) -> None:
    me.leave("began", True)
    if me.rank == 0:
        me.wait_for("killed", [1])
        me.leave("lost", me.watch.lost_rank())
        return
    time.sleep(LIMIT)


def test_a_rank_that_speaks_again_is_not_taken_for_the_killed_one(ranks: WatchedRanks) -> None:
    """As one in native code that holds Python's lock, silent before the other one was killed."""
    ranks.start(_is_lost_or_only_stopped, 3, timeout_seconds=100.0)
    for rank in range(3):
        ranks.found("began", rank)
    os.kill(ranks.pids[2], signal.SIGSTOP)
    time.sleep(SILENT_SECONDS + 0.5)
    os.kill(ranks.pids[1], signal.SIGKILL)
    (ranks.folder / "killed1").touch()
    time.sleep(SILENT_SECONDS + 1.0)
    assert not (ranks.folder / "lost0").exists(), "it may be any of the two"
    os.kill(ranks.pids[2], signal.SIGCONT)
    assert ranks.found("lost", 0) == 1


def _some_leave(me: WatchedRank) -> None:
    if me.rank == 1:
        time.sleep(0.5)
        began = time.monotonic()
        me.watch.stop()
        me.leave("seconds", time.monotonic() - began)
        return
    me.wait_for("seconds", [1])
    me.leave("lost", me.watch.lost_rank())
    deadline = time.monotonic() + 7.0
    while time.monotonic() < deadline:
        me.position.tick()
        time.sleep(0.1)


def test_ranks_that_have_left_are_not_lost(ranks: WatchedRanks) -> None:
    ranks.start(_some_leave, 2, timeout_seconds=6.0)
    assert [ranks.code(rank) for rank in range(2)] == [0, 0]
    assert ranks.found("lost", 0) is None
    seconds = ranks.found("seconds", 1)
    assert isinstance(seconds, float) and seconds < 1.0


def _starts_a_rank(ranks: WatchedRanks, port: int) -> None:
    """A launcher: its rank goes on when it is killed, and is somebody else's child then."""
    launcher = os.getpid()
    if os.fork() == 0:
        me = WatchedRank(0, 2, port, None, ranks.folder, launcher_pid=launcher, timeout_seconds=1000.0)
        me.leave("pid", os.getpid())
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if me.signals:
                me.leave("signals", [int(number) for number in me.signals])
            time.sleep(0.1)
        os._exit(3)
    time.sleep(LIMIT)


def test_ranks_of_a_dead_launcher_are_asked_to_stop_and_then_end(ranks: WatchedRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "ORPHAN_SECONDS", 2.0)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = connect(port, os.dup(listener.fileno()))
    ranks.fork(lambda: _starts_a_rank(ranks, port))
    pid = ranks.found("pid", 0)
    assert isinstance(pid, int)
    time.sleep(1.0)
    assert not (ranks.folder / "signals0").exists()
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert ranks.found("signals", 0) == [signal.SIGTERM]
    deadline = time.monotonic() + 15.0
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the rank lives on"
        time.sleep(0.1)
    assert ranks.found("signals", 0) == [signal.SIGTERM], "once"
    del store
