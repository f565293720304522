"""Run a training in forked children, kill each at a random instant, until one survives; a script, so that torch is imported once.

    python kill_runner.py SEED KILLS word word …

The undisturbed run `calm` comes first; a kill comes at a random instant of the time that one took.

Prints one JSON line: kills that hit a living run, starts, and the steps checkpoints were found at.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.compose import compose_config
from llmtrain.metrics.console import PlainConsole
from llmtrain.train.build import train


def start(words: list[str], log: Path) -> int:
    """Fork a child that trains; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("a") as stream:
            console = PlainConsole(stream, 160)
            code = int(train(compose_config(words), console))
            console.close()
    except BaseException as error:  # the child must never return into the parent's loop
        with log.open("a") as stream:
            print(f"{type(error).__name__}: {error}", file=stream, flush=True)
    finally:
        os._exit(code)


def main() -> None:
    seed, kills, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    generator = random.Random(seed)
    config = compose_config(words).config
    folder = Path(config.run.dir) / str(config.run.name)
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    _, status = os.waitpid(start([*words, "run.name=calm"], log), 0)
    assert status == 0, log.read_text()
    whole_run = time.monotonic() - began
    hit, starts, found = 0, 0, []
    while True:
        child = start(words, log)
        starts += 1
        if hit < kills:
            time.sleep(generator.uniform(0.0, whole_run))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            hit += 1
            found.append((CheckpointStore(folder / "checkpoints", keep=2).steps() or [0])[-1])
            continue
        assert os.waitstatus_to_exitcode(status) == 0, log.read_text()
        if hit >= kills:
            break
        # This child was faster than its kill: begin again, so that all kills are made.
        shutil.rmtree(folder)
    print(json.dumps({"kills": hit, "starts": starts, "found": found}))


main()
