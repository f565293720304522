"""How far the running jobs of a sweep are: lines rewritten in place on a terminal; elsewhere lines that become rarer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TextIO

from llmtrain.cli.sweep_table import METRICS_FILE
from llmtrain.cli.text import page_width
from llmtrain.config.errors import StorageError
from llmtrain.metrics.sinks import newest_record

REDRAW_SECONDS = 0.5
REPORT_SECONDS = 3.0
"""Shortest time between two lines about a running job where lines cannot be rewritten."""
SHORTEST_TITLE = 12
"""Columns that what a job is called keeps, however much is to be told about it."""


class JobLine:
    """A running job as its line shows it."""

    def __init__(self, title: str, folder: Path) -> None:
        self.title = title
        self.note = ""
        """What is to be known besides how far it is."""
        self._folder = folder
        self._began = time.monotonic()

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began

    def told(self) -> str:
        """How far it is."""
        return " · ".join(filter(None, [self._position(), f"{self.elapsed_seconds:,.0f} s", self.note]))

    def _position(self) -> str:
        try:
            newest = newest_record(self._folder / METRICS_FILE)
        except StorageError as error:
            # The job goes on, whatever keeps the sweep from looking at it.
            return error.problems[0].what
        return "preparing" if newest is None else f"step {newest['step']} · loss {newest['loss']:.4f}"


class Progress(Protocol):
    """Who is told about a sweep while it goes on."""

    def update(self, running: Sequence[JobLine]) -> None:
        """Called often, with the jobs that run now; says how far they are if it is time to."""

    def say(self, text: str) -> None:
        """A line that stays."""


def make_progress(stream: TextIO) -> Progress:
    """The progress that suits where it is shown."""
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


class PlainProgress:
    """Lines for a log: one when a job starts, and further ones that become rarer the longer it takes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: dict[str, float] = {}
        """By title, at which second of a job its last line came."""

    def update(self, running: Sequence[JobLine]) -> None:
        for job in running:
            elapsed = job.elapsed_seconds
            if job.title not in self._said:
                self._said[job.title] = elapsed
                self.say(f"{job.title}  started")
            elif elapsed - self._said[job.title] >= max(REPORT_SECONDS, elapsed / 10):
                self._said[job.title] = elapsed
                self.say(f"{job.title}  {job.told()}")

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveProgress:
    """A line for each running job at the end of a terminal, below the lines that stay."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_drawn = 0
        self._titles: list[str] = []
        self._drawn_at = 0.0

    def update(self, running: Sequence[JobLine]) -> None:
        titles = [f"{job.title} {job.note}" for job in running]
        if titles == self._titles and time.monotonic() - self._drawn_at < REDRAW_SECONDS:
            return
        self._titles, self._drawn_at = titles, time.monotonic()
        # A line that wraps, or one that has left the screen, could not be rewritten.
        rows = max(1, shutil.get_terminal_size().lines - 1)
        lines = job_lines(running, page_width() - 1)
        if len(lines) > rows:
            lines = [*lines[: rows - 1], f"and {len(lines) - rows + 1} more"]
        self._print(self._to_the_top() + "\n".join(f"\x1b[K{line}" for line in lines) + "\x1b[J")
        self._num_drawn = len(lines)

    def say(self, text: str) -> None:
        self._print(f"{self._to_the_top()}\x1b[J{text}\n")
        self._num_drawn, self._titles = 0, []

    def _to_the_top(self) -> str:
        return "\r" + (f"\x1b[{self._num_drawn - 1}A" if self._num_drawn > 1 else "")

    def _print(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)


def job_lines(running: Sequence[JobLine], width: int) -> list[str]:
    """A line for each job, the positions below each other. Where it is too narrow, titles are cut rather than positions."""
    told = [job.told() for job in running]
    room = max(SHORTEST_TITLE, width - 2 - max(map(len, told), default=0))
    column = min(room, max((len(job.title) for job in running), default=0))
    titles = [job.title if len(job.title) <= column else f"{job.title[: column - 1]}…" for job in running]
    return [f"{title:{column}}  {text}"[:width] for title, text in zip(titles, told, strict=True)]
