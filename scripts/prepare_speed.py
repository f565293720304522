"""Times `llmtrain prepare` as a user would run it: MB/s, MB/s per core, tokens/s and memory, for several numbers of processes.

    python scripts/prepare_speed.py [--workers 1 2 4] [--repeats 3] data=jsonl data.path=FILE tokenizer=… [more overrides]

Every run prepares into an empty folder that is removed afterwards. Two times are printed: that of the whole command, start of Python
included, and that of tokenizing alone as the command itself tells it. Memory is each process's own highest (VmHWM of Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.02
WORKER = b"llmtrain.data.worker"


@dataclass
class Memory:
    """Highest resident bytes."""

    main: int = 0
    workers: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One preparation."""

    seconds: float
    """Of the whole command."""
    source_bytes: int
    tokens: int
    memory: Memory
    told: str
    """The line the command ended with."""


def main() -> int:
    parser = argparse.ArgumentParser(description="speed and memory of llmtrain prepare")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))], help="numbers of processes"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the fastest counts")
    parser.add_argument("words", nargs="+", help="overrides of the config, e.g. data=jsonl data.path=FILE tokenizer=byte")
    arguments = parser.parse_args()
    print(
        f"{'workers':>7}  {'seconds':>7}  {'MB/s':>6}  {'per process':>11}  {'tokens/s':>10}  {'main MiB':>8}  {'worker MiB':>10}"
    )
    for count in arguments.workers:
        best = min((prepare(arguments.words, count) for _ in range(arguments.repeats)), key=lambda run: run.seconds)
        speed, largest = best.source_bytes / 1e6 / best.seconds, max(best.memory.workers.values(), default=0)
        print(
            f"{count:>7}  {best.seconds:>7.2f}  {speed:>6.2f}  {speed / count:>11.2f}  {best.tokens / best.seconds:>10,.0f}  "
            f"{best.memory.main / 2**20:>8.0f}  {largest / 2**20:>10.0f}"
        )
        print(f"         told by the command: {best.told}")
    return 0


def prepare(words: list[str], workers: int) -> Run:
    """Prepare once, into a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "llmtrain", "prepare", *words, f"prepare.workers={workers}"]
        command += [f"prepare.path={folder}/tokens", "output=json"]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with measured(process.pid) as memory:
            output, told = process.communicate()
        seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(told)
    splits = json.loads(output)["splits"].values()
    line = next((line for line in told.splitlines() if " documents · " in line), "")
    return Run(seconds, sum(s["source_bytes"] for s in splits), sum(s["tokens"] for s in splits), memory, line)


@contextmanager
def measured(pid: int) -> Iterator[Memory]:
    """The memory of a process and its workers while the block runs."""
    memory, done = Memory(), threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            memory.main = max(memory.main, high_water(pid))
            for child in children(pid):
                memory.workers[child] = max(memory.workers.get(child, 0), high_water(child))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()


def children(pid: int) -> list[int]:
    """The workers of a process."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(word) for word in words if WORKER in Path(f"/proc/{word}/cmdline").read_bytes()]
    except OSError:
        return []


def high_water(pid: int) -> int:
    """Highest resident bytes of a process so far; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    sys.exit(main())
