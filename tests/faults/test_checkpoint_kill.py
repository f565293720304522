"""SIGKILL at random instants of a save."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from llmtrain.checkpoint.store import CheckpointStore

ROOT = Path(__file__).parents[2]


def test_b37_kill_at_random_moments_of_a_slowed_save(tmp_path):
    folder = tmp_path / "checkpoints"
    script = ROOT / "tests" / "faults" / "saves_until_killed.py"
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    command = [sys.executable, str(script), str(folder), "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    history = json.loads(done.stdout)
    assert len(history) == 20
    # Never back, and nothing that was visible turned out broken.
    assert all(after >= before and skipped == [] for before, after, skipped, _ in history)
    # The kills did hit saves at work, and saves did get through.
    assert any(after == before for before, after, _, _ in history) and history[-1][1] > 0
    assert any(leftovers for *_, leftovers in history)

    # Left-overs do not count for keep-last-k, and the next save removes them.
    store = CheckpointStore(folder, 2)
    store.save(history[-1][1] + 1, {"w": torch.zeros(3)}, {})
    assert len(store.steps()) == 2
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in store.steps()]
