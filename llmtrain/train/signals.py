"""Asking a run to stop: SIGINT, SIGTERM, SIGUSR1 and SIGHUP are noted, and the trainer looks between updates.

Before there is anything to save a signal ends the start at once: what text was prepared is on the disk at every moment.
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
        raise StoppedError(Problem(what, "shards that are finished are kept", "the same command goes on"))

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

    Until `begin_training` it raises as well: there is nothing to save yet. Afterwards the handler only sets a flag, since saving inside
    a handler could meet a half-made update; a second SIGINT ends the run at once (KeyboardInterrupt), and a save in flight is then left
    in its staging folder and never becomes visible. A SIGHUP that is ignored, as under `nohup`, stays so.

    Raises:
        StoppedError: a signal other than SIGINT came before there was anything to save.
        KeyboardInterrupt: SIGINT came then, or a second time.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._is_training = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def begin_training(self) -> None:
        """From now on somebody looks at `received`."""
        self._is_training = True

    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and self.received == signal.SIGINT
        self.received = signal.Signals(number)
        if is_second or (number == signal.SIGINT and not self._is_training):
            raise KeyboardInterrupt
        if not self._is_training:
            rule = "there is nothing to save yet; text that was prepared is kept"
            raise StoppedError(
                Problem(f"stopped by {self.received.name} before the first update", rule, "the same command goes on")
            )
