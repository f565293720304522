"""What ranks agree on when they meet: values, order, and that one rank's failure ends every wait."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from helpers.meetings import Ranks, Work, meet
from torch.distributed import DistNetworkError, HashStore, PrefixStore, TCPStore

from llmtrain.config.errors import ConfigError, DataError, ExitCode, PeerError, StoppedError, exit_code_of
from llmtrain.dist.failure import FAILURE_KEY, Failure
from llmtrain.dist.meeting import LocalMeeting, Meeting, StoreMeeting
from llmtrain.dist.position import Position

pytestmark = pytest.mark.timeout(60)


def failing(error: BaseException) -> Work:
    def work(meeting: StoreMeeting) -> None:
        with meeting.together("data"):
            raise error

    return work


def entering(phase: str) -> Work:
    def work(meeting: StoreMeeting) -> None:
        with meeting.together(phase):
            pass

    return work


fine = entering("data")


VALUES = [
    None,
    True,
    -0.0,
    0.1 + 0.2,
    math.inf,
    -math.inf,
    5e-324,
    2**200 + 1,
    "zwei Zeilen\nÄ \U0001f600 \udc80",
    {"a.b": [1, 1.0, {}], "": []},
]


@pytest.mark.parametrize("value", VALUES)
def test_every_rank_gets_what_rank_0_made(value: Any) -> None:
    def share(meeting: StoreMeeting) -> Any:
        return meeting.share("value", lambda: value if meeting.rank == 0 else pytest.fail("only rank 0 makes it"))

    for end in [*meet(share, share, share), LocalMeeting(Position()).share("value", lambda: value)]:
        assert end == value
        assert repr(end) == repr(value), "1 and 1.0 and True are equal too, 0.0 and -0.0 as well"


def test_what_is_not_a_number_stays_so() -> None:
    assert all(math.isnan(end) for end in meet(*[lambda meeting: meeting.share("loss", lambda: math.nan)] * 2))


def test_values_are_the_same_with_one_rank_and_with_more() -> None:
    alone = LocalMeeting(Position())
    assert (
        alone.share("shape", lambda: (1, 2)) == [1, 2] == meet(*[lambda meeting: meeting.share("shape", lambda: (1, 2))] * 2)[0]
    )
    assert alone.gather("shape", (1, 2)) == [[1, 2]]
    for value in ({3: "three"}, [{"a": {None: 1}}], {"path": object()}, b"bytes"):
        with pytest.raises(TypeError):
            alone.gather("odd", value)


def test_a_value_that_json_cannot_hold_fails_all_ranks() -> None:
    ends = meet(lambda meeting: meeting.gather("odd", 1), lambda meeting: meeting.gather("odd", {1, 2}))
    assert isinstance(ends[1], TypeError)
    assert (ends[0].rank, ends[0].exit_code) == (1, ExitCode.FAULT)


@pytest.mark.parametrize("size", [2, 5])
def test_gather_is_by_rank_on_every_rank(size: int) -> None:
    def gather(meeting: StoreMeeting) -> Any:
        return meeting.gather("square", meeting.rank**2)

    assert meet(*[gather] * size) == [[rank**2 for rank in range(size)]] * size


def test_many_meetings_keep_their_order_and_leave_nothing_behind() -> None:
    def work(meeting: StoreMeeting) -> list[Any]:
        return [meeting.gather("turn", [turn, meeting.rank]) for turn in range(50)]

    ranks = Ranks([work] * 3)
    assert ranks.wait() == [[[[turn, rank] for rank in range(3)] for turn in range(50)]] * 3
    assert ranks.store.num_keys() <= 2
    assert [position.collectives for position in ranks.positions] == [50] * 3


def test_nobody_leaves_before_all_are_done() -> None:
    may_end = threading.Event()

    def slow(meeting: StoreMeeting) -> None:
        with meeting.together("folder"):
            assert may_end.wait(20)

    ranks = Ranks([entering("folder"), slow, entering("folder")])
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in ranks.threads)
    assert [position.phase for position in ranks.positions] == ["folder"] * 3
    # The one that is behind is known by it.
    assert [position.collectives for position in ranks.positions] == [1, 0, 1]
    may_end.set()
    assert ranks.wait() == [None] * 3


def test_a_rank_that_makes_what_the_others_wait_for_is_behind() -> None:
    may_end = threading.Event()
    ranks = Ranks([lambda meeting: meeting.share("name", lambda: may_end.wait(20))] * 2)
    time.sleep(0.2)
    assert [position.collectives for position in ranks.positions] == [0, 1]
    may_end.set()
    assert ranks.wait() == [True, True]


@pytest.mark.parametrize("failed", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such thing"), ExitCode.CONFIG),
        (DataError("no such file"), ExitCode.DATA),
        (StoppedError("SIGTERM"), ExitCode.REQUEUE),
        (ValueError("a fault"), ExitCode.FAULT),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    ],
)
def test_one_failure_ends_all_with_its_code(failed: int, error: BaseException, code: ExitCode) -> None:
    works: list[Work] = [fine] * 3
    works[failed] = failing(error)
    ends = meet(*works)
    assert ends[failed] is error
    for end in ends[:failed] + ends[failed + 1 :]:
        assert isinstance(end, PeerError)
        assert (end.rank, exit_code_of(end)) == (failed, code)


def test_the_failing_rank_waits_for_nobody() -> None:
    has_failed = threading.Event()

    def slow(meeting: StoreMeeting) -> None:
        with meeting.together("data"):
            assert has_failed.wait(20)

    ranks = Ranks([slow, failing(DataError("gone"))])
    ranks.threads[1].join(20)
    assert isinstance(ranks.ends[1], DataError)
    has_failed.set()
    assert isinstance(ranks.wait()[0], PeerError)


def test_each_of_several_failures_is_raised_where_it_happened() -> None:
    errors = [DataError("one"), StoppedError("two")]
    turns = [threading.Event() for _ in range(4)]

    def at_turn(turn: int, work: Work) -> Work:
        def waiting(meeting: StoreMeeting) -> None:
            assert turns[turn].wait(20)
            try:
                work(meeting)
            finally:
                turns[turn + 1].set()

        return waiting

    turns[0].set()
    ends = meet(at_turn(1, failing(errors[0])), at_turn(2, fine), at_turn(0, failing(errors[1])))
    assert ends[0] is errors[0] and ends[2] is errors[1]
    assert (ends[1].rank, ends[1].exit_code) == (2, ExitCode.REQUEUE), "the first that failed counts"


def test_rank_0_fails_while_it_makes_what_is_shared() -> None:
    def share(meeting: StoreMeeting) -> Any:
        return meeting.share("name", lambda: 1 / 0)

    ends = meet(share, share)
    assert isinstance(ends[0], ZeroDivisionError)
    assert (ends[1].rank, ends[1].exit_code) == (0, ExitCode.FAULT)
    assert str(ends[1]) == "error: rank 0: division by zero"


def test_a_failure_within_a_meeting_within_a_phase_is_told_once() -> None:
    def make() -> str:
        raise DataError("damaged")

    def work(meeting: StoreMeeting) -> Any:
        with meeting.together("data"):
            return meeting.share("corpus", make)

    ends = meet(work, work, work)
    assert isinstance(ends[0], DataError)
    assert [(end.rank, end.exit_code) for end in ends[1:]] == [(0, ExitCode.DATA)] * 2


def test_ranks_in_different_meetings_are_told_so() -> None:
    ends = meet(
        lambda meeting: meeting.share("folder", lambda: 1),
        lambda meeting: meeting.gather("data", 1),
        lambda meeting: meeting.share("folder", lambda: 1),
    )
    for rank, end in enumerate(ends):
        assert type(end) is AssertionError
        assert "`share folder`" in str(end) and "`gather data`" in str(end) and f"rank {rank} in " in str(end)


def test_a_failure_told_elsewhere_ends_the_wait() -> None:
    def within(meeting: StoreMeeting) -> None:
        with meeting.together("data"):
            meeting.gather("files", [])

    ranks = Ranks([fine, within, lambda meeting: None])
    failure = Failure(2, "host", 1, "backward", 7, 0, "hang", int(ExitCode.LOST), "stands still\nsince 9:00", 0)
    ranks.store.set(FAILURE_KEY, json.dumps(failure.to_dict()))
    for end in ranks.wait()[:2]:
        assert (end.rank, end.exit_code) == (2, ExitCode.LOST)
        assert str(end) == "error: rank 2: stands still in phase backward of step 7, micro-batch 0"
    assert not ranks.store.check(["meeting/error"]), "who is told of a failure is no cause of it"


def test_what_another_ranks_end_causes_is_told_as_no_cause() -> None:
    broken = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    ranks = Ranks([failing(broken), failing(DistNetworkError("store gone"))])
    assert ranks.wait()[0] is broken
    assert not ranks.store.check(["meeting/error"])


class GoneStore(HashStore):
    """A store whose server has ended."""

    def compare_set(self, *_: object) -> Any:
        raise DistNetworkError("Failed to recv, got 0 bytes")


def test_a_store_that_is_gone_hides_no_error() -> None:
    error = DataError("damaged")
    assert Ranks([failing(error)], GoneStore()).wait()[0] is error


def test_what_is_made_once_outlives_an_attempt() -> None:
    run = HashStore()
    made: list[int] = []

    def name(meeting: StoreMeeting) -> Any:
        return meeting.share_once("run name", lambda: made.append(1) or f"tiny-{len(made)}")

    for attempt in range(3):
        store = PrefixStore(str(attempt), run)
        assert Ranks([name] * 2, store, run).wait() == ["tiny-1"] * 2
    assert Ranks([name] * 2, PrefixStore("other", run), PrefixStore("other job", run)).wait() == ["tiny-2"] * 2


def test_over_the_network_as_well() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def work(meeting: StoreMeeting) -> Any:
        with meeting.together("data"):
            big = meeting.share("text", lambda: "Ä" * 1_000_000)
        return len(big), meeting.gather("rank", meeting.rank), meeting.share_once("name", lambda: "n")

    assert Ranks([work] * 3, PrefixStore("0", server)).wait() == [(1_000_000, [0, 1, 2], "n")] * 3
    assert server.num_keys() <= 3


class Signalled(Exception):
    pass


@pytest.fixture
def signalled_soon() -> Iterator[None]:
    def raise_it(*_: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGUSR1, raise_it)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    yield
    timer.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("signalled_soon")
@pytest.mark.parametrize("rank", [0, 1])
def test_signals_are_noticed_while_waiting(rank: int) -> None:
    with pytest.raises(Signalled):
        fine(StoreMeeting(HashStore(), rank, 2, Position()))


@pytest.mark.parametrize("make", [LocalMeeting, lambda position: StoreMeeting(HashStore(), 0, 1, position)])
def test_one_rank_meets_itself(make: Callable[[Position], Meeting]) -> None:
    position = Position()
    meeting = make(position)
    entered: AbstractContextManager[None] = meeting.together("data")
    with entered:
        assert position.phase == "data"
    assert (meeting.rank, meeting.size) == (0, 1)
    assert meeting.share("a", lambda: 1) == meeting.share_once("b", lambda: 1) == meeting.gather("c", 1)[0] == 1
    with pytest.raises(DataError):
        with meeting.together("data"):
            raise DataError("damaged")
