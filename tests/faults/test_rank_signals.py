"""Stop signals to one rank, to all, to the launcher, in any phase: all ranks save the same step, and nothing is lost."""

import json
import random
import re
import signal
import time

import pytest
from helpers.calm_runs import calm_run
from helpers.rank_faults import Fault, SignalAt, Slow
from helpers.rank_jobs import assert_same_run
from helpers.runs import records, run_words, saved

from llmtrain.config.errors import ExitCode

STEPS = 12
WORDS = (
    f"train.steps={STEPS}",
    "accumulation.global_batch_size=4",
    "accumulation.micro_batch_size=1",
    "model.dropout.residual=0.1",
    "train.eval_every=1",
    "train.eval_tokens=96",
    "checkpoint.every=2",
    "launch.timeout_seconds=20",
)
LONG = ("train.steps=60", "train.eval_every=5")
"""Longer than the start takes, so that random moments fall into the training."""
INT, TERM, USR1, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
AT = [
    (TERM, "rank", 0, "forward"),
    (TERM, "rank", 1, "backward"),
    (USR1, "rank", 1, "evaluate"),
    (USR1, "rank", 0, "save"),
    (INT, "rank", 1, "batch"),
    (INT, "rank", 0, "evaluate"),
    (HUP, "rank", 1, "forward"),
    (TERM, "ranks", 0, "evaluate"),
    (USR1, "ranks", 1, "save"),
    (INT, "ranks", 1, "backward"),
    (TERM, "launcher", 1, "evaluate"),
    (USR1, "launcher", 0, "forward"),
    (INT, "launcher", 0, "save"),
    (HUP, "launcher", 1, "batch"),
    (TERM, "all", 1, "backward"),
    (USR1, "all", 0, "evaluate"),
]


@pytest.fixture(scope="module")
def calm(ranks, text, runs):
    return calm_run(ranks, text, runs, WORDS)


def assert_stopped(folder, told):
    """Saved where it stood: no update is lost, and the status says what happened."""
    status = json.loads((folder / "status.json").read_text())
    assert told.code == status["code"] == ExitCode.REQUEUE, told.printed
    step = status["step"]
    assert [record["step"] for record in records(folder)] == list(range(1, step + 1))
    if step:
        assert saved(folder).step == step
    return step


def left_by_starts(folder):
    """When the status was written, and the records that are there."""
    status, metrics = folder / "status.json", folder / "metrics.jsonl"
    return status.stat().st_mtime_ns if status.exists() else None, records(folder) if metrics.exists() else []


def assert_right_end(folder, told, before):
    """How a start ended is kept, once it has begun to write; one that has made no update changes no record. Gives the step, or None."""
    after = left_by_starts(folder)
    if after[0] != before[0]:
        status = json.loads((folder / "status.json").read_text())
        assert status["code"] == told.code, told.printed
        if re.fullmatch(r"stopped by SIG\w+", status["reason"]):
            return assert_stopped(folder, told)
    assert after[1] == before[1], told.printed
    return None


@pytest.mark.parametrize("number, target, rank, place", AT)
def test_b55_stop_signal_in_any_phase(ranks, calm, text, runs, number, target, rank, place):
    name = f"{signal.Signals(number).name}-{target}-{rank}-{place}"
    words = run_words(text, runs, name, *WORDS)
    # An update that takes as long as the looks of the launcher and of the watch are apart: soon is then a number of updates.
    told = ranks.launch(words, 2, plants=[Slow(0, 0.3), SignalAt(rank, place, number, target)])
    step = assert_stopped(runs / name, told)
    assert 2 <= step <= 5, "soon after update 3"
    assert signal.Signals(number).name in told.printed
    again = ranks.launch(words, 2)
    assert again.code == ExitCode.DONE and f"going on from step {step}" in again.printed
    assert_same_run(runs / name, calm[0])


@pytest.mark.parametrize("number", [TERM, USR1, INT])
@pytest.mark.parametrize("target, rank", [("rank", 0), ("rank", 1), ("launcher", 0), ("all", 1)])
@pytest.mark.parametrize("place", ["begin", "start-up"])
def test_stop_signal_before_the_training(ranks, calm, text, runs, number, target, rank, place):
    """At the first line of a rank, and while data is prepared: there is nothing to save, and nobody is called lost."""
    name = f"{place}-{signal.Signals(number).name}-{target}-{rank}"
    words = run_words(text, runs, name, *WORDS)
    told = ranks.launch(words, 2, plants=[SignalAt(rank, place, number, target, step=0)])
    assert told.code == (ExitCode.INTERRUPTED if number == INT else ExitCode.REQUEUE), told.printed
    assert "Traceback" not in told.printed and "killed by" not in told.printed, told.printed
    assert ranks.launch(words, 2).code == ExitCode.DONE
    assert_same_run(runs / name, calm[0])


def test_second_ctrl_c_ends_all_ranks_at_once(ranks, calm, text, runs):
    words = run_words(text, runs, "twice", *WORDS)
    job = ranks.start_launch(words, 2, plants=[Slow(0, 1.0), Slow(1, 1.0), SignalAt(0, "forward", INT, "launcher", step=2)])
    status = runs / "twice" / "metrics.jsonl"
    deadline = time.monotonic() + 30
    while not (status.exists() and status.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1.2)
    job.signal("launcher", INT)
    told = job.launched()
    ranks.finish(job)
    assert told.code in (ExitCode.INTERRUPTED, ExitCode.REQUEUE), told.printed
    assert ranks.launch(words, 2).code == ExitCode.DONE
    assert_same_run(runs / "twice", calm[0])


def test_last_evaluation_that_is_cut_short_is_made_up_for(ranks, calm, text, runs):
    """All updates are made and saved, one evaluation is missing."""
    words = run_words(text, runs, "cut-last", *WORDS)
    told = ranks.launch(words, 2, plants=[SignalAt(1, "evaluate", TERM, "rank", step=STEPS)])
    assert assert_stopped(runs / "cut-last", told) == STEPS
    assert ranks.launch(words, 2).code == ExitCode.DONE
    assert_same_run(runs / "cut-last", calm[0])
    assert "is finished" in ranks.launch(words, 2).printed


@pytest.mark.parametrize("second", [SignalAt(1, "evaluate", TERM, "rank", step=0), Fault(0, "evaluate", "kill", step=0)])
def test_evaluation_that_is_cut_short_twice_loses_no_record(ranks, calm, text, runs, second):
    """The first stop leaves an update without its evaluation; making up for it ends early, too."""
    name = f"cut-{type(second).__name__}"
    words = run_words(text, runs, name, *WORDS)
    step = assert_stopped(runs / name, ranks.launch(words, 2, plants=[SignalAt(0, "evaluate", TERM, "rank")]))
    assert "val_loss" not in records(runs / name)[-1], "the evaluation was to be cut short"
    told = ranks.launch(words, 2, plants=[second])
    assert told.code in (ExitCode.REQUEUE, ExitCode.LOST), told.printed
    assert [record["step"] for record in records(runs / name)] == list(range(1, step + 1))
    assert ranks.launch(words, 2).code == ExitCode.DONE
    assert_same_run(runs / name, calm[0])


@pytest.mark.parametrize("moments", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_b55_stop_signals_at_random_moments(ranks, calm, text, runs, moments):
    """Every stop is followed by a start of the same command, until the run is done; then it begins again."""
    told = ranks.launch(run_words(text, runs, f"calm-{moments}", *WORDS, *LONG), 2)
    assert told.code == ExitCode.DONE, told.printed
    folder, whole = runs / f"calm-{moments}", told.seconds
    generator = random.Random(moments)
    stops, seconds, runs_done = [], [], 0
    while len(stops) < moments:
        name = f"random-{moments}-{runs_done}"
        words = run_words(text, runs, name, *WORDS, *LONG)
        while True:
            before = left_by_starts(runs / name)
            job = ranks.start_launch(words, 2)
            number = generator.choice([TERM, USR1, INT])
            target = generator.choice(["rank0", "rank1", "both", "launcher"])
            if len(stops) < moments:
                time.sleep(generator.uniform(0.0, whole))
                began = time.monotonic()
                hit = [job.signal(one, number) for one in (("rank0", "rank1") if target == "both" else (target,))]
            told = job.launched()
            ranks.finish(job)
            if told.code == ExitCode.DONE:
                break
            # Like any program the launcher is ended by a signal that comes before it has begun to listen.
            is_early = target == "launcher" and told.code == -number
            is_interrupted = told.code == ExitCode.INTERRUPTED and number == INT
            assert told.code == ExitCode.REQUEUE or is_early or is_interrupted, told.printed
            assert any(hit)
            seconds.append(time.monotonic() - began)
            stops.append((signal.Signals(number).name, target, told.code, assert_right_end(runs / name, told, before)))
        assert_same_run(runs / name, folder)
        runs_done += 1
    early = sum(step is None for *_, step in stops)
    print(f"{len(stops)} stops in {runs_done} runs, {early} of them before the training; from the signal to the end at most")
    print(f"{max(seconds):.2f} s: {stops}")
