"""What it costs to share the work of an update: the same global batch on one rank and on several, each rank with one thread.

    python scripts/rank_overhead.py [--ranks 2] [--repeats 5] [--updates 30] [words of a config]

With perfect scaling n ranks need 1/n of the time; every core has to be free for that. Runs alternate, each in processes of its own.
Printed for each repeat: seconds of an update on one rank and on n, how much of the ideal speed-up is reached, and the exposed
communication of an update (time that nothing was computed because gradients, losses or counts of other ranks were waited for).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

WARM_UP = 10
"""First updates of a run that are not counted."""


def update_seconds(folder: Path, ranks: int, updates: int, words: Sequence[str]) -> tuple[float, float]:
    """Median seconds of an update, and of its exposed communication."""
    command = [
        *(sys.executable, "-m", "llmtrain", f"launch.nproc={ranks}", "launch.threads=1", f"run.dir={folder}", "run.name=run"),
        *(f"train.steps={WARM_UP + updates}", "train.eval_every=0", "checkpoint.every=0", *words),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][WARM_UP:]
    exposed = [record.get("exposed_comm_seconds", 0.0) for record in records]
    return statistics.median(record["step_seconds"] for record in records), statistics.median(exposed)


def _in_new_folder(ranks: int, updates: int, words: Sequence[str]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        return update_seconds(Path(folder), ranks, updates, words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--updates", type=int, default=30)
    options, words = parser.parse_known_args()
    print(f"1 rank ms   {options.ranks} ranks ms   of ideal   exposed ms")
    shares = []
    for _ in range(options.repeats):
        one, _ = _in_new_folder(1, options.updates, words)
        several, exposed = _in_new_folder(options.ranks, options.updates, words)
        shares.append(one / several / options.ranks)
        print(f"{1e3 * one:9.1f}   {1e3 * several:10.1f}   {shares[-1]:8.1%}   {1e3 * exposed:10.1f}", flush=True)
    print(f"median {statistics.median(shares):.1%} of ideal, lowest {min(shares):.1%}, highest {max(shares):.1%}")


if __name__ == "__main__":
    main()
