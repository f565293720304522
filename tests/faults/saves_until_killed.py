"""Run by test_checkpoint_kill.py as a process of its own: forks children that save slowly, kills each, and looks at what is left.

Arguments: folder, number of kills. Prints one JSON list of `[step before, step after, skipped, left-over folders]`; a broken
promise is a traceback.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from helpers.faulty_files import SlowFiles

from llmtrain.checkpoint.store import CheckpointStore


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"w{index}": torch.randn(1000, generator=generator) for index in range(4)}


def slow_store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, 2, SlowFiles(0.002, 2000))


def seconds_of_a_save(folder: Path) -> float:
    """What one slowed save takes here and now; kills are spread over a little more than one."""
    start = time.monotonic()
    slow_store(folder).save(1, tensors(1), {"step": 1})
    return time.monotonic() - start


def save_for_ever(folder: Path, step: int) -> None:
    store = slow_store(folder)
    while True:
        step += 1
        store.save(step, tensors(step), {"step": step})


def newest(folder: Path) -> tuple[int, tuple[str, ...]]:
    """The step a restart goes on from, every value of it checked."""
    store = CheckpointStore(folder, 2)
    if not store.published():
        return 0, ()
    loaded = store.load()
    assert loaded.state == {"step": loaded.step}
    wanted = tensors(loaded.step)
    assert wanted.keys() == loaded.tensors.keys()
    assert all(torch.equal(wanted[name], loaded.tensors[name]) for name in wanted)
    return loaded.step, loaded.skipped


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    longest = 1.5 * seconds_of_a_save(folder.with_name("trial"))
    history = []
    for _ in range(kills):
        before, _ = newest(folder)
        child = os.fork()
        if child == 0:
            save_for_ever(folder, before)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after, skipped = newest(folder)
        leftovers = [path.name for path in folder.iterdir() if path.name.startswith(".")] if folder.exists() else []
        history.append([before, after, list(skipped), leftovers])
    print(json.dumps(history))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
