"""The log of one rank, `logs/rank<k>.log` of the run folder: what was said and when, and all that a rank without a terminal prints.

A log is there to be read after something went wrong, so it never is what goes wrong: where it cannot be written, because the disk is
full or the folder is gone, the training goes on without it. Appended pieces are written in one call each, so that several threads,
and a rank whose own output goes to the same file, do not cut each other's lines.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, cast

from llmtrain.metrics.console import Console, PlainConsole, Row, Tone
from llmtrain.metrics.format import printable
from llmtrain.metrics.meters import StepRecord
from llmtrain.metrics.throughput import Clock

STATUS_SECONDS = 30.0
"""A status that differs from the one before by its numbers alone, as while text is prepared, is logged this often."""
MOST_HELD_LINES = 1000
"""Lines that are kept until there is a folder for the log."""
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2

UtcNow = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


class RankLog:
    """Lines with the UTC time before each, appended to a file. Every start of a rank adds a header; nothing is ever removed.

    Args:
        path: the file; None = not known yet, lines are held until `open`.
        rank: of this process.
        size: ranks of the run.
        words: the command as it was typed.
        now: the time that lines begin with.
    """

    def __init__(
        self, path: Path | None = None, *, rank: int = 0, size: int = 1, words: Sequence[str] = (), now: UtcNow = utc_now
    ) -> None:
        self._now = now
        self._descriptor: int | None = None
        self._held: list[str] | None = []
        self._lock = threading.RLock()
        command = f": {shlex.join(words)}" if words else ""
        self.write(f"=== rank {rank} of {size} on {socket.gethostname()}, process {os.getpid()}{command}")
        if path is not None:
            self.open(path)

    def open(self, path: Path) -> None:
        """Write to this file from now on, first what was held; its folder is made. What cannot be opened is done without."""
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _open_to_append(path)
        with self._lock:
            held, self._held = self._held or [], None
            self._append("".join(held))

    def write(self, text: str) -> None:
        """Add a text; each of its lines gets the time."""
        time_told = self._now().strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        lines = "".join(f"{time_told}Z  {printable(line)}".rstrip() + "\n" for line in text.split("\n"))
        with self._lock:
            if self._held is None:
                self._append(lines)
            elif len(self._held) < MOST_HELD_LINES:
                self._held.append(lines)

    def close(self) -> None:
        """End the log; what is written afterwards goes nowhere."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _append(self, lines: str) -> None:
        if self._descriptor is not None and lines:
            # A disk that is full now may have room again for the next line.
            with suppress(OSError):
                os.write(self._descriptor, lines.encode("utf-8", "replace"))


class LogConsole(PlainConsole):
    """What a run says, written to a log: the console of a rank that nobody looks at.

    A status is logged when it begins to say something else; nothing is repeated, and no thread runs.
    """

    def __init__(self, log: RankLog, *, clock: Clock = time.monotonic) -> None:
        super().__init__(cast(TextIO, _Lines(log)), clock=clock)
        self._status_kind = ""
        self._status_at = clock()

    def status(self, text: str) -> None:
        kind = re.sub(r"[\d.,]+", "", text)
        if text and (kind != self._status_kind or self._clock() - self._status_at >= STATUS_SECONDS):
            self._status_at = self._clock()
            self.line(f"… {text}")
        self._status_kind = kind


class LoggedConsole:
    """A console whose words also go to a log; the document for programs does not."""

    def __init__(self, console: Console, log: RankLog, *, clock: Clock = time.monotonic) -> None:
        self._console = console
        # The log first: a console may end in an error of its stream.
        self._both: tuple[Console, Console] = (LogConsole(log, clock=clock), console)

    def status(self, text: str) -> None:
        for console in self._both:
            console.status(text)

    def card(self, title: str, rows: Sequence[Row]) -> None:
        for console in self._both:
            console.card(title, rows)

    def line(self, text: str) -> None:
        for console in self._both:
            console.line(text)

    def start_training(self, *, first_step: int, total_steps: int, log_every: int, baseline_loss: float | None = None) -> None:
        for console in self._both:
            console.start_training(
                first_step=first_step, total_steps=total_steps, log_every=log_every, baseline_loss=baseline_loss
            )

    def step(self, record: StepRecord) -> None:
        for console in self._both:
            console.step(record)

    def warn(self, text: str) -> None:
        for console in self._both:
            console.warn(text)

    def block(self, label: str, lines: Sequence[str], tone: Tone = Tone.NORMAL) -> None:
        for console in self._both:
            console.block(label, lines, tone)

    def next(self, commands: Sequence[str]) -> None:
        for console in self._both:
            console.next(commands)

    def document(self, document: Mapping[str, Any]) -> None:
        self._console.document(document)

    def close(self) -> None:
        for console in self._both:
            console.close()


def redirect_output(path: Path) -> TextIO:
    """Send all that this process and what it starts print into a log from now on: descriptors 1 and 2, Python's streams, crashes.

    Where the file cannot be opened, the output stays where it is.

    Returns:
        The old standard error, for the few words that are meant for the user's screen.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    screen = os.fdopen(os.dup(STANDARD_ERROR), "w", encoding="utf-8", errors="replace", buffering=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_to_append(path)
    except OSError:
        return screen
    os.dup2(descriptor, STANDARD_OUTPUT)
    os.dup2(descriptor, STANDARD_ERROR)
    os.close(descriptor)
    sys.stdout, sys.stderr = _text_stream(STANDARD_OUTPUT), _text_stream(STANDARD_ERROR)
    faulthandler.enable(STANDARD_ERROR, all_threads=True)
    return screen


class _Lines(io.TextIOBase):
    """A stream of whole lines into a log, for a console."""

    encoding = "utf-8"

    def __init__(self, log: RankLog) -> None:
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text.removesuffix("\n"))
        return len(text)


class _CarefulFile(io.FileIO):
    """A descriptor that swallows what cannot be written: a `print` must not end a training whose disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _text_stream(descriptor: int) -> TextIO:
    raw = _CarefulFile(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _open_to_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
