"""SIGKILL of one rank, of all, or of the launcher at random instants: every next start goes on to the same final weights."""

import json
import random
import signal
import time

import pytest
from helpers.calm_runs import calm_run
from helpers.rank_jobs import assert_same_run
from helpers.runs import run_words

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.errors import ExitCode

EVERY = 2
WORDS = (
    "train.steps=60",
    "accumulation.global_batch_size=4",
    "accumulation.micro_batch_size=1",
    "model.dropout.residual=0.1",
    "train.eval_every=7",
    "train.eval_tokens=96",
    f"checkpoint.every={EVERY}",
    "launch.timeout_seconds=20",
)
TARGETS = ("rank0", "rank1", "both", "launcher")
ORPHAN_SECONDS = 30.0
"""Until ranks whose launcher was killed have saved and ended."""


@pytest.fixture(scope="module")
def calm(ranks, text, runs):
    return calm_run(ranks, text, runs, WORDS)


def steps_told(folder):
    """Of the last record that is whole, 0 without any."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def steps_saved(folder):
    return max(CheckpointStore(folder / "checkpoints", keep=2).steps(), default=0)


def start_and_kill(ranks, words, target, delay):
    """(the end of the job, seconds from the kill to the end), target None = undisturbed."""
    job = ranks.start_launch(words, 2, settle=ORPHAN_SECONDS)
    try:
        killed_at = None
        if target is not None:
            time.sleep(delay)
            killed_at = time.monotonic()
            for name in ("rank0", "rank1") if target == "both" else (target,):
                job.signal(name, signal.SIGKILL)
        told = job.launched()
        return told, None if killed_at is None else time.monotonic() - killed_at
    finally:
        ranks.finish(job)


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_b37_killed_at_random_instants_ends_with_the_same_weights(ranks, calm, text, runs, kills):
    folder, whole = calm
    generator = random.Random(kills)
    hit, lost, found, seconds, done = [], [], [], [], 0
    while len(hit) < kills:
        name = f"killed-{kills}-{done}"
        words = run_words(text, runs, name, *WORDS)
        while True:
            target = TARGETS[len(hit) % len(TARGETS)] if len(hit) < kills else None
            told, took = start_and_kill(ranks, words, target, generator.uniform(0.0, whole))
            if told.code == ExitCode.DONE:
                break
            assert target is not None
            assert told.code == (-signal.SIGKILL if target == "launcher" else ExitCode.LOST), told.printed
            hit.append(target)
            seconds.append(took)
            found.append(steps_saved(runs / name))
            lost.append(steps_told(runs / name) - found[-1])
            assert 0 <= lost[-1] <= EVERY
        assert_same_run(runs / name, folder)
        done += 1
    print(f"{len(hit)} kills in {done} runs: {dict((t, hit.count(t)) for t in TARGETS)}; steps lost at most {max(lost)}")
    print(f"from the kill to the end of all processes at most {max(seconds):.2f} s; checkpoints found at {found}")
    assert max(found) > 0, "some kills are to come after a save"


def test_ranks_whose_launcher_is_killed_save_and_end(ranks, calm, text, runs):
    words = run_words(text, runs, "orphans", *WORDS, "train.steps=2000", "checkpoint.every=0", "train.eval_every=0")
    job = ranks.start_launch(words, 2, settle=ORPHAN_SECONDS)
    while steps_told(runs / "orphans") < 3:
        time.sleep(0.02)
    began = time.monotonic()
    job.signal("launcher", signal.SIGKILL)
    told = job.launched()
    assert told.code == -signal.SIGKILL
    ranks.finish(job)
    assert time.monotonic() - began < 15
    assert steps_saved(runs / "orphans") == steps_told(runs / "orphans") >= 3
    status = json.loads((runs / "orphans" / "status.json").read_text())
    assert status["code"] == ExitCode.REQUEUE
