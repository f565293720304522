"""Asking a run to stop: SIGINT, SIGTERM, SIGUSR1 and SIGHUP set a flag that the trainer reads between updates.

While text is prepared nothing reads a flag, and what is finished is on the disk at every moment: there they raise.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from llmtrain.config.errors import Problem, StoppedError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Context in which a stop signal other than Ctrl-C, which raises by itself, ends the preparation of text with a message.

    Those that are ignored, as SIGHUP is under `nohup`, stay so. Outside the main thread signals cannot be caught: nothing changes.

    Raises:
        StoppedError: one came.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        what = f"stopped by {signal.Signals(number).name} while text was prepared"
        raise StoppedError(Problem(what, "shards that are finished are kept", "the same command goes on from there"))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS if number != signal.SIGINT}
    try:
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
