"""`-m`: every combination of the swept values, one run after another, each in a process of its own, and a table at the end."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import refuse_unread
from llmtrain.cli.sweep_table import METRICS_FILE, JobResult, read_result, table, write_csv
from llmtrain.cli.text import page_width
from llmtrain.cli.verbs import VERBS
from llmtrain.config.compose import Composed, compose_config
from llmtrain.config.errors import ConfigError, ExitCode, Problem, StorageError
from llmtrain.config.paths import user_path
from llmtrain.config.sweep import Job, expand_sweep, split_word
from llmtrain.dist.world import read_launch
from llmtrain.metrics.sinks import finite_json, newest_record
from llmtrain.train.run_lock import RunLock
from llmtrain.train.signals import STOP_SIGNALS

LONGEST_NAME = 80
"""Characters of a job's folder name that come from its changed keys."""
POLL_SECONDS = 0.5
REPORT_SECONDS = 3.0
"""Shortest time between two lines about a running job where lines cannot be rewritten."""


Runner = Callable[[Sequence[str], Path, Sequence[int], Callable[[str], None]], int]
"""Runs a command and returns its exit code; see `run_process`."""


@dataclass(frozen=True)
class Sweep:
    """A sweep as laid out: where it goes and the command line of each job."""

    folder: Path
    jobs: tuple[Job, ...]
    names: tuple[str, ...]
    """Folder name of each job below `folder`."""
    commands: tuple[tuple[str, ...], ...]
    output: str


def run(arguments: Arguments) -> int:
    """Run all jobs; 0 when every one ended well, 1 when any did not, 75 when the sweep was stopped."""
    sweep = lay_out(arguments)
    # With output=json the standard output belongs to the one document.
    progress = sys.stderr if sweep.output == "json" else sys.stdout
    print(f"llmtrain sweep · {len(sweep.jobs)} jobs · {sweep.folder}", file=progress, flush=True)
    with _writing(sweep.folder):
        sweep.folder.mkdir(parents=True, exist_ok=True)
    with RunLock(sweep.folder):
        results, stopped = run_jobs(sweep, run_process, progress)
    file = sweep.folder / "sweep.csv"
    with _writing(file):
        write_csv(file, results)
    if sweep.output == "json":
        document = {"folder": str(sweep.folder), "jobs": [result.to_dict() for result in results]}
        print(json.dumps(finite_json(document), indent=2, allow_nan=False))
    else:
        print("\n".join(table(results)))
    print(f"saved  {file}", file=progress)
    if stopped:
        print(f"go on  the same command with run.name={sweep.folder.name}", file=progress)
        return ExitCode.REQUEUE
    return ExitCode.DONE if all(result.exit_code == 0 for result in results) else ExitCode.FAILED_CLAIM


def lay_out(arguments: Arguments) -> Sweep:
    """Expand the swept words and name folder and jobs.

    Raises:
        ConfigError: no job composes, or the words sweep the name or parent of the folder, or set what a training does not read.
    """
    refuse_unread(VERBS[arguments.verb], arguments.words)
    jobs = tuple(expand_sweep(arguments.words, config_dirs=arguments.config_dirs))
    for key in ("run.name", "run.dir", "output"):
        if any(key in job.changed for job in jobs):
            raise ConfigError(
                Problem(f"{key} swept", "one value for the whole sweep", f"sweep other keys, give {key} one value")
            )
    composed = _first_that_composes(jobs, arguments)
    read_launch(os.environ, composed.config.launch.nproc)  # a sweep inside torchrun would run once on every rank
    run = composed.config.run
    folder = user_path(run.dir, f"run.dir={run.dir}") / (run.name or _default_name(composed))
    names = tuple(f"{index}{job_suffix(job.changed)}" for index, job in enumerate(jobs))
    options = [f"--config-name={arguments.config_name}", *(f"--config-dir={directory}" for directory in arguments.config_dirs)]
    commands = tuple(
        (
            sys.executable,
            "-m",
            "llmtrain",
            "train",
            *options,
            *_own_words(job.words),
            f"run.dir={quoted(folder)}",
            f"run.name={name}",
        )
        for job, name in zip(jobs, names, strict=True)
    )
    return Sweep(folder, jobs, names, commands, composed.config.output)


def job_suffix(changed: Mapping[str, str]) -> str:
    """The changed keys as part of a folder name: `-precision-bf16-optimizer.lr-0.001`.

    No `=` in it, so that the folder can be named on a command line, where a word with `=` is an override.
    """
    text = "".join(f"-{key}-{value}" for key, value in changed.items())
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text)[:LONGEST_NAME]


def quoted(text: object) -> str:
    """Text that the override grammar reads as it stands, whatever is in it."""
    return "'" + str(text).replace("'", "\\'") + "'"


def _own_words(words: Sequence[str]) -> list[str]:
    """A job's words without those the sweep sets itself: its folder is the sweep's business, and its output is a log."""
    own = ("run.name", "run.dir", "output")
    return [word for word in words if split_word(word).key not in own]


def _first_that_composes(jobs: Sequence[Job], arguments: Arguments) -> Composed:
    """A typing error is in every job and stops the sweep here; a combination that is illegal by itself becomes a row."""
    first_error: ConfigError | None = None
    for job in jobs:
        try:
            return compose_config(job.words, config_name=arguments.config_name, config_dirs=arguments.config_dirs)
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None, "a sweep has at least one job"
    raise first_error


def _default_name(composed: Composed) -> str:
    what = composed.groups.get("experiment") or composed.groups.get("model") or "sweep"
    return f"{what}-sweep-{time.strftime('%m%d-%H%M', time.gmtime())}-{secrets.token_hex(2)}"


def run_jobs(sweep: Sweep, runner: Runner, progress: TextIO) -> tuple[list[JobResult], bool]:
    """Run the jobs in order; a failing one is a row and not the end.

    A stop signal (SIGINT, SIGTERM, SIGUSR1) lets the running job save and end, and no other is started. Further signals change
    nothing: to a job a second Ctrl-C means "do not even save", so a signal of each kind is passed on once, and the progress line says
    how to end the job at once.

    Returns:
        One result a job that was started, and whether the sweep was told to stop.
    """
    logs = sweep.folder / "logs"
    with _writing(logs):
        logs.mkdir(parents=True, exist_ok=True)
    results: list[JobResult] = []
    with _noted_signals() as noted:
        for number, (job, name, command) in enumerate(zip(sweep.jobs, sweep.names, sweep.commands, strict=True), start=1):
            title = f"{number}/{len(sweep.jobs)}  {' '.join(f'{key}={value}' for key, value in job.changed.items())}"
            log, folder = logs / f"{name}.log", sweep.folder / name
            told = _JobProgress(title, folder, progress)
            exit_code = runner(command, log, noted, told.tick)
            result = read_result(folder, log, job.changed, exit_code, told.elapsed_seconds)
            results.append(result)
            told.end(result.summary())
            if noted or exit_code == ExitCode.REQUEUE:
                return results, True
    return results, False


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Context in which what the file system refuses is the user's to cure."""
    try:
        yield
    except OSError as error:
        raise StorageError(Problem(f"cannot write {path}", error.strerror or str(error), "another run.dir")) from error


class _JobProgress:
    """What a job's line says: rewritten in place on a terminal; elsewhere new lines that become rarer the longer the job takes."""

    def __init__(self, title: str, folder: Path, stream: TextIO) -> None:
        self._title, self._folder, self._stream = title, folder, stream
        self._live = stream.isatty()
        self._note = ""
        self._began = self._said = time.monotonic()
        self._say("started")

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began

    def tick(self, note: str) -> None:
        """Say how far the job is, if it is time to; a note that is new is said at once."""
        pause = POLL_SECONDS if self._live else max(REPORT_SECONDS, self.elapsed_seconds / 10)
        if time.monotonic() - self._said >= pause or note != self._note:
            self._note = note
            told = [self._position(), f"{self.elapsed_seconds:,.0f} s", note]
            self._say(" · ".join(filter(None, told)))

    def _position(self) -> str:
        try:
            newest = newest_record(self._folder / METRICS_FILE)
        except StorageError as error:
            # The job goes on, whatever keeps the sweep from looking at it.
            return error.problems[0].what
        return "preparing" if newest is None else f"step {newest['step']} · loss {newest['loss']:.4f}"

    def end(self, told: str) -> None:
        """The line that stays."""
        clear = "\r\x1b[K" if self._live else ""
        print(f"{clear}{self._title}  {told}", file=self._stream, flush=True)

    def _say(self, told: str) -> None:
        self._said = time.monotonic()
        line = f"{self._title}  {told}"
        if self._live:
            # Cut: a line that wraps could not be rewritten.
            print(f"\r\x1b[K{line[: page_width() - 1]}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)


def run_process(command: Sequence[str], log: Path, noted: Sequence[int], tick: Callable[[str], None]) -> int:
    """Run a job and wait for it.

    Args:
        command: its words.
        log: file that what it prints is added to.
        noted: stop signals the sweep has received so far, each kind once; may grow meanwhile. Each is passed on to the job.
        tick: called now and then, with what is to be known about the job besides how far it is.

    Returns:
        The exit code, minus the number of the signal that ended the job if one did.
    """
    # A process group of its own: the terminal would otherwise signal the job too, at every Ctrl-C.
    with log.open("a", encoding="utf-8") as output:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    num_passed_on, note = 0, ""
    while True:
        try:
            return job.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            while num_passed_on < len(noted):
                job.send_signal(noted[num_passed_on])
                num_passed_on += 1
                note = f"told to stop, saving first (kill -KILL {job.pid} ends it without)"
            tick(note)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Context in which stop signals end nothing but are noted in a list, each kind once, for the loop that waits to look at."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number not in noted:
            noted.append(number)

    previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
