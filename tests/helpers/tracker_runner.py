"""A start that logs as a training does; a script, so that it can be killed.

    python tracker_runner.py FOLDER MODE RESUMED LAST [AT]

Records of the steps after RESUMED go to metrics.jsonl and to both trackers (wandb in MODE); after step AT it kills
itself. AT+fork: a forked child with the same open files lives on for some seconds. Prints the warnings and the notes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from helpers.tracker_files import OFFLINE

from llmtrain.config.typed import TrackerConfig, WandbConfig
from llmtrain.metrics.meters import StepRecord
from llmtrain.metrics.sinks import open_sink
from llmtrain.metrics.trackers import open_trackers


def record(step: int, start: int) -> StepRecord:
    return StepRecord(
        step=step,
        tokens=96 * step,
        loss=1 / (step + start),
        lr=1e-3,
        grad_norm=0.1,
        step_seconds=0.01,
        tokens_per_second=9600.0,
    )


def main() -> None:
    folder, mode, resumed, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    at, _, fork = (sys.argv[5] if len(sys.argv) > 5 else "").partition("+")
    wandb = WandbConfig(mode, OFFLINE.project, None, None, ())
    trackers = open_trackers(
        TrackerConfig(wandb, tensorboard=True), folder=folder, run_name=folder.name, wire={}, resumed_step=resumed, warn=print
    )
    if fork and os.fork() == 0:
        # Whoever reads what this script prints does not wait for the child.
        os.closerange(1, 3)
        time.sleep(8)
        os._exit(0)
    sink = open_sink(folder / "metrics.jsonl", resumed)
    for step in range(resumed + 1, last + 1):
        values = record(step, resumed)
        sink.write(values)
        trackers.log(values)
        if at and step == int(at):
            os.kill(os.getpid(), signal.SIGKILL)
    trackers.finish()
    print(*trackers.notes(), sep="\n")


main()
