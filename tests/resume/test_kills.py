"""SIGKILL at random instants: whatever the run was doing, the next start goes on to the same final weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import assert_same_training, run_words, write_text

WORDS = (
    "train.steps=60",
    "accumulation.global_batch_size=4",
    "accumulation.micro_batch_size=2",
    "model.dropout.residual=0.1",
    "checkpoint.every=2",
    "train.eval_every=7",
    "train.eval_tokens=48",
)
RUNNER = Path(__file__).parents[1] / "helpers" / "kill_runner.py"


def killed(words, *, seed, kills):
    command = [sys.executable, str(RUNNER), str(seed), str(kills), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_b37_killed_at_random_instants_ends_with_the_same_weights(tmp_path, kills):
    text = write_text(tmp_path / "text")
    told = killed(run_words(text, tmp_path, "killed", *WORDS), seed=kills, kills=kills)
    print(told)
    assert told["kills"] == kills
    assert max(told["found"]) > 0, "some kills are to come after a save"
    assert_same_training(tmp_path / "killed", tmp_path / "calm")
