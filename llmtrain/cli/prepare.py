"""`llmtrain prepare data=…`: turn text into token files ahead of training."""

from __future__ import annotations

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose
from llmtrain.cli.session import open_console


def run(arguments: Arguments) -> int:
    """Compose the config and hand it to the part that prepares."""
    composed = compose(arguments)
    with open_console(composed.config.output) as console:
        console.status("reading the text")
        from llmtrain.train.prepare_text import prepare_text

        return prepare_text(composed, console)
