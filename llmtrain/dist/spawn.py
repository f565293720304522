"""Ranks that this process starts on its own machine: started, watched to the end of the last, and judged. Needs no torch.

The launcher computes nothing and holds nothing that the ranks need once they run: a stop signal is passed on to all of them, the first
failure gives the others a few seconds, and whatever ends the launcher ends the ranks.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from llmtrain.dist.failure import FailureBoard, failure_file
from llmtrain.dist.position import Snapshot, read_position
from llmtrain.dist.verdict import AGREED, RankEnd, Verdict, hang_of, position_file, reach_verdict, without_word
from llmtrain.dist.world import LaunchFacts

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 5.0
"""How long the other ranks may take to end by themselves once one has failed."""
LOOK_SECONDS = 1.0
"""Between two looks at the positions of the ranks."""
KILL_SECONDS = 3.0
"""How long SIGKILL may take; a process that waits for a disk that is gone outlives it, and is then left to the system."""

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class Process(Protocol):
    """A started rank; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, minus the number of the signal that ended it; None while it runs. Leaves no zombie."""
        ...

    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True)
class RanksEnd:
    """What became of the ranks of a run."""

    verdict: Verdict
    seconds: float
    ends: tuple[RankEnd, ...]
    """By rank."""
    began_at: float
    """Seconds since the epoch."""

    @property
    def failed_after(self) -> float:
        """Seconds from the start to the first end that is none of all ranks together."""
        return min([end.ended_at - self.began_at for end in self.ends if end.code not in AGREED], default=self.seconds)

    @property
    def is_told(self) -> bool:
        """Whether rank 0 came to its end, and so has said itself how the run went."""
        return self.ends[0].code in AGREED and not self.verdict.message


def end_with_launcher(launcher_pid: int) -> bool:
    """Have the system send this process SIGTERM when its launcher dies; called by a rank, first of all.

    Elsewhere than on Linux nothing is arranged: there the thread that watches the other ranks looks for the launcher too.

    Returns:
        Whether the launcher lives; False where it died before this could be arranged.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
    return os.getppid() == launcher_pid


def launch_ranks(
    places: Sequence[LaunchFacts],
    start: Callable[[LaunchFacts], Process],
    *,
    reports: Path,
    stop_signals: Sequence[signal.Signals],
    patience_seconds: float = PATIENCE_SECONDS,
    poll_seconds: float = POLL_SECONDS,
    still_seconds: float = math.inf,
) -> RanksEnd:
    """Start the ranks and wait until the last has ended; none outlives this call, however it ends.

    Args:
        places: one for each rank, by rank.
        start: starts one; what it raises comes through, when those that were started have been killed.
        reports: folder in which the ranks leave failures and positions.
        stop_signals: what is passed on to every rank, once for each arrival, and ends nothing here.
        patience_seconds: see PATIENCE_SECONDS.
        poll_seconds: pause between two looks at the ranks.
        still_seconds: ranks none of which has moved for so long are ended; well above what they wait for themselves, since they know
            more to say, unless native code or a signal holds all of them.

    Raises:
        ValueError: not called in the main thread, which alone may wait for signals.
    """
    began, began_at = time.monotonic(), time.time()
    with noted_signals(stop_signals) as noted, kept_exit_codes():
        crew = _Crew(noted, reports, stop_signals, still_seconds)
        try:
            for place in places:
                crew.ranks.append(_Rank(place, start(place)))
            crew.watch(patience_seconds, poll_seconds)
        finally:
            crew.kill()
        crew.note_stopped()
    ends = tuple(rank.end() for rank in crew.ranks)
    return RanksEnd(reach_verdict(ends, reports), time.monotonic() - began, ends, began_at)


@contextmanager
def noted_signals(numbers: Sequence[signal.Signals]) -> Iterator[list[int]]:
    """Context in which these signals do nothing but add their number to a list, at every arrival.

    A SIGHUP that is ignored, as under `nohup`, stays so.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    kept = [number for number in numbers if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in numbers if number not in kept}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def kept_exit_codes() -> Iterator[None]:
    """Context in which the system keeps how a child ended: some parents hand on that SIGCHLD is ignored, and then it does not."""
    before = signal.getsignal(signal.SIGCHLD)
    if before is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


class _Rank:
    """A started rank, and how far it was told of the signals."""

    def __init__(self, place: LaunchFacts, process: Process) -> None:
        self.number = place.rank
        self.code: int | None = None
        self._process = process
        self._pid = process.pid
        self._ended_at = 0.0
        self._passed_on: list[int] = []
        self._is_killed = False

    def end(self) -> RankEnd:
        return RankEnd(self.number, self._pid, self.code, self._ended_at, tuple(self._passed_on), self._is_killed)

    def has_ended(self) -> bool:
        if self.code is None:
            self.code = self._process.poll()
            if self.code is not None:
                self._ended_at = time.time()
                if self.code not in AGREED:
                    self._end_group()
        return self.code is not None

    def pass_on(self, noted: Sequence[int]) -> None:
        """Send the next signal that it has not got; one a call, because two of a kind at once arrive as one."""
        if len(self._passed_on) < len(noted):
            number = noted[len(self._passed_on)]
            self._send(number)
            self._passed_on.append(number)

    def has_got(self, number: int) -> None:
        """It ended by this signal, whoever has sent it."""
        if number not in self._passed_on:
            self._passed_on.append(number)

    def kill(self) -> None:
        if not self.has_ended():
            self._is_killed = True
            self._end_group()
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _end_group(self) -> None:
        """Kill what the rank has started and leaves behind: the processes of its group, which is named after it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)


class Stillness:
    """Looks from outside whether ranks still move, and leaves word of a hang that none of them can tell.

    The time that counts is that between looks which follow each other closely: a launcher that was stopped together with its ranks
    has seen nothing.
    """

    def __init__(self, reports: Path, still_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._reports = reports
        self._still_seconds = still_seconds
        self._clock = clock
        self._looked_at = clock()
        self._still = 0.0
        self._seen: list[Snapshot | None] = []

    def look(self, ends: Sequence[RankEnd]) -> None:
        """Called often, while all ranks run."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return
        elapsed, self._looked_at = min(now - self._looked_at, 2 * LOOK_SECONDS), now
        places = [read_position(position_file(self._reports, end.rank)) for end in ends]
        known = [place for place in places if place is not None]
        # A rank without a place has not come to the others yet, and those wait for it no longer than they want to.
        self._still = self._still + elapsed if places == self._seen and len(known) == len(ends) else 0.0
        self._seen = places
        if self._still < self._still_seconds:
            return
        place, end = min(zip(known, ends, strict=True), key=lambda one: (one[0].step, one[0].collectives))
        text = f"no rank has moved for {self._still_seconds:g} s, and none could say so: stopped, or native code holds Python's lock"
        FailureBoard(None, self._reports).report(hang_of(end, place, text))


class _Crew:
    """All ranks that were started."""

    def __init__(self, noted: list[int], reports: Path, stop_signals: Sequence[int], still_seconds: float) -> None:
        self.ranks: list[_Rank] = []
        self._noted = noted
        self._reports = reports
        self._stop_signals = stop_signals
        self._stillness = Stillness(reports, still_seconds)

    def watch(self, patience_seconds: float, poll_seconds: float) -> None:
        """Until every rank has ended, or the first failure is `patience_seconds` old."""
        failed_at: float | None = None
        while running := [rank for rank in self.ranks if not rank.has_ended()]:
            self.note_stopped()
            if failed_at is None and len(running) == len(self.ranks):
                self._stillness.look([rank.end() for rank in running])
            if failed_at is None and self._has_failed():
                failed_at = time.monotonic()
                self._tell_others()
            if failed_at is not None and time.monotonic() - failed_at >= patience_seconds:
                return
            for rank in running:
                rank.pass_on(self._noted)
            time.sleep(poll_seconds)

    def _tell_others(self) -> None:
        """Leave word of the first rank that ended without one, for those that wonder why it no longer answers."""
        ends = [rank.end() for rank in self.ranks]
        failed = next((end for end in ends if end.has_failed and not failure_file(self._reports, end.rank).exists()), None)
        if failed is not None and failed.code is not None:
            FailureBoard(None, self._reports).report(without_word(failed, failed.code, self._reports))

    def kill(self) -> None:
        """End the ranks that still run."""
        for rank in self.ranks:
            rank.kill()
        deadline = time.monotonic() + KILL_SECONDS
        while not all([rank.has_ended() for rank in self.ranks]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)

    def note_stopped(self) -> None:
        """A stop signal that ended a rank before it could catch it was sent to that one, and is meant for all."""
        for rank in self.ranks:
            if (number := -(rank.code or 0)) in self._stop_signals:
                rank.has_got(number)
                if number not in self._noted:
                    self._noted.append(number)

    def _has_failed(self) -> bool:
        """A rank has ended otherwise than all of them together do, or has left word that it will."""
        return any(
            (rank.code is not None and rank.code not in AGREED) or failure_file(self._reports, rank.number).exists()
            for rank in self.ranks
        )
