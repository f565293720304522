"""Training and loading from Python, with defaults for what the command line would say."""

from __future__ import annotations

import sys
from pathlib import Path

from llmtrain.config.compose import Composed
from llmtrain.config.errors import ExitCode
from llmtrain.config.typed import LaunchConfig
from llmtrain.metrics.console import Console, JsonConsole, PlainConsole
from llmtrain.train import build, saved_run
from llmtrain.train.saved_run import SavedRun


def train(composed: Composed, console: Console | None = None) -> ExitCode:
    """Train, or resume, or find that there is nothing left to do.

    Args:
        composed: what `compose_config` returns; with `run.name` given, the folder is `run.dir`/`run.name`.
        console: who is told how it goes; None = plain lines on standard error, and with output=json a document on standard output.

    Returns:
        DONE, or REQUEUE after SIGINT or SIGTERM and a save.

    Raises:
        LlmtrainError: config, plan, data, storage, numerics or memory; `exit_code` and `problems` say which and why.
        ValueError: not called in the main thread, which alone may wait for signals.
    """
    if console is not None:
        return build.train(composed, console)
    people = PlainConsole(sys.stderr)
    own: Console = JsonConsole(people, sys.stdout) if composed.config.output == "json" else people
    try:
        return build.train(composed, own)
    finally:
        own.close()


def load_run(path: Path | str, step: int | None = None, *, device: str = "auto", threads: int | None = None) -> SavedRun:
    """The model of a run folder with its tokenizer, in evaluation mode and in the precision it was trained in.

    Args:
        path: the run folder.
        step: the checkpoint; None = the newest good one.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads; None = one for each core.

    Raises:
        ConfigError: no such checkpoint or device.
        StorageError: no run, a damaged checkpoint, or tensors that do not fit the config.
    """
    return saved_run.load_run(Path(path), LaunchConfig(nproc=None, device=device, threads=threads), step)
