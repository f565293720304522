"""Running the jobs of a sweep, so many at a time, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Protocol

from llmtrain.cli.sweep_layout import Sweep
from llmtrain.cli.sweep_progress import JobLine, Progress
from llmtrain.cli.sweep_share import Sharing
from llmtrain.cli.sweep_table import JobResult, ended_well, read_finished, read_result
from llmtrain.config.errors import ExitCode, Problem, StorageError
from llmtrain.dist.spawn import end_with_launcher
from llmtrain.train.signals import STOP_SIGNALS

POLL_SECONDS = 0.1


class Process(Protocol):
    """A job that was started; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, minus the number of the signal that ended it if one did; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Pass a signal on to it; nothing happens where it has ended."""


Start = Callable[[Sequence[str], Path, Mapping[str, str]], Process]
"""Starts a command, adds what it prints to a log, and gives it environment variables besides those of this process."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context in which what the file system refuses is the user's to cure."""
    try:
        yield
    except OSError as error:
        raise StorageError(Problem(f"cannot write {path}", error.strerror or str(error), "another run.dir")) from error


def start_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """See `Start`.

    Raises:
        StorageError: the log cannot be written.
    """
    with writing(log):
        log.touch()
    # A process group of its own: the terminal would otherwise signal the job too, at every Ctrl-C. And whatever ends the sweep lets
    # its jobs save and end.
    with log.open("a", encoding="utf-8") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            process_group=0,
            preexec_fn=partial(end_with_launcher, os.getpid()),
        )


def run_jobs(sweep: Sweep, sharing: Sharing, start: Start, progress: Progress) -> tuple[list[JobResult], bool]:
    """Run the jobs, started in order; a failing one is a row and not the end. One that is finished already is not started again.

    A stop signal (SIGINT, SIGTERM, SIGUSR1, SIGHUP) lets the running jobs save and end, and no other is started. Further signals change
    nothing: to a job a second Ctrl-C means "do not even save", so a signal of each kind is passed on once, and a line says how to end
    the jobs at once.

    Returns:
        One result for each job that came to an end, in the order of the jobs, and whether the sweep was told to stop.

    Raises:
        StorageError: the folder of the sweep cannot be written, or that of a job not be read; running jobs are told to save and end.
    """
    with writing(sweep.folder / "logs"):
        (sweep.folder / "logs").mkdir(parents=True, exist_ok=True)
    with _noted_signals() as noted:
        pool = _Pool(sweep, sharing, start, progress, noted)
        try:
            pool.run()
        except BaseException:
            pool.end_all()
            raise
    return [pool.results[index] for index in sorted(pool.results)], pool.stopped


@dataclass
class _Running:
    """A job in its slot."""

    index: int
    slot: int
    process: Process
    line: JobLine
    num_passed_on: int = 0
    """Signals of the sweep that it was sent."""


class _Pool:
    """The jobs of a sweep: those that wait, that run, and that have a result."""

    def __init__(self, sweep: Sweep, sharing: Sharing, start: Start, progress: Progress, noted: Sequence[int]) -> None:
        self.results: dict[int, JobResult] = {}
        self._sweep, self._sharing, self._start, self._progress = sweep, sharing, start, progress
        self._noted = noted
        """Stop signals so far, each kind once."""
        self._waiting = deque(range(len(sweep.jobs)))
        self._running: list[_Running] = []
        self._told_to_stop = False

    @property
    def stopped(self) -> bool:
        """Whether no job starts any more; a job that saved and ended was told to by somebody who means the sweep."""
        return bool(self._noted) or any(result.exit_code == ExitCode.REQUEUE for result in self.results.values())

    def run(self) -> None:
        while True:
            self._fill()
            self._pass_signals_on()
            if not self._running:
                return
            self._progress.update([job.line for job in self._running])
            if not self._collect():
                time.sleep(POLL_SECONDS)

    def end_all(self) -> None:
        """Let running jobs save and end: there is nobody left to look after them."""
        for job in self._running:
            job.process.send_signal(signal.SIGTERM)
        while any(job.process.poll() is None for job in self._running):
            time.sleep(POLL_SECONDS)

    def _fill(self) -> None:
        """Start the next jobs in the slots that are free."""
        while self._waiting and not self.stopped and len(self._running) < self._sweep.num_slots:
            index = self._waiting.popleft()
            finished = self._finished(index)
            if finished is None:
                self._begin(index)
            else:
                self._note(index, finished, f"finished before · {finished.figures()}")

    def _begin(self, index: int) -> None:
        taken = {job.slot for job in self._running}
        slot = next(slot for slot in range(self._sweep.num_slots) if slot not in taken)
        line = JobLine(self._title(index), self._folder(index))
        log = self._log(index)
        process = self._start(self._sweep.command(index), log, self._sharing.environment(index, slot))
        self._running.append(_Running(index, slot, process, line))

    def _pass_signals_on(self) -> None:
        for job in self._running:
            for number in self._noted[job.num_passed_on :]:
                job.process.send_signal(number)
                job.num_passed_on += 1
                job.line.note = "told to stop"
        if self._noted and self._running and not self._told_to_stop:
            self._told_to_stop = True
            pids = " ".join(str(job.process.pid) for job in self._running)
            jobs, them = ("the job saves", "it") if len(self._running) == 1 else (f"{len(self._running)} jobs save", "them")
            self._progress.say(f"stopping: {jobs} first; kill -KILL {pids} ends {them} at once")

    def _collect(self) -> bool:
        """Take jobs that have ended out of their slots; whether there was one."""
        ended = [(job, code) for job in self._running if (code := job.process.poll()) is not None]
        for job, exit_code in ended:
            self._running.remove(job)
            changed = self._sweep.jobs[job.index].changed
            log = self._log(job.index)
            result = read_result(self._folder(job.index), log, changed, exit_code, job.line.elapsed_seconds)
            self._note(job.index, result, result.summary())
        return bool(ended)

    def _note(self, index: int, result: JobResult, told: str) -> None:
        self.results[index] = result
        self._progress.say(f"{self._title(index)}  {told}")

    def _finished(self, index: int) -> JobResult | None:
        """The result of a job that an earlier sweep, or a command with sweep.only, has brought to its end."""
        folder, log = self._folder(index), self._log(index)
        composed = self._sweep.compose(index) if ended_well(folder) else None
        if composed is None:
            return None
        with suppress(StorageError):  # what is wrong with its folder the job tells itself
            return read_finished(folder, log, self._sweep.jobs[index].changed, composed.wire)
        return None

    def _title(self, index: int) -> str:
        changed = " ".join(f"{key}={value}" for key, value in self._sweep.jobs[index].changed.items())
        return f"{index + 1}/{len(self._sweep.jobs)}  {changed}".rstrip()

    def _folder(self, index: int) -> Path:
        return self._sweep.folder / self._sweep.names[index]

    def _log(self, index: int) -> Path:
        return self._sweep.folder / "logs" / f"{self._sweep.names[index]}.log"


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Context in which stop signals end nothing but are noted in a list, each kind once, for the loop that waits to look at.

    Those that are ignored, as SIGHUP is under `nohup`, stay so.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number not in noted:
            noted.append(number)

    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, note)
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
