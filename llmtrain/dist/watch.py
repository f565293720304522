"""Watches that all ranks of a run go on: passes stop signals on, names the rank that everybody waits for, and ends what hangs.

Each rank has two threads. One talks to the store; a store whose server is stopped never answers, so the other one looks only at this
process. One rank judges, the lowest that answers: it reads the records of all, and when no rank has moved for the time limit it
names the one furthest behind. A time limit of a collective could not do so: the first rank to run into it is one that waits. It also
says whose end broke a collective.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed import DistError, Store

from llmtrain.config.errors import ExitCode
from llmtrain.dist.beats import SILENT_SECONDS, Beats, Clock, StoreLine
from llmtrain.dist.failure import FAILURE_KEY, Failure, FailureBoard
from llmtrain.dist.lost import ASK_SECONDS, NOBODY, LostRank
from llmtrain.dist.position import Position, Snapshot

PERIOD_SECONDS = 0.3
CLOSE_PERIOD_SECONDS = 0.1
STACK_SECONDS = 2.0
STOP_SECONDS = 1.0
"""Longest wait for a thread of the watch, which only a store that does not answer can hold up."""
TOLD_SECONDS = 5.0
"""Longest wait for what another rank is about to tell: the judge its verdict, the others that they have read it."""
FAILED_SECONDS = 30.0
"""A rank that stands still for longer after another one has failed is stuck in a collective, and ended."""
ORPHAN_SECONDS = 20.0
"""From SIGTERM to the end of a rank whose launcher has died: time to save."""

_STOP_KEY = "watch/stop"
_STOP_SIGNALS = {str(int(number)): number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
_VERDICT_KEY = "watch/verdict"
_HEARD_KEY = "watch/heard"
# Phases in which a rank does little but wait for others.
_WAITING = ("border", "reduce", "connect", "replicas", "end")
_MAX_LISTED = 12
_MAX_STACKS = 32
_HEIRS = 16
"""Ranks that are looked at together where the one before them does not answer: those of one host fall silent together."""


class Watch:
    """The watch of one rank; see the module. Used as `start()` … `stop()`."""

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        size: int,
        host: str,
        position: Position,
        timeout_seconds: float,
        board: FailureBoard,
        stop_received: Callable[[], int | None],
        on_verdict: Callable[[Failure], NoReturn],
        launcher_pid: int | None = None,
        store_rank: int | None = 0,
    ) -> None:
        """
        Args:
            store: a connection of the watch's own, with the same keys as the board's.
            host: name of this host, for messages.
            timeout_seconds: without any progress on any rank for so long the run is ended.
            stop_received: number of the stop signal this process has received, None while there is none.
            on_verdict: called from a thread with the cause; it must end the process.
            launcher_pid: process without which this one has to end.
            store_rank: rank that serves the store, None where another process does.
        """
        self._clock = Clock()
        self._line = StoreLine(store, self._clock)
        self._beats = Beats(self._line, self._clock, rank=rank, size=size, host=host, position=position)
        self._lost = LostRank(self._line, self._clock, self._beats)
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._board = board
        self._stop_received = stop_received
        self._on_verdict = on_verdict
        self._launcher_pid = launcher_pid
        self._store_rank = store_rank
        self._is_stop_told = False
        self._is_stop_seen = False
        self._is_asking = False
        self._has_fault = False
        self._has_verdict = False
        self._mute: set[int] = set()
        self._failed_at: float | None = None
        self._orphaned_at: float | None = None
        self._ending = threading.Event()
        self._nudge = threading.Event()
        self._verdict_lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._talk, name="watch-store", daemon=True),
            threading.Thread(target=self._look_at_self, name="watch-self", daemon=True),
        ]

    @property
    def known(self) -> Mapping[int, Snapshot]:
        """Last known positions of other ranks: of all on the rank that judges, of that one on the others."""
        return self._beats.known

    def process(self, rank: int) -> tuple[str, int]:
        """Host and process id of a rank, as far as they are known: `("?", 0)` where they are not."""
        return self._beats.process(rank)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End at once; the others are told that this rank has left and is not lost.

        A verdict under way is waited for, and ends the process: ranks that end because of it break the collectives of the others,
        which then come here.
        """
        self._ending.set()
        self._nudge.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_SECONDS)
        if self._has_verdict:
            self._threads[0].join(STACK_SECONDS + 3 * TOLD_SECONDS)

    def lost_rank(self) -> int | None:
        """After a broken collective: the rank that no longer answers; None when all do within a few seconds, or one told why.

        When the store is gone or does not answer, that is the rank which serves it.
        """
        deadline = time.monotonic() + ASK_SECONDS
        self._is_asking = True
        self._nudge.set()
        while time.monotonic() < deadline and self._failed_at is None and not self._has_fault:
            if self._line.is_gone or self._line.silent_seconds > SILENT_SECONDS:
                return self._store_rank
            if self._lost.found is not None:
                return None if self._lost.found == NOBODY else self._lost.found
            time.sleep(0.05)
        return None

    # The thread that talks to the store.

    def _talk(self) -> None:
        try:
            while not self._ending.is_set():
                self._exchange()
                self._nudge.wait(CLOSE_PERIOD_SECONDS if self._lost.is_looked_for else PERIOD_SECONDS)
                if not self._ending.is_set():
                    self._nudge.clear()
            self._beats.publish(has_left=True)
        except DistError:
            # The line has noted it, and the other thread minds what follows.
            return
        except Exception:
            # As what another program wrote into the store. Nobody else is to blame for it.
            self._has_fault = True
            self._line.give_up()
            traceback.print_exc(file=sys.stderr)

    def _exchange(self) -> None:
        self._beats.publish()
        self._pass_stop_on()
        if self._failed_at is None and self._line.check(FAILURE_KEY):
            self._failed_at = self._clock.now()
            # The board remembers it: the store may go with rank 0 before anybody asks again.
            self._board.first()
        if self._line.check(_VERDICT_KEY):
            self._follow_verdict(json.loads(self._line.get(_VERDICT_KEY)))
        if self._is_judge():
            self._beats.read(range(self._size))
            self._judge()
            self._lost.look()
        if self._is_asking:
            self._lost.ask()

    def _pass_stop_on(self) -> None:
        """Tell of a stop signal of this rank, once; deliver that of another one, unless this rank has one of its own.

        It is delivered a period after it was seen: a signal that was sent to all ranks then has arrived, and does not count twice.
        """
        own = self._stop_received()
        if own is not None and not self._is_stop_told:
            self._is_stop_told = True
            self._line.keep_first(_STOP_KEY, str(int(own)))
        if self._is_stop_told or not self._line.check(_STOP_KEY):
            return
        if not self._is_stop_seen:
            self._is_stop_seen = True
            return
        self._is_stop_told = True
        number = _STOP_SIGNALS.get(self._line.get(_STOP_KEY).decode(errors="replace"))
        if number is not None and self._stop_received() is None:
            # A Ctrl-C of the terminal may still be on its way to this process, and two of them end a run without a save.
            os.kill(os.getpid(), signal.SIGTERM if number == signal.SIGINT else number)

    def _is_judge(self) -> bool:
        """Whether no lower rank judges: each has left or does not answer. Reads little further than up to the first that does."""
        num_read = 0
        for rank in range(self._rank):
            if rank == num_read:
                num_read = min(rank + _HEIRS if rank else 1, self._rank)
                self._beats.read(range(rank, num_read))
            if not (self._beats.has_left(rank) or self._beats.is_silent(rank)):
                return False
        return True

    # Judging.

    def _judge(self) -> None:
        """Give a verdict when no rank has moved for the time limit; that of another rank which judged first goes before."""
        here = self._beats.here()
        if min(map(self._beats.still_seconds, here)) < self._timeout_seconds:
            return
        self._has_verdict = True
        answering = [rank for rank in sorted(here, key=self._progress) if not self._is_mute(rank)]
        verdict = {"judge": self._rank, "rank": min(here, key=self._progress), "num_answering": len(answering)}
        kept = json.loads(self._line.keep_first(_VERDICT_KEY, json.dumps(verdict)))
        if kept["judge"] != self._rank:
            self._follow_verdict(kept)
        stacks = self._gather_stacks(answering)
        behind = sorted(here, key=self._progress)
        failure = self._hang(behind[0], self._describe(behind), stacks)
        self._board.post(failure)
        self._end_with(self._told_failure(TOLD_SECONDS) or failure, len(answering) - len(self._mute))

    def _is_mute(self, rank: int) -> bool:
        return rank in self._mute or self._beats.is_silent(rank)

    def _progress(self, rank: int) -> tuple[int, int, bool, bool, int]:
        """Order of the ranks, the one furthest behind first."""
        place = self._beats.place(rank)
        return place.step, place.collectives, not self._is_mute(rank), place.phase in _WAITING, rank

    def _gather_stacks(self, answering: Sequence[int]) -> dict[int, str]:
        """Stacks of the main threads of this rank and of those furthest behind; a thousand that say the same help nobody.

        A rank that does not send its own is mute from here on.
        """
        stacks = {self._rank: _main_stack()}
        missing = [rank for rank in answering[:_MAX_STACKS] if rank != self._rank]
        deadline = time.monotonic() + STACK_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in [rank for rank in missing if self._line.check(_stack_key(rank))]:
                stacks[rank] = self._line.get(_stack_key(rank)).decode()
                missing.remove(rank)
            time.sleep(0.02)
        self._mute.update(missing)
        return stacks

    def _describe(self, behind: Sequence[int]) -> str:
        """Who stands where, the rank furthest behind first."""
        first, last = self._beats.place(behind[0]), self._beats.place(behind[-1])
        if (first.step, first.collectives) != (last.step, last.collectives):
            judged = f"rank {behind[0]} is behind, the others wait for it:"
        else:
            judged = "all ranks have entered the same collectives:"
        lines = [f"{self._stood_still()}; {judged}"]
        for rank in behind[:_MAX_LISTED]:
            place = self._beats.place(rank)
            line = f"  rank {rank:<4} step {place.step:<7} {place.phase:<10} micro-batch {place.microbatch:<4}"
            mute = "  when it was last heard; does not answer" if self._is_mute(rank) else ""
            lines.append(f"{line} {place.collectives} collectives{mute}")
        if len(behind) > _MAX_LISTED:
            lines.append(f"  and {len(behind) - _MAX_LISTED} more")
        if self._is_mute(behind[0]):
            lines.append(_silence(behind[0]))
        return "\n".join(lines)

    def _stood_still(self) -> str:
        return f"nothing moved for {self._timeout_seconds:g} s (launch.timeout_seconds)"

    def _hang(self, rank: int, text: str, stacks: Mapping[int, str]) -> Failure:
        place = self._beats.place(rank)
        host, pid = self._beats.process(rank)
        return Failure(
            rank=rank,
            host=host,
            pid=pid,
            phase=place.phase,
            step=place.step,
            microbatch=place.microbatch,
            kind="hang",
            code=int(ExitCode.LOST),
            text=text,
            reporter=self._rank,
            stacks=stacks,
        )

    def _follow_verdict(self, verdict: Mapping[str, Any]) -> NoReturn:
        """Tell the judge where the main thread stands, wait for its words and end."""
        self._has_verdict = True
        self._line.set(_stack_key(self._rank), _main_stack())
        failure = self._told_failure(STACK_SECONDS + TOLD_SECONDS)
        if failure is None:
            text = f"{self._stood_still()}; rank {verdict['judge']} was about to say more and fell silent"
            failure = self._hang(verdict["rank"], text, {self._rank: _main_stack()})
            self._board.post(failure)
        self._end_with(failure, verdict["num_answering"])

    def _told_failure(self, seconds: float) -> Failure | None:
        deadline = time.monotonic() + seconds
        while not self._line.check(FAILURE_KEY):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        return Failure.from_dict(json.loads(self._line.get(FAILURE_KEY)))

    def _end_with(self, failure: Failure, num_answering: int) -> NoReturn:
        """End this process; the one that serves the store after the others have read why."""
        deadline = time.monotonic() + TOLD_SECONDS
        heard = self._line.add(_HEARD_KEY, 1)
        while self._rank == self._store_rank and heard < num_answering and time.monotonic() < deadline:
            time.sleep(0.02)
            heard = self._line.add(_HEARD_KEY, 0)
        self._call_verdict(failure)

    def _call_verdict(self, failure: Failure) -> NoReturn:
        with self._verdict_lock:
            try:
                self._on_verdict(failure)
            finally:
                # Whatever goes wrong with the words.
                os._exit(int(ExitCode.LOST))

    # The thread that looks at this process only.

    def _look_at_self(self) -> None:
        while not self._ending.wait(PERIOD_SECONDS):
            self._beats.look_at_self()
            self._mind_the_launcher()
            self._mind_the_failed()
            self._mind_the_store()

    def _mind_the_launcher(self) -> None:
        if self._launcher_pid is None or os.getppid() == self._launcher_pid:
            return
        if self._orphaned_at is None:
            self._orphaned_at = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() - self._orphaned_at > ORPHAN_SECONDS:
            os._exit(int(ExitCode.LOST))

    def _mind_the_failed(self) -> None:
        """End this rank if another one has failed and this one stands still in a collective that does not break."""
        failed_at = self._failed_at
        if failed_at is None or min(self._clock.now() - failed_at, self._beats.still_seconds(self._rank)) < FAILED_SECONDS:
            return
        if (failure := self._board.first()) is not None:
            self._call_verdict(failure)

    def _mind_the_store(self) -> None:
        """End this rank if it stands still and no judge can say so, because the store is gone or does not answer."""
        if min(self._line.silent_seconds, self._beats.still_seconds(self._rank)) < self._timeout_seconds:
            return
        if self._has_fault:
            rank, text = self._rank, "its watch has failed, see its log: nobody can tell who waits for whom"
        elif self._store_rank is None:
            rank, text = self._rank, "the store no longer answers: is torchrun still there?"
        else:
            rank, text = self._store_rank, _silence(self._store_rank)
        failure = self._hang(rank, f"{self._stood_still()}\n{text}", {self._rank: _main_stack()})
        self._board.report(failure)
        self._call_verdict(failure)


def _stack_key(rank: int) -> str:
    return f"watch/stack/{rank}"


def _silence(rank: int) -> str:
    return f"rank {rank} does not answer: it is stopped, its host or network is gone, or native code holds Python's lock"


def _main_stack() -> str:
    """Where the main thread of this process stands."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "its main thread has ended"
