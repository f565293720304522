"""What a run says to its user: one protocol, a live display on a terminal, plain lines elsewhere, one JSON document on request.

The order of a run is: statuses while things are prepared, the card, steps, the closing blocks, and what to type next. Every line
fits the width; only a command's single word may stick out, since a shortened one could not be pasted.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TextIO

from llmtrain.metrics.format import format_duration, printable, shorten, wrap, wrap_command
from llmtrain.metrics.meters import StepRecord
from llmtrain.metrics.progress import TrainingProgress, fit
from llmtrain.metrics.sinks import finite_json
from llmtrain.metrics.throughput import Clock

CARD_LINES = 14
"""Of a card on a terminal, besides its commands."""
PLAIN_WIDTH = 120
SILENCE_SECONDS = 2.5
"""A status that lasts is repeated after this long without a line; nobody should wait for more than three seconds."""


class Tone(Enum):
    """How a line is meant; the two colours are chosen from it."""

    NORMAL = "normal"
    STRONG = "strong"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Row:
    """One labelled entry of a card."""

    label: str
    text: str
    is_command: bool = False
    """The text is a shell command: it is never shortened, and broken so that it can be pasted."""
    cut_last: bool = False
    """Where a card grows too long, other rows are shortened before this one."""


class Console(Protocol):
    """Everything a verb can say. Texts may hold anything; what a terminal would obey is taken out."""

    def status(self, text: str) -> None:
        """What is going on now, until the next step or block; cheap, may be called often. An empty text ends it."""
        ...

    def card(self, title: str, rows: Sequence[Row]) -> None:
        """The facts of a run before its first step: on a terminal 14 lines at most and what its commands take, elsewhere all of it."""
        ...

    def line(self, text: str) -> None:
        """One remark that stays."""
        ...

    def start_training(self, *, first_step: int, total_steps: int, log_every: int, baseline_loss: float | None = None) -> None:
        """Steps follow. `first_step` updates are made already; `baseline_loss` is what guessing by frequency alone scores."""
        ...

    def step(self, record: StepRecord) -> None:
        """An update was made."""
        ...

    def warn(self, text: str) -> None:
        """Print a warning with a number, once, and again at the end."""
        ...

    def block(self, label: str, lines: Sequence[str], tone: Tone = Tone.NORMAL) -> None:
        """A labelled paragraph: `done`, `sample`, a result."""
        ...

    def next(self, commands: Sequence[str]) -> None:
        """Repeat the warnings, then say what to type next: the last lines of a run."""
        ...

    def document(self, document: Mapping[str, Any]) -> None:
        """The result for programs, only shown with output=json; ends the status. Floats that are not finite become words (see sinks)."""
        ...

    def close(self) -> None:
        """End the display; warnings not repeated yet are."""
        ...


def make_console(output: str, stdout: TextIO, stderr: TextIO, width: int | None = None) -> Console:
    """The console for `output` = table or json: json leaves standard output to the document and reports on standard error.

    A stream that is a terminal able to show the display gets it; `width` overrides what the terminal says.
    """
    if output == "json":
        return JsonConsole(_text_console(stderr, width), stdout)
    return _text_console(stdout, width)


def _text_console(stream: TextIO, width: int | None) -> Console:
    if stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8":
        # Imported here: a log file needs none of it.
        from llmtrain.metrics.console_rich import RichConsole

        return RichConsole(stream, width)
    return PlainConsole(stream, width or PLAIN_WIDTH)


class TextConsole(ABC):
    """Lays out cards, blocks, warnings and commands as lines; subclasses show lines, statuses and steps."""

    longest_card: int | None = None
    """Lines that a card may have besides its commands; None = as many as it takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._warnings: list[str] = []
        self._repeated = 0

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns of a line."""

    @abstractmethod
    def _show(self, line: str, tone: Tone = Tone.NORMAL) -> None:
        """Put one line, already cut to the width, where it stays."""

    @abstractmethod
    def close(self) -> None: ...

    def card(self, title: str, rows: Sequence[Row]) -> None:
        first, *others = card_lines(title, rows, self.width, self.longest_card)
        self._show(first, Tone.STRONG)
        for line in others:
            self._show(line)

    def line(self, text: str) -> None:
        for line in wrap(printable(text), self.width):
            self._show(line)

    def warn(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.append(text)
            self._labelled(f"warning {len(self._warnings)}", [text], Tone.BAD)

    def block(self, label: str, lines: Sequence[str], tone: Tone = Tone.NORMAL) -> None:
        self._labelled(f"{label:<4}", lines, tone)

    def next(self, commands: Sequence[str]) -> None:
        self._repeat_warnings()
        for index, command in enumerate(commands):
            for number, line in enumerate(wrap_command(printable(command), self.width - 6)):
                self._show(("next  " if index == number == 0 else " " * 6) + line)

    def document(self, document: Mapping[str, Any]) -> None:
        pass

    def _repeat_warnings(self) -> None:
        for number in range(self._repeated, len(self._warnings)):
            self._labelled(f"warning {number + 1}", [self._warnings[number]], Tone.BAD)
        self._repeated = len(self._warnings)

    def _labelled(self, label: str, lines: Sequence[str], tone: Tone) -> None:
        """`label  text`, further lines below the text; the tone is that of the first line."""
        indent = len(label) + 2
        whole = "\n".join(printable(line) for line in lines).split("\n")
        shown = [piece for line in whole for piece in wrap(line, self.width - indent)]
        for number, text in enumerate(shown):
            self._show(
                (f"{label}  {text}" if number == 0 else " " * indent + text).rstrip(), tone if number == 0 else Tone.NORMAL
            )


class PlainConsole(TextConsole):
    """Lines without control characters, for files and pipes: a record every `log_every` updates, lasting statuses, the rest.

    A thread repeats a status while nothing else is printed; it runs from the first status to `close`.
    """

    def __init__(
        self,
        stream: TextIO,
        width: int = PLAIN_WIDTH,
        *,
        clock: Clock = time.monotonic,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        super().__init__(clock)
        self._stream = stream
        self._reader_is_gone = False
        self._width = width
        self._silence_seconds = silence_seconds
        self._lock = threading.RLock()
        self._printed_at = clock()
        self._status = ""
        self._status_since = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress: TrainingProgress | None = None
        self._log_every = 1

    @property
    def width(self) -> int:
        return self._width

    def status(self, text: str) -> None:
        if not self._status:
            self._status_since = self._clock()
        # The lock: once a status has ended no line of the thread about it may follow.
        with self._lock:
            self._status = text
        if text and self._thread is None:
            self._thread = threading.Thread(target=self._repeat_status, name="console status", daemon=True)
            self._thread.start()

    def start_training(self, *, first_step: int, total_steps: int, log_every: int, baseline_loss: float | None = None) -> None:
        self._progress = TrainingProgress(first_step, total_steps, log_every, baseline_loss, self._clock)
        self._log_every = log_every

    def step(self, record: StepRecord) -> None:
        assert self._progress is not None, "start_training comes before the first step"
        progress = self._progress
        progress.update(record)
        self._status = ""
        first, last = progress.first_step + 1, progress.total_steps
        if record.step in (first, last) or record.step % self._log_every == 0:
            self._show(fit([progress.position(), *progress.quality(with_validation=False), *progress.speed()], self.width))
        if record.val_loss is not None:
            self._show(shorten(progress.evaluated(), self.width))

    def block(self, label: str, lines: Sequence[str], tone: Tone = Tone.NORMAL) -> None:
        self._status = ""
        super().block(label, lines, tone)

    def close(self) -> None:
        self._status = ""
        self._repeat_warnings()
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _show(self, line: str, tone: Tone = Tone.NORMAL) -> None:
        encoding = self._stream.encoding or "utf-8"
        with self._lock:
            self._printed_at = self._clock()
            if self._reader_is_gone:
                return
            try:
                self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
                self._stream.flush()
            except BrokenPipeError:
                # `llmtrain | head`: a training goes on without its reader, everything is in the run folder.
                self._reader_is_gone = True

    def _repeat_status(self) -> None:
        while not self._closed.wait(self._silence_seconds / 10):
            with self._lock:
                text, now = self._status, self._clock()
                if text and now - self._printed_at >= self._silence_seconds:
                    elapsed = f" ({format_duration(now - self._status_since)})"
                    self._show(shorten(f"… {printable(text)}", self.width - len(elapsed)) + elapsed)


class JsonConsole:
    """Everything for people goes to another console (on standard error); standard output gets the document alone."""

    def __init__(self, people: Console, stream: TextIO) -> None:
        self._stream = stream
        self.status = people.status
        self.card = people.card
        self.line = people.line
        self.start_training = people.start_training
        self.step = people.step
        self.warn = people.warn
        self.block = people.block
        self.next = people.next
        self.close = people.close

    def document(self, document: Mapping[str, Any]) -> None:
        # Both streams may be the same terminal: a status still shown there would be drawn over the document.
        self.status("")
        self._stream.write(json.dumps(finite_json(document), indent=2, allow_nan=False) + "\n")
        self._stream.flush()


def card_lines(title: str, rows: Sequence[Row], width: int, longest: int | None = CARD_LINES) -> list[str]:
    """A title and labelled rows as lines of at most `width` columns, at most `longest` of them besides the commands.

    Rows are wrapped; where that makes too many lines, the longest rows end in an ellipsis instead, those marked `cut_last` after all
    others. Commands stay whole and count for nothing, even if a word of theirs sticks out.
    """
    indent = 2 + max((len(row.label) for row in rows), default=0) + 2
    texts = [_row_lines(row, width - indent) for row in rows]
    if longest is not None:
        _cut_rows(texts, rows, longest - 1, width - indent)
    lines = [shorten(printable(title), width)]
    for row, pieces in zip(rows, texts, strict=True):
        lines += [f"  {row.label if number == 0 else '':<{indent - 2}}{piece}" for number, piece in enumerate(pieces)]
    return lines


def _cut_rows(texts: list[list[str]], rows: Sequence[Row], longest: int, width: int) -> None:
    """Take the last line from one row after the other until those that are no commands have `longest` lines."""
    facts = [index for index, row in enumerate(rows) if not row.is_command]
    assert len(facts) <= longest, f"a card has a title and at most {longest} rows"
    while sum(len(texts[index]) for index in facts) > longest:
        cuttable = [index for index in facts if len(texts[index]) > 1]
        index = max(cuttable, key=lambda index: (not rows[index].cut_last, len(texts[index])))
        kept = texts[index][:-1]
        texts[index] = [*kept[:-1], shorten(f"{kept[-1]} {texts[index][-1]}", width)]


def _row_lines(row: Row, width: int) -> list[str]:
    text = printable(row.text).replace("\n", " ")
    return wrap_command(text, width) if row.is_command else wrap(text, width)
