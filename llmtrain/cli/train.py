"""`llmtrain [train]`: train a model, or go on with a run that was stopped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose
from llmtrain.cli.session import open_console
from llmtrain.config.compose import Composed
from llmtrain.config.errors import ConfigError, LlmtrainError, PeerError, Problem
from llmtrain.dist.world import is_first_of_host, read_launch

AT_START = re.compile(r"LD_|DYLD_|PYTHON|MALLOC_|GLIBC_")
"""Beginnings of the names of variables that the loader, the C library and Python read before anything else."""


def run(arguments: Arguments) -> int:
    """Compose the config and carry it out."""
    with told_once_a_host():
        composed = compose(arguments)
    return carry_out(composed)


@contextmanager
def told_once_a_host() -> Iterator[None]:
    """Around what every rank finds by itself, before it has met the others: of those on a host the first one says it."""
    try:
        yield
    except LlmtrainError as error:
        if is_first_of_host(os.environ):
            raise
        raise PeerError(0, error.exit_code) from error


def carry_out(composed: Composed) -> int:
    """Start the ranks where that is left to this process, else train as one of them; hand over to the composition root."""
    config = composed.config
    with told_once_a_host():
        facts = read_launch(os.environ, config.launch.nproc)
        if not facts.starts_ranks and facts.launcher_pid is None:
            refuse_late(config.launch.env, os.environ)
    # Before torch is imported, which reads some of them only then.
    os.environ.update(config.launch.env)
    # A rank whose peer is gone says so itself; torch would add the addresses of its own code to every call.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if facts.starts_ranks:
        from llmtrain.train.launch import launch

        return launch(composed)
    with open_console(config.output) as console:
        if facts.is_main:
            console.status("loading torch")
        from llmtrain.train.build import train

        console.status("")
        return train(composed, console)


def refuse_late(wanted: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Raise ConfigError for variables that only a process which is started with them can honour, and this one was not."""
    late = [name for name, value in wanted.items() if AT_START.match(name) and environ.get(name) != value]
    if late:
        rule = "read when a process starts; this one runs already, and only launch.nproc starts ranks with it"
        raise ConfigError(
            *(Problem(f"launch.env.{name}={wanted[name]}", rule, f"export {name}={wanted[name]}") for name in late)
        )
