"""Ranks for tests: one server per test session has imported torch and forks them, so that two ranks cost a tenth of a second.

Every test that needs several processes of the training gets them here: they have a time limit, all stacks are in the message when
it is over, and nothing lives on.
"""

from __future__ import annotations

import inspect
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers import rank_jobs
from helpers.rank_jobs import Plant, Read, Told
from helpers.rank_server import Ended, Request, process_name

TESTS = Path(__file__).parents[1]
START_SECONDS = 120.0
SHOWN_OUTPUT = 4000
"""Characters of the end of what a rank has printed."""


class RanksFailedError(AssertionError):
    """A rank raised, died or was late; the message has what is known of all of them."""


@dataclass(frozen=True)
class Training:
    """What a training on several ranks came to."""

    ranks: list[Told]

    @property
    def code(self) -> int:
        """The exit code, where all ranks end with the same."""
        codes = {told.code for told in self.ranks}
        assert len(codes) == 1, [(told.code, told.error) for told in self.ranks]
        return codes.pop()

    @property
    def printed(self) -> str:
        """By rank 0."""
        return self.ranks[0].printed

    @property
    def reads(self) -> list[Read]:
        """Every sample that was read, in the order of the run, by whichever rank."""
        return sorted((read for told in self.ranks for read in told.reads), key=lambda read: read.sample)


@dataclass(frozen=True)
class Launched:
    """What a launcher came to."""

    code: int
    printed: str
    """By the launcher and by rank 0, on standard output and standard error."""
    seconds: float


class Job:
    """Ranks at work."""

    def __init__(self, pool: RankPool, folder: Path, name: str, pids: list[int]) -> None:
        self._pool = pool
        self.folder = folder
        self.pids = pids
        self._names = [process_name(name, number) for number in range(len(pids))]
        self.ended: Ended | None = None

    def pid(self, name: str, timeout: float = 20.0) -> int:
        """The process of a name (`rank1`, or what a job has called those it started), once it is there."""
        path, deadline = self.folder / f"{name}.pid", time.monotonic() + timeout
        while not path.exists():
            assert time.monotonic() < deadline, f"no {name} after {timeout} s\n{self.told()}"
            time.sleep(0.002)
        return int(path.read_text())

    def signal(self, name: str, number: int) -> bool:
        """Send a signal; False when that process has ended."""
        try:
            os.kill(self.pid(name), number)
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> Ended:
        """How all ranks ended; those that are late are killed by the server."""
        if self.ended is None:
            try:
                self.ended = self._pool.wait()
            except BaseException:
                # The time limit of the test, or Ctrl-C: what the ranks did is worth knowing then, too.
                self.ended = self._pool.stop("show")
                print(self.told())
                raise
        return self.ended

    def outcome(self, rank: int) -> tuple[str, Any] | None:
        """("value", result) or ("error", traceback) of a rank; None when it died before."""
        path = self.folder / f"{self._names[rank]}.result"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def results(self) -> list[Any]:
        """What the function returned on each rank.

        Raises:
            RanksFailedError: a rank raised, died or was late, or something was left behind.
        """
        ended = self.wait()
        outcomes = [self.outcome(rank) for rank in range(len(self.pids))]
        good = [outcome is not None and outcome[0] == "value" for outcome in outcomes]
        if not all(good) or ended.late or ended.left:
            raise RanksFailedError(self.told())
        return [outcome[1] for outcome in outcomes if outcome is not None]

    def launched(self) -> Launched:
        """How a launcher and its ranks ended.

        Raises:
            RanksFailedError: it was late, or something was left behind.
        """
        ended = self.wait()
        outcome = self.outcome(0)
        if ended.late or ended.left or (outcome is not None and outcome[0] == "error"):
            raise RanksFailedError(self.told())
        printed = (self.folder / "launcher.out").read_text()
        return Launched(ended.codes[0] if outcome is None else outcome[1], printed, ended.seconds[0])

    def told(self) -> str:
        """All that is known of every process of the job."""
        ended = self.ended
        parts = []
        if ended is not None and ended.late:
            parts.append("the time was over: what still ran was made to show its stacks and killed")
        if ended is not None and ended.left:
            parts.append("left behind: " + "; ".join(ended.left))
        names = sorted(path.stem for path in self.folder.glob("*.out"))
        for name in names:
            parts += [f"---- {name}{self._end_of(name)}", self._text_of(name)]
        return "\n".join(parts)

    def _end_of(self, name: str) -> str:
        if self.ended is None or name not in self._names:
            return ""
        rank = self._names.index(name)
        return f", exit code {self.ended.codes[rank]} after {self.ended.seconds[rank]:.1f} s"

    def _text_of(self, name: str) -> str:
        parts = [(self.folder / f"{name}.out").read_text(errors="replace")[-SHOWN_OUTPUT:]]
        outcome = self.outcome(self._names.index(name)) if name in self._names else None
        if outcome is not None and outcome[0] == "error":
            parts.append(outcome[1])
        stacks = self.folder / f"{name}.stacks"
        if stacks.exists():
            parts.append(stacks.read_text())
        return "\n".join(part.rstrip() for part in parts if part.strip())


class RankPool:
    """Asks the server for ranks; the server starts with the first request."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._busy = False
        self._folder: Path | None = None

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout: float = 60.0,
        grace: float = 10.0,
        environ: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        """Call `function(place, *args)` on each of `size` ranks; place is the LaunchFacts of the rank.

        Args:
            function: defined at the top of a test or helper module; that module is imported in every rank.
            args: and what it returns, can be pickled.
            timeout: seconds after which all ranks show their stacks and are killed.
            grace: seconds that the others may take once a rank has failed.
            environ: more variables for each rank; None takes one away.

        Returns:
            Results by rank.

        Raises:
            RanksFailedError: with what every rank did, when any did not return.
        """
        job = self.start(function, size, *args, timeout=timeout, grace=grace, environ=environ)
        try:
            return job.results()
        finally:
            self.finish(job)

    def start(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout: float = 60.0,
        grace: float = 10.0,
        settle: float = 1.0,
        environ: Mapping[str, str | None] | None = None,
        name: str = "rank",
        launched: bool = True,
    ) -> Job:
        """As `run`, without waiting; `finish` has to be called.

        Args:
            settle: seconds that processes which ranks have started may live on.
            launched: ranks find what the launcher of llmtrain gives; else only what any script gives, and `environ` has MASTER_PORT.
        """
        assert not self._busy, "one job at a time"
        line = self._open_line()
        assert self._folder is not None
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        file = inspect.getsourcefile(function)
        assert file is not None
        request = Request(
            file=file,
            module=function.__module__,
            function=function.__qualname__,
            args=pickle.dumps(args),
            size=size,
            folder=folder,
            name=name,
            timeout=timeout,
            grace=grace,
            settle=settle,
            launched=launched,
            environ=dict(environ or {}),
        )
        line.send(request)
        self._busy = True
        return Job(self, folder, name, self._receive())

    def wait(self) -> Ended:
        """The end of the job that runs."""
        assert self._line is not None
        # Waiting may be interrupted, reading a message may not.
        self._line.poll(None)
        ended = self._receive()
        assert isinstance(ended, Ended)
        self._busy = False
        return ended

    def stop(self, how: str) -> Ended | None:
        """Kill the ranks that run; `show` has them show their stacks before. None when the server has died."""
        if self._line is None or not self._busy:
            return None
        self._line.send(how)
        return self.wait()

    def finish(self, job: Job) -> None:
        """Kill what a job still runs, and forget it."""
        if job.ended is None:
            job.ended = self.stop("stop")
        shutil.rmtree(job.folder, ignore_errors=True)

    def train(
        self, words: Sequence[str], size: int, *, plants: Sequence[Plant] = (), timeout: float = 60.0, **options: Any
    ) -> Training:
        """A whole training of the words of a command line on `size` ranks.

        Args:
            plants: change something in each rank before it trains.
            options: of `run`.
        """
        told = self.run(rank_jobs.train_rank, size, tuple(words), tuple(plants), timeout=timeout, **options)
        return Training(told)

    def start_launch(
        self,
        words: Sequence[str],
        size: int,
        *,
        plants: Sequence[Plant] = (),
        timeout: float = 60.0,
        settle: float = 1.0,
        environ: Mapping[str, str | None] | None = None,
    ) -> Job:
        """A launcher, called `launcher`, that forks its ranks and watches them as `llmtrain launch.nproc=…` does, without waiting."""
        args = (tuple(words), size, tuple(plants))
        options: dict[str, Any] = {"timeout": timeout, "settle": settle, "environ": environ}
        return self.start(rank_jobs.launch_job, 1, *args, name="launcher", **options)

    def launch(self, words: Sequence[str], size: int, **options: Any) -> Launched:
        """`start_launch`, and its end."""
        job = self.start_launch(words, size, **options)
        try:
            return job.launched()
        finally:
            self.finish(job)

    def close(self) -> None:
        """End the server and with it all ranks."""
        self._busy = False
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._server is not None:
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.send_signal(signal.SIGKILL)
                self._server.wait()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _open_line(self) -> Connection:
        if self._line is not None:
            return self._line
        self._folder = Path(tempfile.mkdtemp(prefix="llmtrain-ranks-"))
        ours, theirs = socket.socketpair()
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        }
        code = f"from helpers.rank_server import serve; serve({theirs.fileno()})"
        self._server = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=(self._folder / "server").open("w"),
            start_new_session=True,
        )
        theirs.close()
        self._line = Connection(ours.detach())
        if not self._line.poll(START_SECONDS) or self._receive() != "ready":
            raise RuntimeError(f"the server of ranks did not start\n{(self._folder / 'server').read_text()}")
        return self._line

    def _receive(self) -> Any:
        assert self._line is not None and self._folder is not None
        try:
            return self._line.recv()
        except (EOFError, OSError) as error:
            told = (self._folder / "server").read_text()
            self.close()
            raise RuntimeError(f"the server of ranks has died\n{told}") from error
