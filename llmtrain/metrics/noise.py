"""Keeps what dependencies print by themselves off the screen: warnings worth reading become numbered ones, the rest is dropped."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmtrain.metrics.console import Console

FOR_DEVELOPERS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning)
"""Kinds of warning that tell the user of a program nothing."""


@contextmanager
def collect_noise(console: Console) -> Iterator[None]:
    """Route Python warnings and log records of errors to `console.warn`; what was set up before comes back at the end.

    Dropped: warnings for developers, and log records below ERROR from libraries that set up no log of their own.
    """
    root = logging.getLogger()
    handler = _ConsoleHandler(console)
    root.addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for kind in FOR_DEVELOPERS:
            warnings.simplefilter("ignore", kind)

        def show(message: Warning | str, *_where: Any, **_options: Any) -> None:
            console.warn(_first_line(str(message)))

        warnings.showwarning = show
        try:
            yield
        finally:
            root.removeHandler(handler)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.ERROR)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.warn(f"{record.name}: {_first_line(record.getMessage())}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
