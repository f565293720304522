"""Ranks that are all held at once: only their launcher can notice, and it must not take a slow run or its own pause for a hang."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from llmtrain.config.errors import ExitCode
from llmtrain.dist.failure import failure_file
from llmtrain.dist.position import Position, mapped_position
from llmtrain.dist.spawn import LOOK_SECONDS, Stillness, launch_ranks
from llmtrain.dist.verdict import RankEnd, position_file, read_failures
from llmtrain.dist.world import LaunchFacts

LIMIT = 10.0


class Played:
    """A launcher's look at two ranks, by a clock that the test sets."""

    def __init__(self, reports: Path) -> None:
        self.now = 0.0
        self.reports = reports
        self.places: list[Position] = [mapped_position(position_file(reports, rank)) for rank in range(2)]
        self._stillness = Stillness(reports, LIMIT, clock=lambda: self.now)

    def look(self, after: float = LOOK_SECONDS) -> bool:
        """Whether word of a hang is left now."""
        self.now += after
        self._stillness.look([RankEnd(rank, 100 + rank, None, 0.0, (), False) for rank in range(2)])
        return bool(read_failures(self.reports))

    def looks(self, count: int) -> bool:
        return any([self.look() for _ in range(count)])


@pytest.fixture
def played(tmp_path: Path) -> Played:
    played = Played(tmp_path)
    for place in played.places:
        place.at_step(7)
        place.enter("backward")
    played.places[0].issued()
    return played


def test_ranks_that_stand_still_are_told_of_with_the_one_behind(played: Played) -> None:
    assert not played.looks(10), "the first look only learns where they are"
    assert played.look()
    ((_, failure),) = read_failures(played.reports)
    assert (failure.rank, failure.pid, failure.kind, failure.code) == (1, 101, "hang", ExitCode.LOST)
    assert (failure.phase, failure.step) == ("backward", 7)
    assert failure_file(played.reports, 1).exists()


def test_one_that_moves_keeps_all_of_them(played: Played) -> None:
    for _ in range(6):
        assert not played.looks(8)
        played.places[1].tick()


def test_a_pause_of_the_launcher_is_none_of_the_ranks(played: Played) -> None:
    """It was stopped together with them, or the machine slept: nobody had the time to move."""
    assert not played.looks(3)
    assert not played.look(after=1000.0) and not played.looks(4)


def test_a_rank_that_has_not_come_yet_is_waited_for(tmp_path: Path) -> None:
    played = Played(tmp_path)
    position_file(tmp_path, 1).unlink()
    assert not played.looks(50)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[[LaunchFacts], Popen[bytes]]]:
    started: list[Popen[bytes]] = []

    def start(place: LaunchFacts) -> Popen[bytes]:
        mapped_position(position_file(tmp_path, place.rank)).enter("forward")
        started.append(Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], process_group=0))
        started[-1].send_signal(signal.SIGSTOP)
        return started[-1]

    yield start
    assert all(process.poll() is not None for process in started), "ended with the launcher's call"


def test_b54_ranks_that_are_all_stopped_end_within_a_bound(tmp_path: Path, held: Callable[[LaunchFacts], Popen[bytes]]) -> None:
    places = [LaunchFacts(rank, rank, 2, "launch.nproc") for rank in range(2)]
    end = launch_ranks(places, held, reports=tmp_path, stop_signals=(signal.SIGTERM,), patience_seconds=0.2, still_seconds=2.0)
    failure = end.verdict.failure
    assert end.verdict.code is ExitCode.LOST and failure is not None and failure.kind == "hang" and failure.phase == "forward"
    assert "no rank has moved for 2 s" in failure.text and end.seconds < 30
