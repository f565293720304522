"""Asking a run to stop: SIGINT, SIGTERM, SIGUSR1 and SIGHUP set a flag that the trainer reads between updates."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopSignals:
    """Context in which a stop signal is noted instead of ending the process.

    The handler only sets a flag: saving inside a handler could meet a half-made update. A second SIGINT ends the run at once
    (KeyboardInterrupt); a save in flight is then left in its staging folder and never becomes visible.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
