"""Forked ranks with a watch each, for the tests of the watch: little else, so that its short time limits mean something."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from llmtrain.dist.failure import Failure, FailureBoard
from llmtrain.dist.position import Position
from llmtrain.dist.watch import Watch

LIMIT = 40.0
"""Seconds after which a test that waits gives up."""
SHORT_TIMEOUT = 2.0


class WatchedRank:
    """What the function of a forked rank works with."""

    def __init__(self, rank: int, size: int, port: int, listener: int | None, folder: Path, **options: object) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self.signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        served = rank == 0 and listener is not None
        self.store = connect(port, listener if served else None)
        own_line = connect(port, None)
        self.position = Position()
        self.board = FailureBoard(self.store)
        values: dict[str, object] = {"timeout_seconds": SHORT_TIMEOUT, "store_rank": 0 if listener is not None else None}
        values["on_verdict"] = self.end_because
        self.watch = Watch(
            store=own_line,
            rank=rank,
            size=size,
            host="here",
            position=self.position,
            board=self.board,
            stop_received=lambda: self.signals[-1] if self.signals else None,
            **(values | options),  # type: ignore[arg-type]
        )
        self.watch.start()

    def end_because(self, failure: Failure) -> NoReturn:
        self.leave("verdict", failure.to_dict())
        os._exit(failure.code)

    def wait_for(self, name: str, ranks: Iterable[int]) -> None:
        """Until other ranks have left something of this name."""
        deadline = time.monotonic() + LIMIT
        while not all((self.folder / f"{name}{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline, f"no {name} of {ranks}"
            time.sleep(0.02)

    def leave(self, name: str, value: object) -> None:
        """Leave a result for the test."""
        part = self.folder / f"{name}{self.rank}.part"
        part.write_text(json.dumps(value))
        part.rename(self.folder / f"{name}{self.rank}")

    def join_group(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.PrefixStore("group", self.store)
        limit = timedelta(seconds=LIMIT)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)

    def meet(self) -> None:
        """A collective as the framework enters one: counted before it waits."""
        self.position.issued()
        dist.all_reduce(torch.ones(4))


def connect(port: int, listener: int | None) -> dist.Store:
    options = {} if listener is None else {"master_listen_fd": listener}
    limit = timedelta(seconds=LIMIT)
    store = dist.TCPStore("127.0.0.1", port, None, listener is not None, limit, wait_for_workers=False, **options)
    return dist.PrefixStore("llmtrain/run/0", store)


def _run(function: Callable[[WatchedRank], None], make: Callable[[], WatchedRank]) -> None:
    me = make()
    try:
        function(me)
    finally:
        me.watch.stop()


class WatchedRanks:
    """Forked ranks, of which none lives on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: list[int] = []
        self._keep: list[object] = []

    def start(self, function: Callable[[WatchedRank], None], size: int, *, serves: bool = True, **options: object) -> None:
        """Fork `size` ranks; the store is rank 0's, or, without `serves`, this process's."""
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if not serves:
            self._keep.append(connect(port, os.dup(listener.fileno())))
        for rank in range(size):
            make = partial(WatchedRank, rank, size, port, os.dup(listener.fileno()) if serves else None, self.folder, **options)
            self.fork(partial(_run, function, make))
        listener.close()

    def fork(self, call: Callable[[], None]) -> None:
        pid = os.fork()
        if pid:
            self.pids.append(pid)
            return
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def code(self, rank: int) -> int:
        """Exit code of a rank, minus the number of the signal that ended it."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.pids[rank] = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} has not ended after {LIMIT} s; left: {sorted(self.folder.iterdir())}")

    def found(self, name: str, rank: int) -> object:
        """What a rank left, once it is there."""
        file = self.folder / f"{name}{rank}"
        deadline = time.monotonic() + LIMIT
        while not file.exists():
            assert time.monotonic() < deadline, f"no {file.name}; there is {sorted(self.folder.iterdir())}"
            time.sleep(0.02)
        return json.loads(file.read_text())

    def verdict(self, rank: int) -> Failure:
        found = self.found("verdict", rank)
        assert isinstance(found, dict)
        return Failure.from_dict(found)

    def end(self) -> None:
        for pid in filter(None, self.pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
