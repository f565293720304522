"""How a failure is shown: once, with all that helps, and in lines that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.dist.failure import Failure
from llmtrain.dist.failure_screen import failure_screen

CRASH = Failure(1, "node", 77, "backward", 7, 2, "crash", 70, "Traceback …\nRuntimeError: shapes", 1)


def _failure(rank: int = 1, **others: Any) -> Failure:
    return Failure.from_dict(CRASH.to_dict() | {"rank": rank, "reporter": rank} | others)


def _screen(failure: Failure, **others: Any) -> str:
    values = {"num_ranks": 2, "seconds": 12.3, "log": None, "resume": None} | others
    return failure_screen(failure, **values)


def test_the_screen_of_a_crash_has_all_of_it() -> None:
    assert _screen(CRASH, log=Path("runs/x/logs/rank1.log"), resume="llmtrain run.name=x") == (
        "rank 1 of 2 (host node, pid 77) raised an exception in phase backward of step 7, micro-batch 2, 12 s after the start\n"
        "\n"
        "Traceback …\nRuntimeError: shapes\n"
        "\n"
        "this is a fault of llmtrain, not of your config: please report the lines above\n"
        "\n"
        "log    runs/x/logs/rank1.log\n"
        "go on  llmtrain run.name=x"
    )


def test_only_a_crash_of_ours_is_a_fault_of_ours() -> None:
    assert "a fault of llmtrain" not in _screen(_failure(1, code=71)) + _screen(
        _failure(1, kind="error", text="error: no text")
    )


def test_the_first_line_says_what_happened_where() -> None:
    for others, words in [
        ({"kind": "error", "phase": "data", "step": 0}, "failed in phase data, before step 1, 12 s after the start"),
        ({"kind": "lost", "phase": "optimizer"}, "vanished in phase optimizer of step 7, 12 s after"),
        ({"kind": "lost", "signal": 9}, "was killed by SIGKILL in phase backward of step 7, micro-batch 2,"),
        ({"kind": "lost", "signal": 999}, "was killed by signal 999 in"),
        ({"kind": "hang", "phase": "save"}, "stands still in phase save of step 7,"),
        ({"kind": "error", "code": 75, "phase": "data", "step": 0}, "was stopped in phase data, before step 1,"),
    ]:
        assert words in _screen(_failure(1, **others)).splitlines()[0]


@pytest.mark.parametrize(("seconds", "words"), [(119.4, "119 s"), (125.0, "2 min 5 s"), (7384.0, "2 h 3 min")])
def test_the_age_of_the_run(seconds: float, words: str) -> None:
    assert f", {words} after the start" in _screen(_failure(1, phase="save"), seconds=seconds)


def test_sigkill_comes_with_a_hint_and_our_own_words_fit() -> None:
    screen = _screen(_failure(1, kind="lost", signal=9, text="", host="node-" + "x" * 60))
    assert "When memory is short the kernel kills" in screen
    assert max(map(len, screen.splitlines())) <= 120
    assert "\xa0" not in screen
    assert "hint" not in _screen(CRASH)


def _stack(*names: str) -> str:
    return "\n".join(f'  File "/x/{name}.py", line 1, in {name}\n    {name}()' for name in names)


def test_of_a_hang_the_rank_behind_comes_whole_and_the_others_short_and_together() -> None:
    waiting, working = _stack("main", "train", "step", "sum", "all_reduce"), _stack("main", "train", "read")
    stacks = {0: waiting, 1: waiting, 2: _stack("main", "train", "load", "parse", "sleep"), 3: waiting, 4: working}
    screen = _screen(_failure(2, kind="hang", reporter=0, text="nothing moved", stacks=stacks))
    _, _, own, others, last = screen.split("\n\n")
    assert own == "stack of rank 2\n" + stacks[2]
    assert others == "ranks 0-1, 3, innermost calls\n" + _stack("step", "sum", "all_reduce")
    assert last == "rank 4, innermost calls\n" + working


def test_a_refusal_is_its_message_and_no_more() -> None:
    """Any rank of the host would have said it, and the same command would be refused again."""
    refused = _failure(1, kind="error", code=2, phase="plan", step=0, text="error: a\n  rule  b")
    assert _screen(refused, resume="llmtrain run.name=x") == "error: a\n  rule  b"
    elsewhere = _screen(refused, resume="llmtrain run.name=x", num_hosts=2)
    assert elsewhere.startswith("rank 1 of 2 (host node") and "go on" not in elsewhere


@pytest.mark.parametrize(("code", "goes_on"), [(2, False), (65, False), (77, False), (71, True), (74, True), (78, True)])
def test_only_what_a_restart_may_mend_says_how_to_go_on(code: int, goes_on: bool) -> None:
    assert ("go on  again" in _screen(_failure(1, kind="error", code=code), resume="again")) == goes_on


def test_a_rank_that_vanished_has_the_hint_of_a_killed_one() -> None:
    assert "dmesg" in _screen(_failure(1, kind="lost")) and "dmesg" not in _screen(CRASH)
