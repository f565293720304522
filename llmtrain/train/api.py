"""Training and loading from Python, with defaults for what the command line would say."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config.compose import Composed
from llmtrain.config.errors import ConfigError, ExitCode, PeerError, Problem
from llmtrain.config.typed import LaunchConfig
from llmtrain.dist.failure import reason
from llmtrain.dist.world import read_launch
from llmtrain.train.launch import launch_run

if TYPE_CHECKING:
    from llmtrain.metrics.console import Console
    from llmtrain.train.saved_run import SavedRun

STANDARD_ERROR = 2


def train(composed: Composed, console: Console | None = None) -> ExitCode:
    """Train, or resume, or find that there is nothing left to do; with `launch.nproc` on as many ranks, which are started here.

    Args:
        composed: what `compose_config` returns; with `run.name` given, the folder is `run.dir`/`run.name`.
        console: who is told how it goes; None = plain lines on standard error, and with output=json a document on standard output.
            Several ranks are processes of their own, which tell as the command line does, on this process's standard error.

    Returns:
        DONE, or REQUEUE after a stop signal and a save.

    Raises:
        LlmtrainError: config, plan, data, storage, numerics or memory; `exit_code` and `problems` say which and why.
        PeerError: a rank that was started here failed; the error names it, its `exit_code` is that rank's, and what it said is shown.
        KeyboardInterrupt: a second SIGINT, or one before there was anything to save.
        ValueError: not called in the main thread, which alone may wait for signals.
    """
    launch = composed.config.launch
    if read_launch(os.environ, launch.nproc).starts_ranks:
        return _train_on_ranks(composed, console)
    os.environ.update(launch.env)
    # Here, as in `load_run`: a process that only starts ranks needs no torch.
    from llmtrain.metrics.console import JsonConsole, PlainConsole
    from llmtrain.train import build

    if console is not None:
        return build.train(composed, console)
    people = PlainConsole(sys.stderr)
    own: Console = JsonConsole(people, sys.stdout) if composed.config.output == "json" else people
    try:
        return build.train(composed, own)
    finally:
        own.close()


def _train_on_ranks(composed: Composed, console: Console | None) -> ExitCode:
    """Start the ranks and give their end back as `train` does its own."""
    if console is not None:
        rule = "a console cannot follow ranks, which are processes of their own"
        raise ConfigError(Problem(f"launch.nproc={composed.config.launch.nproc}", rule, "train(composed) without a console"))
    end = launch_run(composed, stdout=None if composed.config.output == "json" else STANDARD_ERROR)
    verdict = end.verdict
    if verdict.failure is not None:
        raise PeerError(verdict.failure.rank, verdict.code, reason(verdict.failure))
    if verdict.code is ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if verdict.code is ExitCode.READER_GONE:
        raise BrokenPipeError
    return verdict.code


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
    from llmtrain.train import saved_run

    return saved_run.load_run(Path(path), LaunchConfig(nproc=None, device=device, threads=threads), step)
