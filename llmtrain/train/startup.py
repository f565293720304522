"""Where the seconds between the start of a process and its first update go. Needs no torch, whose import is one of the phases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

SMALLEST_TOLD = 0.05
"""Seconds of a phase that is told; shorter ones would read 0.0."""


class StartupClock:
    """Phases that follow each other without a gap; one that is entered again goes on.

    Args:
        before: seconds since this process was started, told as `python`; None = not known.
        clock: seconds since some fixed instant.
    """

    def __init__(self, before: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase: str | None = None
        self._since = clock()
        self.seconds: dict[str, float] = {} if before is None else {"python": before}
        """By phase, in the order in which they were entered; that of the phase that lasts is added when it ends."""

    def enter(self, phase: str) -> None:
        """End the phase that lasts and begin another; what came before the first one belongs to it."""
        self._end()
        self._phase = phase
        self.seconds.setdefault(phase, 0.0)

    def finish(self) -> None:
        """End the last phase; nothing is counted from here on."""
        self._end()
        self._phase = None

    def told(self) -> str:
        """`start-up 3.2 s: python 0.8 · torch 1.4 · first update 0.4`: the sum, and the phases that took a noticeable time."""
        parts = [f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items() if seconds >= SMALLEST_TOLD]
        return ": ".join([f"start-up {sum(self.seconds.values()):.1f} s", *([" · ".join(parts)] if parts else [])])

    def _end(self) -> None:
        now = self._clock()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since
            self._since = now


def seconds_since_start(root: Path = Path("/")) -> float | None:
    """How long this process has run, to a hundredth; None where the system does not tell (others than Linux)."""
    stat = root / "proc/self/stat"
    if not stat.is_file() or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    # The command's name, in parentheses, may hold blanks; starttime is field 22, in ticks since boot (proc(5)).
    fields = stat.read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
