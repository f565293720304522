"""The ranks of a run together: one object that every part asks who it is, whom it meets, and how values are summed.

With one rank nothing is opened: no store, no process group, no thread.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from llmtrain.config.errors import ExitCode, PeerError, Problem, RankLostError
from llmtrain.dist.collectives import Collectives, GroupCollectives, NoCollectives
from llmtrain.dist.failure import (
    Failure,
    FailureBoard,
    is_peer_trouble,
    mark_told,
    reason,
    reason_of_run,
    where_it_was,
    write_json,
)
from llmtrain.dist.failure_screen import failure_screen
from llmtrain.dist.group_sockets import hang_up, open_sockets
from llmtrain.dist.meeting import LocalMeeting, Meeting, StoreMeeting
from llmtrain.dist.position import Position, mapped_position
from llmtrain.dist.rendezvous import another_connection, leave_store, open_store, run_store
from llmtrain.dist.verdict import position_file, run_file
from llmtrain.dist.watch import Watch
from llmtrain.dist.world import LaunchFacts

FIRST_CAUSE_SECONDS = 3.0
"""How long a rank whose peer is gone waits to be told why."""

LEAVE_SECONDS = 2.0
"""How long the rank that serves the store waits for those that still read from it: well below what our launcher gives a rank to end."""


class World:
    """One rank of a run, and its ways to the others."""

    def __init__(self, facts: LaunchFacts, position: Position, meeting: Meeting) -> None:
        self.facts = facts
        self.rank = facts.rank
        self.size = facts.world_size
        self.position = position
        self.meeting = meeting
        self.collectives: Collectives = NoCollectives(position)
        self.log: Path | None = None
        """File that this rank's output goes to, once there is a run folder."""
        self.resume: str | None = None
        """The command that goes on with the run, once it is known."""
        self.on_loss: Callable[[Failure], None] = _nothing
        """Told why the run ends where rank 0 may not come to say so: by the rank that noticed it first, or by rank 0; keeps the status."""
        self.terminal = sys.stderr
        """Where the few words for the user's screen go; a rank's own standard error may have moved into its log."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run folder and speaks to the user."""
        return self.rank == 0

    def connect(self, device: str) -> None:
        """Make the process group; `collectives` sums over ranks from here on. Nothing with one rank."""

    def leave_word(self, document: Mapping[str, Any]) -> None:
        """Tell a launcher of ours about the run, for what it says when this rank no longer can."""

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Around what may fail on one rank only: that rank's cause is told to all, and what it breaks elsewhere is told as such.

        Raises:
            PeerError: another rank failed; it tells why itself.
            RankLostError: another rank is gone and left no word; this one noticed first.
        """
        yield


class ManyRanks(World):
    """One of several ranks; see `join_world`."""

    def __init__(self, facts: LaunchFacts, *, timeout_seconds: float, stop_received: Callable[[], int | None]) -> None:
        position = _position(facts)
        self._store = open_store(facts, timeout_seconds)
        meeting = StoreMeeting(self._store, facts.rank, facts.world_size, position, run_store=run_store(self._store))
        super().__init__(facts, position, meeting)
        self._timeout_seconds = timeout_seconds
        # Not the main thread's: what that waits for must not hold up who tells of it.
        watch_store = another_connection(self._store)
        self._board = FailureBoard(watch_store, facts.report_folder, facts.error_file)
        self._watch = Watch(
            store=watch_store,
            rank=self.rank,
            size=self.size,
            host=socket.gethostname(),
            position=position,
            timeout_seconds=timeout_seconds,
            board=self._board,
            stop_received=stop_received,
            on_verdict=self._end_because,
            launcher_pid=facts.launcher_pid or (os.getppid() if facts.is_of_torchrun else None),
            store_rank=None if facts.served else 0,
        )
        self._told: BaseException | None = None
        self._first_terminal = self.terminal
        self._group_sockets: frozenset[str] = frozenset()
        self._began = time.monotonic()
        self._watch.start()

    def connect(self, device: str) -> None:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        # Longer than the watch waits, which knows more to say than a collective that gives up.
        patience = timedelta(seconds=2 * self._timeout_seconds + 30)
        store = dist.PrefixStore("group", self._store)
        before = open_sockets()
        # It waits for all ranks: one that does not come is behind those that have.
        self.position.issued()
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=patience)
        self._group_sockets = open_sockets() - before
        group = dist.group.WORLD
        assert group is not None, "it was made in the line above"
        self.collectives = GroupCollectives(group, self.position, torch.device(device))

    def leave_word(self, document: Mapping[str, Any]) -> None:
        folder = self.facts.report_folder
        if self.is_main and folder is not None:
            write_json(run_file(folder), document)

    @contextmanager
    def failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            cause = self._cause(error)
            if cause is error:
                raise
            raise cause from error

    def leave(self, *, in_peace: bool) -> None:
        """Give everything back; after a failure only what cannot wait for the others."""
        if not in_peace:
            # First of all: a rank that waits for this one in a collective is freed by it, and cannot leave the store before.
            hang_up(self._group_sockets, self.facts.master_port)
        if dist.is_initialized() and (in_peace or dist.get_backend() == "gloo"):
            with suppress(RuntimeError):
                dist.destroy_process_group()
        leave_store(self._store, self.facts, LEAVE_SECONDS)
        self._watch.stop()

    def _cause(self, error: BaseException) -> BaseException:
        """What a failure of this rank is called: its own, or what another rank's end did to it."""
        if isinstance(error, PeerError) or error is self._told:
            return error
        if not is_peer_trouble(error):
            self._told = error
            self._tell(Failure.of(error, self.rank, self.position.snapshot()), error)
            return error
        first = self._board.first(FIRST_CAUSE_SECONDS)
        if first is None:
            return self._lost(error)
        return PeerError(first.rank, ExitCode(first.code), reason(first))

    def _lost(self, error: BaseException) -> BaseException:
        """The rank whose end broke a collective and that left no word."""
        lost = self._watch.lost_rank()
        failure = replace(Failure.of(error, self.rank, self.position.snapshot()), kind="crash", code=int(ExitCode.LOST))
        if lost is None:
            # All answer, so it is the way between two of them that broke.
            what = "contact to another rank was lost"
        else:
            what = f"rank {lost} was lost"
            host, pid = self._watch.process(lost)
            failure = replace(failure, rank=lost, host=host, pid=pid, kind="lost", text="contact was lost, and it left no word")
            failure = failure.at(self._watch.known.get(lost, self.position.snapshot()))
        cure = self.resume or "the same command goes on from the last save"
        told = RankLostError(Problem(f"{what} {where_it_was(failure)}", "no rank has said why", cure))
        if not self._tell(failure, told) and (first := self._board.first()) is not None:
            return PeerError(first.rank, ExitCode(first.code), reason(first))
        self._told = told
        return told

    def _tell(self, failure: Failure, error: BaseException) -> bool:
        """Let the others know; the first cause is shown, and `error` is not printed once more. Gives whether this was the first."""
        is_first = self._board.post(failure)
        # The store may be gone with rank 0, and then each of the others takes its own word for the first.
        is_alone = failure.kind == "lost" and failure.rank == 0 and not self.facts.served
        speaks = self.rank == 1 if is_alone else is_first
        if is_first and failure.kind != "error" and failure.rank != self.rank:
            self.on_loss(failure)
        if is_first and self.is_main and failure.kind == "error":
            # The command line prints a message of rank 0, as it does in a run with one rank.
            return is_first
        if speaks and self.facts.report_folder is None:
            self._show(failure)
        # Where the output has moved into a log, what is printed there is for its reader.
        if self.terminal is self._first_terminal:
            mark_told(error)
        return is_first

    def _show(self, failure: Failure) -> None:
        if failure.is_stop:
            print(reason_of_run(failure), file=self.terminal, flush=True)
            return
        seconds = time.monotonic() - self._began
        log = None if self.log is None else self.log.with_name(f"rank{failure.rank}.log")
        screen = failure_screen(
            failure, num_ranks=self.size, seconds=seconds, log=log, resume=self.resume, num_hosts=self.facts.num_nodes
        )
        print(screen, file=self.terminal, flush=True)

    def _end_because(self, failure: Failure) -> NoReturn:
        """Called by the watch when this rank cannot come back from where it stands: nothing moves, or another rank has failed."""
        # What is no hang its reporter has told; here it is left to rank 0 to keep the status.
        is_to_tell = failure.kind == "hang" and failure.reporter == self.rank
        if self.is_main or is_to_tell:
            with suppress(Exception):
                self.on_loss(failure)
        if is_to_tell and self.facts.report_folder is None:
            self._show(failure)
        os._exit(failure.code)


@contextmanager
def join_world(facts: LaunchFacts, *, timeout_seconds: float, stop_received: Callable[[], int | None]) -> Iterator[World]:
    """Context with this rank's world. It ends when all ranks have come to its end, or as soon as one fails.

    Args:
        facts: who this process is.
        timeout_seconds: without any progress on any rank for so long the run is ended.
        stop_received: number of the stop signal this process has received; it is passed on to all ranks.

    Raises:
        ConfigError: the others cannot be reached.
        PeerError, RankLostError: see `World.failures`.
    """
    if facts.world_size == 1:
        yield alone(facts)
        return
    world = ManyRanks(facts, timeout_seconds=timeout_seconds, stop_received=stop_received)
    in_peace = False
    try:
        with world.failures():
            yield world
            world.position.enter("end")
            world.meeting.gather("the end", None)
        in_peace = True
    finally:
        world.leave(in_peace=in_peace)


def alone(facts: LaunchFacts = LaunchFacts(0, 0, 1, "one process")) -> World:
    """The world of a process that is the only rank."""
    position = Position()
    return World(facts, position, LocalMeeting(position))


def _position(facts: LaunchFacts) -> Position:
    """Kept in a file where a launcher looks on, so that a rank that is killed leaves its last place behind."""
    if facts.report_folder is None:
        return Position()
    return mapped_position(position_file(facts.report_folder, facts.rank))


def _nothing(failure: Failure) -> None:
    """Nobody keeps a status yet."""
