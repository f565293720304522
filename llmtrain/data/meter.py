"""How fast text becomes tokens: the status line while it does, and the line at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmtrain.data.record_units import Storage
from llmtrain.data.units import RecordUnit, WorkUnit
from llmtrain.data.worker import Progress

SILENT_SECONDS = 30.0
"""A unit that is silent for longer is told: it may be one long document, or its process does not run."""
_PACKED = (Storage.GZIP, Storage.ZSTD)


@dataclass
class _Sizes:
    """What finished units had, to tell how far others have come."""

    on_disk: int = 0
    text: int = 0


class PreparationMeter:
    """Adds up what the units report.

    Speeds count what this process and its workers tokenized, not the shards that were there already. Shares are of bytes on disk. How
    far a unit has come is estimated by the bytes of text that the finished ones gave for a byte on disk; a compressed file that is
    the first of its kind counts as not begun, and before anything else is known no share is told.
    """

    def __init__(self, units: Sequence[WorkUnit], clock: Callable[[], float] = time.monotonic) -> None:
        self._units = units
        self._total = max(1, sum(unit.source_bytes for unit in units))
        self._clock = clock
        self._began = clock()
        self._at_work: dict[int, tuple[Progress, float]] = {}
        """Unit -> how far it has come, and when that was said."""
        self._covered = 0
        """Bytes on disk of finished units."""
        self._found = 0
        """Those of shards that were there."""
        self._finished = {False: _Sizes(), True: _Sizes()}
        """Of plain and of compressed units that were tokenized here."""
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
        before, _ = self._at_work.pop(index, (Progress(0, 0), 0.0))
        self.source_bytes += progress.source_bytes - before.source_bytes
        self.tokens += progress.tokens - before.tokens
        if not is_finished:
            self._at_work[index] = (progress, self._clock())
            return
        size = self._units[index].source_bytes
        self._covered += size
        if progress == Progress(0, 0):
            self._found += size
            return
        sizes = self._finished[_is_packed(self._units[index])]
        sizes.on_disk += size
        sizes.text += progress.source_bytes

    def speed(self) -> str:
        """For example `9.81 MB/s, 2.4M tokens/s`."""
        return f"{self.source_bytes / 1e6 / self.seconds:.3g} MB/s, {count(self.tokens / self.seconds)} tokens/s"

    def line(self) -> str:
        """The status line as of now; may be called from another thread."""
        at_work = dict(self._at_work)
        parts = [self.speed()]
        covered = [self._estimate(index, progress) for index, (progress, _) in at_work.items()]
        here = self._covered - self._found + sum(size for size in covered if size is not None)
        # Nothing but compressed files that none of their kind has ended before: how much is left cannot be told.
        if here or None not in covered:
            share = (here + self._found) / self._total
            parts.insert(0, f"{share:.0%}")
            if here and self.seconds > 1:
                parts.append(f"{duration(self.seconds * (1 - share) * self._total / here)} left")
        return f"tokenizing: {', '.join(parts)}{self._silence(at_work)}"

    def _estimate(self, index: int, progress: Progress) -> float | None:
        """Bytes on disk that a unit at work has covered; None where nothing tells it."""
        unit = self._units[index]
        is_packed = _is_packed(unit)
        sizes = self._finished[is_packed]
        if is_packed and not sizes.text:
            return None
        on_disk_for_text = sizes.on_disk / sizes.text if sizes.text else 1.0
        return min(float(unit.source_bytes), progress.source_bytes * on_disk_for_text)

    def _silence(self, at_work: dict[int, tuple[Progress, float]]) -> str:
        """The unit that has been silent for longest, if that is long."""
        if not at_work:
            return ""
        index, (_, heard) = min(at_work.items(), key=lambda item: item[1][1])
        silent = self._clock() - heard
        if silent < SILENT_SECONDS:
            return ""
        return f"; nothing heard for {duration(silent)} of unit {index}: {self._units[index].place}"


def _is_packed(unit: WorkUnit) -> bool:
    return isinstance(unit, RecordUnit) and any(part.storage in _PACKED for part in unit.units)


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
