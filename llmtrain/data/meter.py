"""How fast text becomes tokens: the status line while it does, and the line at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llmtrain.data.worker import Progress


class PreparationMeter:
    """Adds up what the units report.

    Speeds count what this process and its workers tokenized, not the shards that were there already.
    """

    def __init__(
        self, unit_bytes: Sequence[int], status: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`unit_bytes`: the size of each unit on disk."""
        self._unit_bytes = unit_bytes
        self._total = max(1, sum(unit_bytes))
        self._status = status
        self._clock = clock
        self._began = clock()
        self._at_work: dict[int, Progress] = {}
        self._covered = 0
        """Bytes on disk that are dealt with."""
        self._found = 0
        """Those of shards that were there."""
        self.source_bytes = 0
        """UTF-8 bytes tokenized."""
        self.tokens = 0
        """Tokens made."""

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return max(self._clock() - self._began, 1e-9)

    def update(self, index: int, progress: Progress, is_finished: bool) -> None:
        """A unit has come so far."""
        before = self._at_work.pop(index, Progress(0, 0))
        size = self._unit_bytes[index]
        self.source_bytes += progress.source_bytes - before.source_bytes
        self.tokens += progress.tokens - before.tokens
        # Text and its file differ in length: within a unit the share is an estimate.
        covered = size if is_finished else min(size, progress.source_bytes)
        self._covered += covered - min(size, before.source_bytes)
        if is_finished and progress == Progress(0, 0):
            self._found += size
        if not is_finished:
            self._at_work[index] = progress
        self._status(self._line())

    def speed(self) -> str:
        """For example `9.81 MB/s, 2.4M tokens/s`."""
        return f"{self.source_bytes / 1e6 / self.seconds:.3g} MB/s, {count(self.tokens / self.seconds)} tokens/s"

    def _line(self) -> str:
        share = self._covered / self._total
        here = (self._covered - self._found) / self._total
        left = f", {duration(self.seconds * (1 - share) / here)} left" if here > 0 and self.seconds > 1 else ""
        return f"tokenizing: {share:.0%}, {self.speed()}{left}"


def count(number: float) -> str:
    """At most three digits: `845`, `12.3k`, `9.81M`, `1.2B`; the form in which all other counts of a run are shown."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # Rounded to three digits, so that 999,999 is not 1000k.
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """`0:34`, `1:02:03`."""
    total = round(seconds)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
