"""`llmtrain [train]`: train a model, or go on with a run that was stopped."""

from __future__ import annotations

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose
from llmtrain.cli.session import open_console


def run(arguments: Arguments) -> int:
    """Compose the config and hand it to the composition root."""
    composed = compose(arguments)
    with open_console(composed.config.output) as console:
        console.status("loading torch")
        from llmtrain.train.build import train

        return train(composed, console)
