"""Keeps a long preparation from falling silent, also inside one long call into a library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

INTERVAL_SECONDS = 2.0


class Heartbeat:
    """Reports the latest status line every `interval_seconds` from a thread of its own, while the `with` block runs."""

    def __init__(
        self,
        progress: Callable[[str], None],
        interval_seconds: float = INTERVAL_SECONDS,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`progress` gets statuses, `say` what should stay; without it both go the same way."""
        self._progress = progress
        self._say = say or progress
        self._interval_seconds = interval_seconds
        self._status: str | Callable[[], str] = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="data-progress", daemon=True)

    def status(self, text: str | Callable[[], str]) -> None:
        """What is being done now, or what tells it at each beat; shown at the next one if it is still the latest."""
        self._status = text

    def say(self, text: str) -> None:
        """Show a line at once."""
        self._status = text
        self._say(text)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._done.wait(self._interval_seconds):
            status = self._status
            if text := status() if callable(status) else status:
                self._progress(text)
