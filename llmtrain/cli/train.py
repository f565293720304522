"""`llmtrain [train]`: train a model, or go on with a run that was stopped."""

from __future__ import annotations

import os

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose
from llmtrain.cli.session import open_console
from llmtrain.config.compose import Composed
from llmtrain.dist.world import read_launch


def run(arguments: Arguments) -> int:
    """Compose the config and carry it out."""
    return carry_out(compose(arguments))


def carry_out(composed: Composed) -> int:
    """Start the ranks where that is left to this process, else train as one of them; hand over to the composition root."""
    config = composed.config
    # Before torch is imported, which reads some of them only then.
    os.environ.update(config.launch.env)
    # A rank whose peer is gone says so itself; torch would add the addresses of its own code to every call.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    facts = read_launch(os.environ, config.launch.nproc)
    if facts.starts_ranks:
        from llmtrain.train.launch import launch

        return launch(composed)
    with open_console(config.output) as console:
        if facts.is_main:
            console.status("loading torch")
        from llmtrain.train.build import train

        console.status("")
        return train(composed, console)
