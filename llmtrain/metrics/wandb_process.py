"""The process that speaks to wandb for a training: python -m llmtrain.metrics.wandb_process PARENT, without torch.

A process of its own because wandb can only be told by environment variables to send no error reports and to write nothing into the
home folder, waits without bound at the end of a process, and takes hold of its signals and exit. It outlives a killed trainer for as
long as it takes to store what was logged.

Lines of JSON on standard input: the run and its settings, then records {"step": …, "values": {…}}; the end of the input is the end of
the run, {"finish": true} before it says that it is a good one. Lines of JSON on standard output: {"opened": folder}, and what went
wrong, {"failed": reason}.

Each start begins with all the records that metrics.jsonl holds: a start that was killed may have lost some, and an offline folder
that is complete can be sent alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain.metrics.trackers import TrackedRun

HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What stops a training may be sent to all of its processes; this one ends when its input does. The process that wandb starts cannot
be told: it ends at SIGINT, SIGTERM and SIGHUP."""
POLL_SECONDS = 1.0
LAST_SECONDS = 60.0
"""How long this process lives after the trainer is gone."""
DIED = 1
"""Exit code wandb is told for a run that ended without a word."""


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    # Neither wandb nor the process it starts may read the records or write between the answers.
    records, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        _track(_lines(records, int(sys.argv[1])), answers)
    except Exception as error:
        _answer(answers, failed=str(error).strip() or type(error).__name__)
        return 1
    finally:
        _leave_within(LAST_SECONDS)
    return 0


def _track(lines: Iterator[bytes], answers: int) -> None:
    """Open the run that the first line describes, log the others, finish."""
    start = next(lines, None)
    if start is None:
        return
    told = json.loads(start)
    run = _open(told)
    _answer(answers, opened=os.path.dirname(run.settings.sync_file))
    tracked = TrackedRun(**told["tracked"] | {"folder": Path(told["tracked"]["folder"])})
    # What a server has already comes with the run online; wandb would drop it.
    for step, values in tracked.history(after=run.starting_step - 1):
        run.log(values, step=step)
    code = DIED
    for line in lines:
        message = json.loads(line)
        if "finish" in message:
            code = 0
        else:
            run.log(message["values"], step=message["step"])
    _leave_within(LAST_SECONDS)
    run.finish(exit_code=code)


def _leave_within(seconds: float) -> None:
    """End this process then, whatever wandb still waits for: a server, at an exit its own process."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _open(start: dict[str, Any]) -> Any:
    import wandb

    known = wandb.Settings.model_fields
    settings = wandb.Settings(**{name: value for name, value in start["settings"].items() if name in known})
    wandb.setup(settings=settings)
    return wandb.init(**start["run"], settings=settings)


def _lines(descriptor: int, parent: int) -> Iterator[bytes]:
    """Whole lines until the input ends or the trainer is gone (a process it forked may keep the input open)."""
    rest = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], POLL_SECONDS)
        if not ready and os.getppid() != parent:
            return
        if not ready:
            continue
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _answer(descriptor: int, **message: str) -> None:
    # The trainer may be gone, then nobody asks any more.
    with suppress(BrokenPipeError):
        os.write(descriptor, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
