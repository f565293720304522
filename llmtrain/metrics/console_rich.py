"""The console on a terminal: a live display at the bottom, everything that stays scrolling above it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console as Screen
from rich.console import Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from llmtrain.metrics.console import CARD_LINES, TextConsole, Tone
from llmtrain.metrics.format import format_duration, printable, shorten
from llmtrain.metrics.meters import StepRecord
from llmtrain.metrics.progress import TrainingProgress, fit
from llmtrain.metrics.throughput import Clock

STYLES = {Tone.NORMAL: "", Tone.STRONG: "bold", Tone.GOOD: "green", Tone.BAD: "red"}
REFRESHES_PER_SECOND = 4
LONGEST_BAR = 40
SHORTEST_BAR = 8
ONE_LINE_WIDTH = 150
"""From this width on, quality and speed share a line."""


class RichConsole(TextConsole):
    """Shows steps as a bar of two lines (one where the terminal is wide) and statuses as a spinner with the time they take.

    The display is drawn a few times a second by a thread of rich; telling it about a step only stores the record.
    """

    longest_card = CARD_LINES

    def __init__(self, stream: TextIO, width: int | None = None, *, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._screen = Screen(file=stream, width=width, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._status = ""
        self._status_since = 0.0
        self._progress: TrainingProgress | None = None

    @property
    def width(self) -> int:
        return self._screen.width

    def status(self, text: str) -> None:
        if not self._status:
            self._status_since = self._clock()
        self._status = text
        if text:
            self._start_display()
        elif self._progress is None:
            # An empty display would still move the cursor, and what is printed next may not come through this console.
            self._end_display()

    def start_training(self, *, first_step: int, total_steps: int, log_every: int, baseline_loss: float | None = None) -> None:
        self._progress = TrainingProgress(first_step, total_steps, log_every, baseline_loss, self._clock)
        self._start_display()

    def step(self, record: StepRecord) -> None:
        assert self._progress is not None, "start_training comes before the first step"
        self._status = ""
        self._progress.update(record)
        if record.val_loss is not None:
            self._show(shorten(self._progress.evaluated(), self.width))

    def block(self, label: str, lines: Sequence[str], tone: Tone = Tone.NORMAL) -> None:
        self._end_display()
        super().block(label, lines, tone)

    def close(self) -> None:
        self._end_display()
        self._repeat_warnings()

    def _show(self, line: str, tone: Tone = Tone.NORMAL) -> None:
        self._screen.print(Text(line, style=STYLES[tone]), soft_wrap=True)

    def _start_display(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=self._display,
                console=self._screen,
                refresh_per_second=REFRESHES_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="visible",
            )
            self._live.start()

    def _end_display(self) -> None:
        """Leave the last state of the bar where it is; a status goes."""
        self._status = ""
        if self._live is not None:
            self._live.transient = self._progress is None
            self._live.stop()
            self._live = None
        self._progress = None

    def _display(self) -> RenderableType:
        lines: list[RenderableType] = []
        if self._progress is not None:
            lines += self._training(self._progress)
        if self._status:
            elapsed = f" ({format_duration(self._clock() - self._status_since)})"
            text = shorten(printable(self._status), self.width - len(elapsed) - 3)
            self._spinner.update(text=Text(text + elapsed))
            lines.append(self._spinner)
        return Group(*lines)

    def _training(self, progress: TrainingProgress) -> list[RenderableType]:
        quality, speed = progress.quality(with_validation=True), progress.speed()
        wide = self.width >= ONE_LINE_WIDTH
        position = f" {progress.position()} "
        beside = fit([*quality, *speed] if wide else quality, self.width - len(position) - SHORTEST_BAR - 2)
        bar_width = min(LONGEST_BAR, self.width - len(position) - len(beside) - 2)
        first = Text(position).append(bar(progress.fraction, bar_width)).append(f"  {beside}")
        if wide or not speed:
            return [first]
        indent = " " * len(position)
        return [first, Text(indent + fit(speed, self.width - len(indent), " · "))]


def bar(fraction: float, width: int) -> Text:
    """A bar of `width` columns, filled by `fraction`."""
    full = int(width * min(max(fraction, 0.0), 1.0))
    return Text("━" * full, style=STYLES[Tone.GOOD]).append("─" * (width - full), style="dim")
