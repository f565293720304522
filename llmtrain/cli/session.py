"""The console of a verb that computes, with what dependencies print kept off the screen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.metrics.console import Console


@contextmanager
def open_console(output: str) -> Iterator[Console]:
    """A console for `output` = table or json, closed at the end.

    Imports what it needs only when it is entered: a message about the config must not wait for torch.
    """
    from llmtrain.metrics.console import make_console
    from llmtrain.metrics.noise import collect_noise

    console = make_console(output, sys.stdout, sys.stderr)
    try:
        with collect_noise(console):
            yield console
    finally:
        console.close()
