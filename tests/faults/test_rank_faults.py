"""One rank raises, hangs, is stopped or is killed: the whole job ends soon, says which rank it was and where, and can go on."""

import itertools
import json

import pytest
from helpers.calm_runs import calm_run
from helpers.rank_faults import Fault, Slow, SlowDigests, SlowDisk
from helpers.rank_jobs import assert_same_run
from helpers.runs import run_words

from llmtrain.config.errors import ExitCode

TIMEOUT_SECONDS = 2
SLACK_SECONDS = 15
"""For the start of the ranks and the end of the others, on a machine that does other things as well."""
WORDS = (
    "train.steps=5",
    "accumulation.global_batch_size=4",
    "accumulation.micro_batch_size=1",
    "model.dropout.residual=0.1",
    "train.eval_every=1",
    "train.eval_tokens=96",
    "checkpoint.every=1",
    f"launch.timeout_seconds={TIMEOUT_SECONDS}",
)
PLACES = ("start-up", "batch", "forward", "backward", "evaluate", "save")
PHASES = {"start-up": "data"}
"""What llmtrain calls a place, where it has another word for it."""
QUICK = [
    ("raise", 1, "start-up"),
    ("raise", 1, "batch"),
    ("raise", 1, "backward"),
    ("raise", 0, "save"),
    ("hang", 1, "forward"),
    ("hang", 0, "evaluate"),
    ("hang", 1, "save"),
    ("stop", 1, "backward"),
    ("stop", 0, "batch"),
    ("kill", 1, "start-up"),
    ("kill", 1, "forward"),
    ("kill", 0, "save"),
]
OTHERS = [drill for drill in itertools.product(("raise", "hang", "stop", "kill"), (0, 1), PLACES) if drill not in QUICK]
DRILLS = [*QUICK, *(pytest.param(*drill, marks=pytest.mark.slow) for drill in OTHERS)]


@pytest.fixture(scope="module")
def calm(ranks, text, runs):
    return calm_run(ranks, text, runs, WORDS)[0]


@pytest.fixture(scope="module")
def board():
    """Right rank and phase by drill, and seconds; printed at the end."""
    rows = {}
    yield rows
    right = sum(row[0] for row in rows.values())
    print(f"\n{right} of {len(rows)} drills named the right rank, phase and step")
    for (kind, rank, place), (is_right, seconds, code) in rows.items():
        print(f"  {kind:<6} rank {rank} {place:<9} {'right' if is_right else 'WRONG'} after {seconds:5.2f} s, exit code {code}")


@pytest.mark.parametrize("kind, rank, place", DRILLS)
def test_b54_fault_of_one_rank_ends_the_job_and_is_told(ranks, calm, text, runs, board, kind, rank, place):
    name = f"{kind}-{rank}-{place}"
    words = run_words(text, runs, name, *WORDS)
    told = ranks.launch(words, 2, plants=[Fault(rank, place, kind, step=0 if place == "start-up" else 3)])
    board[kind, rank, place] = (False, told.seconds, told.code)
    assert told.code == (ExitCode.FAULT if kind == "raise" else ExitCode.LOST), told.printed
    assert told.seconds < SLACK_SECONDS + (TIMEOUT_SECONDS if kind in ("hang", "stop") else 0)
    screen = told.printed
    phase = PHASES.get(place, place)
    assert f"rank {rank} of 2" in screen and f"in phase {phase}" in screen, screen
    if place != "start-up":
        assert f"in phase {phase} of step 3" in screen, screen
        status = json.loads((runs / name / "status.json").read_text())
        assert status["code"] == told.code
        assert f"run.name={name}" in screen.rpartition("go on  ")[2], "the command that goes on is shown"
    if kind == "raise":
        assert f"planted on rank {rank}" in screen and "in planted" in screen, "the traceback is shown"
    if kind == "hang":
        assert "in planted" in screen, "the stack of the rank that hangs is shown"
    board[kind, rank, place] = (True, told.seconds, told.code)
    again = ranks.launch(words, 2)
    assert again.code == ExitCode.DONE, again.printed
    assert_same_run(runs / name, calm)


@pytest.mark.parametrize("rank", [0, 2])
def test_b54_killed_rank_of_three_is_named(ranks, text, runs, rank):
    words = run_words(text, runs, f"three-{rank}", *WORDS, "accumulation.global_batch_size=3")
    told = ranks.launch(words, 3, plants=[Fault(rank, "backward", "kill")])
    assert told.code == ExitCode.LOST and f"rank {rank}" in told.printed and "SIGKILL" in told.printed


def test_b54_hang_of_all_ranks_is_ended_too(ranks, text, runs):
    words = run_words(text, runs, "all-hang", *WORDS)
    told = ranks.launch(words, 2, plants=[Fault(0, "forward", "hang"), Fault(1, "forward", "hang")])
    assert told.code == ExitCode.LOST and "in planted" in told.printed


def test_slow_rank_is_no_fault(ranks, text, runs):
    """Longer than the limit in all, but never without progress for so long."""
    words = run_words(text, runs, "slow", *WORDS, "launch.timeout_seconds=1")
    told = ranks.launch(words, 2, plants=[Slow(1, 0.7)])
    assert told.code == ExitCode.DONE, told.printed


def test_long_save_load_and_comparison_are_no_hang(ranks, calm, text, runs):
    """Each takes much longer than the limit, but bytes and tensors come along all the time."""
    words = run_words(text, runs, "long", *WORDS)
    disk = 125_000
    for stop, plants in (
        ("train.stop_after=2", [SlowDisk("write", disk)]),
        ("train.stop_after=3", [SlowDisk("read", disk)]),
        ("train.stop_after=5", [SlowDigests(1, 0.07)]),
    ):
        told = ranks.launch((*words, "checkpoint.every=0", stop), 2, plants=plants)
        assert told.code == ExitCode.DONE, told.printed
        assert told.seconds > 2 * TIMEOUT_SECONDS, "not slow enough to be a test"
    assert_same_run(runs / "long", calm)


@pytest.mark.parametrize("place", ["data", "forward"])
def test_error_with_a_message_is_told_once_without_a_traceback(ranks, text, runs, place):
    """What is wrong on all ranks alike: the message comes from one."""
    words = run_words(text / "missing" if place == "data" else text, runs, f"message-{place}", *WORDS)
    plants = [] if place == "data" else [Fault(1, "forward", "refuse")]
    told = ranks.launch(words, 2, plants=plants)
    assert told.code == (ExitCode.DATA if place == "data" else ExitCode.STORAGE), told.printed
    assert "Traceback" not in told.printed and told.printed.count("error: ") == 1, told.printed
