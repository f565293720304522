"""The rows of a sweep: read from what its jobs left behind, compared only where that means something."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.cli.sweep_table import JobResult, read_result, table


def test_the_reason_is_that_of_the_status_file(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"format_version": 1, "code": 77, "step": 3, "reason": "not finite"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    result = read_result(tmp_path, tmp_path / "none.log", {}, 77, 1.0)
    assert (result.reason, result.steps, result.val_loss) == ("not finite", 1, None)
    assert read_result(tmp_path / "none", tmp_path / "none.log", {}, 77, 1.0).steps is None


def test_the_reason_of_an_earlier_start_is_not_that_of_this_one(tmp_path: Path) -> None:
    """A job that was finished, or was stopped, and now fails before it has a status to write."""
    log = tmp_path / "0.log"
    log.write_text("error: model.dim=15\n  rule  a multiple of the heads\n")
    for status in (
        {"code": 0, "reason": "all updates made"},
        {"code": 75, "reason": "stopped"},
        {"code": None, "reason": "running"},
    ):
        (tmp_path / "status.json").write_text(json.dumps({"step": 3, **status}))
        assert read_result(tmp_path, log, {}, 2, 1.0).reason == "model.dim=15: a multiple of the heads"
        assert read_result(tmp_path, log, {}, -11, 1.0).reason == "ended by SIGSEGV"


def test_the_reason_of_a_job_that_lost_a_rank_is_the_first_line_of_its_status(tmp_path: Path) -> None:
    reason = "rank 1 (node7, pid 4711) was killed by SIGKILL in phase backward of step 12\nthe log is in ranks/1.log"
    (tmp_path / "status.json").write_text(json.dumps({"code": 71, "step": 10, "reason": reason}))
    (tmp_path / "0.log").write_text(
        'Traceback (most recent call last):\n  File "a.py"\nRuntimeError: Connection reset by peer\n'
    )
    result = read_result(tmp_path, tmp_path / "0.log", {}, 71, 1.0)
    assert result.ended() == f"exit 71: {reason.splitlines()[0]}"


FAULT = """doing
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    first()
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    second()
ValueError: 3 is odd
and more of it
this is a fault of llmtrain 0.1, not of your config: please report the lines above
"""


def test_the_reason_of_a_fault_is_its_exception_and_names_the_log(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text("error: of an earlier start\n" + FAULT)
    assert read_result(tmp_path, log, {}, 70, 1.0).reason == f"ValueError: 3 is odd (see {log})"
    log.write_text(FAULT + "error: of this start\n  rule  no rule\n")
    assert read_result(tmp_path, log, {}, 2, 1.0).reason == "of this start: no rule"


def scored_job(folder: Path, tokenizer: str, val_loss: float, bytes_per_token: float | None) -> JobResult:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 2.0, "val_loss": {val_loss}}}\n')
    (folder / "environment.json").write_text(json.dumps({"bytes_per_token": bytes_per_token} if bytes_per_token else {}))
    return read_result(folder, folder / "log", {"tokenizer": tokenizer}, 0, 1.0)


def test_jobs_of_different_tokenizers_are_compared_by_the_byte(tmp_path: Path) -> None:
    jobs = [scored_job(tmp_path / "a", "byte", 1.5, 1.0), scored_job(tmp_path / "b", "bpe", 4.0, 4.0)]
    header, first, second = table(jobs)
    assert header.split()[:4] == ["tokenizer", "val", "loss", "bits/byte"]
    assert first.split()[:3] == ["bpe", "4.0000", f"{1 / math.log(2):.4f}"]
    assert second.split()[:3] == ["byte", "1.5000", f"{1.5 / math.log(2):.4f}"]
    assert jobs[1].to_dict()["bits_per_byte"] == pytest.approx(1 / math.log(2))
    assert f"val loss 4.0000 = {1 / math.log(2):.4f} bits/byte" in jobs[1].summary()


def test_losses_that_cannot_be_compared_are_said_to_be_so(tmp_path: Path) -> None:
    unknown = [scored_job(tmp_path / name, name, 1.5, None) for name in ("a", "b")]
    assert "cannot be compared" in table(unknown)[-1]
    mixed = [unknown[0], scored_job(tmp_path / "c", "c", 1.5, 2.0)]
    assert "cannot be compared" in table(mixed)[-1]
    assert len(table([replace(job, changed={"optimizer.lr": "1"}) for job in unknown])) == 3


@pytest.mark.parametrize("status", ["", '{"reason": ', "[]", "\0\0\0"])
def test_damaged_files_of_a_job_are_no_end_of_the_sweep(tmp_path: Path, status: str) -> None:
    (tmp_path / "status.json").write_text(status)
    (tmp_path / "log").write_text("killed\n")
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0}\n\0\0\0\n{"ste\n{"step": 3, "loss": 1.0, "val_loss": 4.0}\n'
    )
    result = read_result(tmp_path, tmp_path / "log", {}, -9, 1.0)
    assert (result.reason, result.steps, result.val_loss, result.damaged_records) == ("ended by SIGKILL", 3, 4.0, 2)
    assert "2 damaged lines" in result.summary() and result.to_dict()["damaged_records"] == 2
