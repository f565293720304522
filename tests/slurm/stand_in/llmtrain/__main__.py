"""Stands in for llmtrain where the scripts of launch/ are tested: starts at once, counts steps, leaves status.json and exit codes.

Words besides run.name, run.dir and sweep.only: `steps` of the run; `pause` seconds a step; `save` seconds that rank 0 takes to save;
`notice` seconds between two looks of rank 0 at the others; `fail=rank:code:steps` ends a rank with a code (or -9: killed, the others end
with 71) after so many steps of a start, which are saved; `refuse=code` ends before the run folder is looked at when the run was started before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

WORDS = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
SIZE = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")))
FOLDER = Path(WORDS["run.dir"].strip("'")) / WORDS["run.name"]
if "sweep.only" in WORDS:
    FOLDER = FOLDER / f"{WORDS['sweep.only']}-seed-0"
received: list[int] = []


def note(number: int, frame: FrameType | None) -> None:
    received.append(number)


def write_status(code: int | None, step: int, reason: str) -> None:
    """As llmtrain does: replaced as a whole, by rank 0 only."""
    if RANK == 0:
        new = FOLDER / "status.json.new"
        new.write_text(json.dumps({"format_version": 1, "code": code, "step": step, "reason": reason}))
        new.replace(FOLDER / "status.json")


def end(code: int, step: int, reason: str) -> None:
    write_status(code, step, reason)
    (FOLDER / f"failed-{code}").touch()
    with (FOLDER / f"rank-{RANK}.log").open("a") as log:
        log.write(f"exit {code} signals {received}\n")
    sys.exit(code)


def others_code() -> int | None:
    """What another rank of this start failed with."""
    return next((int(file.name.partition("-")[2]) for file in FOLDER.glob("failed-[1-9]*")), None)


def saved_step() -> int:
    return max([0, *(int(path.name.removeprefix("step-")) for path in (FOLDER / "checkpoints").glob("step-*"))])


def start() -> int:
    """The step to go on from; all ranks are there when it is known."""
    if "refuse" in WORDS and (FOLDER / "status.json").exists():
        sys.exit(int(WORDS["refuse"]))
    (FOLDER / "checkpoints").mkdir(parents=True, exist_ok=True)
    (FOLDER / f"here-{RANK}").touch()
    with (FOLDER / f"rank-{RANK}.log").open("a") as log:
        log.write(f"start rank {RANK} of {SIZE} words {sys.argv[1:]}\n")
    while len(list(FOLDER.glob("here-*"))) < SIZE:
        time.sleep(0.05)
    step = saved_step()
    time.sleep(0.5)
    (FOLDER / f"here-{RANK}").unlink()
    for stale in FOLDER.glob("failed-*"):
        stale.unlink(missing_ok=True)
    write_status(None, 0, "running")
    return step


def main() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, note)
    fail_rank, fail_code, fail_steps = (int(text) for text in WORDS.get("fail", "-1:0:0").split(":"))
    first = step = start()
    looked = time.monotonic()
    while step < int(WORDS["steps"]):
        time.sleep(float(WORDS.get("pause", "0.1")))
        step += 1
        if RANK == fail_rank and step - first > fail_steps:
            if fail_steps:
                (FOLDER / "checkpoints" / f"step-{first + fail_steps:08}").mkdir(exist_ok=True)
            if fail_code < 0:
                (FOLDER / "failed-71").touch()  # the others notice
                os.kill(os.getpid(), -fail_code)
            end(fail_code, step, "failed")
        if time.monotonic() - looked > float(WORDS.get("notice", "0.2")):
            looked = time.monotonic()
            if (code := others_code()) not in (None, 75):
                end(code or 0, step, "another rank failed")
        if received:
            if RANK == 0:
                time.sleep(float(WORDS.get("save", "0")))
                (FOLDER / "checkpoints" / f"step-{step:08}").mkdir(exist_ok=True)
            end(75, step, "stopped")
    end(0, step, "done")


main()
