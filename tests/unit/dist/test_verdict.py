"""One cause from many endings: what counts as one, which is the first, and what is told of a rank that told nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from llmtrain.config.errors import ExitCode
from llmtrain.dist.failure import Failure, failure_file
from llmtrain.dist.position import mapped_position
from llmtrain.dist.verdict import LAUNCHER, RankEnd, output_file, position_file, reach_verdict, read_run, run_file

KILL, ABORT, SEGV, BUS, TERM, INT = (
    -int(number) for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTERM, signal.SIGINT)
)


def ends(*codes: int | None, passed_on: Sequence[int] = (), killed: Sequence[int] = (), at: float = 100.0) -> list[RankEnd]:
    """Ranks that ended one after the other from `at` on."""
    return [RankEnd(rank, 1000 + rank, code, at + rank, tuple(passed_on), rank in killed) for rank, code in enumerate(codes)]


def leave(reports: Path, rank: int, kind: str, code: int, *, time: float = 100.0, reporter: int | None = None) -> Failure:
    reporter = rank if reporter is None else reporter
    text = f"{kind} of rank {rank}"
    failure = Failure(rank, "host", 1, "forward", 4, 0, kind, code, text, reporter)  # type: ignore[arg-type]
    file = failure_file(reports, reporter)
    file.write_text(json.dumps(failure.to_dict()))
    os.utime(file, (time, time))
    return failure


Told = tuple[str, int]
CASES: Mapping[str, tuple[list[RankEnd], Mapping[int, Told], int, int]] = {
    # what ended how, records by rank, rank of the cause, exit code
    "an error of its own": (ends(2, 2), {0: ("error", 2)}, 0, 2),
    "the others follow with its code": (ends(74, 74, 74), {1: ("error", 74)}, 1, 74),
    "a crash, and a library of another rank aborts": (ends(ABORT, 70), {1: ("crash", 70)}, 1, 70),
    "an abort alone": (ends(71, ABORT), {}, 1, 71),
    "a signal, and another rank takes it for its own fault": (ends(70, KILL), {0: ("crash", 70)}, 1, 71),
    "a fault in native code": (ends(71, SEGV), {}, 1, 71),
    "a fault in native code, and another rank takes it for its own": (ends(70, SEGV), {0: ("crash", 70)}, 1, 71),
    "a fault in native code after a message": (ends(SEGV, 78, at=104.0), {1: ("error", 78)}, 1, 78),
    "a fault in native code soon after a message": (ends(SEGV, 78, at=100.5), {1: ("error", 78)}, 1, 78),
    "a fault in native code as a failed rank ends": (ends(71, SEGV), {1: ("crash", 70)}, 1, 70),
    "a bus error long after a crash": (ends(BUS, 70, at=103.0), {1: ("crash", 70)}, 1, 70),
    "killed long after an error": (ends(KILL, 74, at=103.0), {1: ("error", 74)}, 1, 74),
    "killed soon after an error": (ends(KILL, 74, at=101.0), {1: ("error", 74)}, 0, 71),
    "a fault in native code before an error": (ends(SEGV, 74, at=99.0), {1: ("error", 74)}, 0, 71),
    "a rank without a word beats what is said of it": (ends(71, 1), {}, 1, 70),
    "survivors that had to be killed": (ends(KILL, 65, KILL, killed=(0, 2)), {1: ("error", 65)}, 1, 65),
    "nobody said anything": (ends(71, 71), {}, 0, 71),
    "a rank that not even SIGKILL has ended": (ends(None, 77), {1: ("error", 77)}, 1, 77),
    "a foreign code": (ends(0, 17), {}, 1, 70),
    "a stop of one rank and an error while another saves": (ends(75, 74, passed_on=(15,)), {1: ("error", 74)}, 1, 74),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named(tmp_path: Path, name: str) -> None:
    ended, records, rank, code = CASES[name]
    for reporter, (kind, told) in records.items():
        leave(tmp_path, reporter, kind, told)
    verdict = reach_verdict(ended, tmp_path)
    assert verdict.failure is not None and (verdict.failure.rank, verdict.code) == (rank, code) and verdict.message == ""
    if rank in records:
        assert verdict.failure.text == f"{records[rank][0]} of rank {rank}"


def test_a_hang_is_told_by_the_rank_that_judged_it(tmp_path: Path) -> None:
    leave(tmp_path, 1, "hang", 71, reporter=0)
    verdict = reach_verdict(ends(71, 71), tmp_path)
    assert verdict.failure is not None and (verdict.failure.rank, verdict.failure.kind) == (1, "hang")


def test_a_lost_rank_that_stands_is_named_by_the_one_that_lost_it(tmp_path: Path) -> None:
    leave(tmp_path, 1, "lost", 71, reporter=0)
    verdict = reach_verdict(ends(71, KILL, killed=(1,)), tmp_path)
    assert verdict.failure is not None and (verdict.failure.rank, verdict.failure.reporter) == (1, 0)


def test_what_the_launcher_saw_beats_that_another_rank_has_lost_it(tmp_path: Path) -> None:
    leave(tmp_path, 1, "lost", 71, reporter=0, time=1.0)
    verdict = reach_verdict(ends(71, KILL), tmp_path)
    assert verdict.failure is not None and verdict.failure.reporter == LAUNCHER and verdict.failure.signal == 9


def test_the_earlier_of_two_errors_counts(tmp_path: Path) -> None:
    leave(tmp_path, 0, "error", 74, time=101.0)
    leave(tmp_path, 1, "error", 65, time=100.5)
    assert reach_verdict(ends(74, 65), tmp_path).code is ExitCode.DATA


@pytest.mark.parametrize(
    "ended, code, message",
    [
        (ends(0, 0), ExitCode.DONE, ""),
        (ends(75, 0), ExitCode.REQUEUE, ""),
        (ends(130, 75, passed_on=(2, 2)), ExitCode.INTERRUPTED, "interrupted"),
        (ends(130, 71, passed_on=(2, 2)), ExitCode.INTERRUPTED, "interrupted"),
        (ends(INT, KILL, passed_on=(2,), killed=(1,)), ExitCode.INTERRUPTED, "interrupted"),
        (ends(75, TERM, passed_on=(15,)), ExitCode.REQUEUE, "stopped by SIGTERM"),
        (ends(71, TERM, passed_on=(15,)), ExitCode.REQUEUE, "stopped by SIGTERM"),
        (ends(141, 0), ExitCode.READER_GONE, ""),
        (ends(141, KILL, killed=(1,)), ExitCode.READER_GONE, ""),
        (ends(141, 71), ExitCode.READER_GONE, ""),
    ],
)
def test_what_the_user_asked_for_is_no_failure(tmp_path: Path, ended: list[RankEnd], code: ExitCode, message: str) -> None:
    verdict = reach_verdict(ended, tmp_path)
    assert (verdict.code, verdict.failure, verdict.message) == (code, None, message)


def test_that_a_stopped_rank_is_missed_is_no_failure(tmp_path: Path) -> None:
    leave(tmp_path, 1, "lost", 71, reporter=0)
    assert reach_verdict(ends(71, TERM, passed_on=(15,)), tmp_path).failure is None
    # Nobody here has sent it: somebody has killed the rank.
    assert reach_verdict(ends(71, TERM), tmp_path).code is ExitCode.LOST


def test_a_stop_before_there_was_anything_to_save_is_told_in_its_words(tmp_path: Path) -> None:
    leave(tmp_path, 1, "error", 75)
    verdict = reach_verdict(ends(75, 75), tmp_path)
    assert (verdict.code, verdict.failure, verdict.message) == (ExitCode.REQUEUE, None, "error of rank 1")


def test_a_stop_told_before_explains_no_signal(tmp_path: Path) -> None:
    leave(tmp_path, 1, "error", 75, time=100.0)
    leave(tmp_path, 2, "crash", 70, time=103.1)
    failure = reach_verdict(ends(SEGV, 75, 70, at=103.0), tmp_path).failure
    assert failure is not None and failure.signal == signal.SIGSEGV


def test_an_error_before_the_interruption_counts(tmp_path: Path) -> None:
    leave(tmp_path, 1, "error", 74, time=50.0)
    assert reach_verdict(ends(130, 74, passed_on=(2, 2)), tmp_path).code is ExitCode.STORAGE
    leave(tmp_path, 1, "crash", 70, time=150.0)
    assert reach_verdict(ends(130, 70, passed_on=(2, 2)), tmp_path).code is ExitCode.INTERRUPTED


def test_a_rank_without_a_word_is_told_with_its_place_and_its_last_lines(tmp_path: Path) -> None:
    reports, run = tmp_path / "reports", tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    reports.mkdir()
    position = mapped_position(position_file(reports, 1))
    position.at_step(7)
    position.at_microbatch(2)
    position.enter("backward")
    output_file(reports, 1).write_text("".join(f"early {n}\n" for n in range(15)))
    log = "=== rank 1 of 2\nan earlier start\n=== rank 1 of 2: llmtrain\n" + "".join(
        f"2026-11-29T23:12:52.{n:03}Z  step {n}\nlate {n}\n" for n in range(10)
    )
    (run / "logs" / "rank1.log").write_text(log)
    run_file(reports).write_text(json.dumps({"folder": str(run), "resume": "llmtrain run.name=run"}))
    failure = reach_verdict(ends(71, KILL), reports).failure
    assert failure is not None and (failure.phase, failure.step, failure.microbatch) == ("backward", 7, 2)
    assert failure.text.splitlines()[1:] == [f"early {n}" for n in range(5, 15)] + [f"late {n}" for n in range(10)]
    place = read_run(reports)
    assert place is not None and place.log(1) == run / "logs" / "rank1.log" and place.resume == "llmtrain run.name=run"


def test_rank_0_has_printed_where_the_user_looks(tmp_path: Path) -> None:
    output_file(tmp_path, 0).write_text("on the screen already\n")
    failure = reach_verdict(ends(1, 71), tmp_path).failure
    assert failure is not None and failure.text == "ended with exit code 1 and left no word"


@pytest.mark.parametrize("content", [b"", b'{"rank": 1', b"[]", b'{"rank": 1}', b'{"kind": "shrug"}'])
def test_a_torn_record_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    failure_file(tmp_path, 1).write_bytes(content)
    failure = reach_verdict(ends(71, KILL), tmp_path).failure
    assert failure is not None and failure.signal == 9


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"resume": "x"}'])
def test_a_run_that_is_not_told_of(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        run_file(tmp_path).write_bytes(content)
    assert read_run(tmp_path) is None
