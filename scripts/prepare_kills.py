"""Kills `llmtrain prepare` again and again and compares what comes out with a preparation nobody disturbed.

    python scripts/prepare_kills.py [--kills 10] data=jsonl data.path=FILE tokenizer=… [more overrides]

The whole process group gets SIGKILL at random instants; each start goes on with the shards of those before. Prints how many kills it
took and whether the two folders are equal to the byte; exit 1 where they are not. `prepare.shard_bytes` should be a small part of the
text, so that something is kept between kills.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_SECONDS = 1.0
"""Before this long Python is only starting."""


def command(folder: Path, words: list[str]) -> list[str]:
    return [sys.executable, "-m", "llmtrain", "prepare", *words, f"prepare.path={folder}"]


def killed(words: list[str], folder: Path, seconds: float) -> bool:
    """Whether a preparation was still at work after `seconds` and has been killed."""
    process = subprocess.Popen(
        command(folder, words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def tree(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> int:
    parser = argparse.ArgumentParser(description="llmtrain prepare under SIGKILL")
    parser.add_argument("--kills", type=int, default=10, help="kills before it is let through")
    parser.add_argument("words", nargs="+", help="overrides of the config")
    arguments = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        whole, disturbed = Path(place, "whole"), Path(place, "disturbed")
        began = time.perf_counter()
        subprocess.run(command(whole, arguments.words), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        work = max(0.0, time.perf_counter() - began - START_SECONDS) / (2 * arguments.kills)
        kills = sum(
            killed(arguments.words, disturbed, START_SECONDS + 2 * work * draw.random()) for _ in range(arguments.kills)
        )
        subprocess.run(command(disturbed, arguments.words), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        expected, found = tree(whole), tree(disturbed)
    print(f"{kills} kills, {len(expected)} files, {'equal to the byte' if expected == found else 'DIFFERENT'}")
    return 0 if expected == found else 1


if __name__ == "__main__":
    sys.exit(main())
