"""What a sweep says while its jobs run: rewritten in place on a terminal, rarer and rarer in a log."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

from llmtrain.cli import sweep_progress
from llmtrain.cli.sweep_progress import JobLine, LiveProgress, PlainProgress, job_lines, make_progress
from llmtrain.metrics.sinks import TAIL_BYTES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(output: str, columns: int = 80) -> list[str]:
    """What a terminal shows of an output that uses carriage return, "up", and "clear to the end" of line or screen."""
    rows, row, column = [""], 0, 0
    for sign in re.findall(r"\x1b\[\d*[A-Z]|\r|\n|[^\x1b\r\n]+", output):
        if sign == "\r":
            column = 0
        elif sign == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif sign.endswith("A"):
            row -= int(sign[2:-1])
            assert row >= 0
        elif sign == "\x1b[K":
            rows[row] = rows[row][:column]
        elif sign == "\x1b[J":
            rows = [*rows[:row], rows[row][:column]]
        else:
            assert sign[0] != "\x1b", sign
            rows[row] = rows[row][:column] + sign + rows[row][column + len(sign) :]
            column += len(sign)
            assert column < columns, "a line that wraps cannot be rewritten"
    return rows


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(sweep_progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def at_step(folder: Path, step: int, loss: str = "2.5") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": {loss}}}\n')
    return folder


def test_a_terminal_has_a_line_for_each_running_job_below_those_that_ended(tmp_path: Path, clock: list[float]) -> None:
    first, second, third = (JobLine(f"{number}/3  optimizer.lr={number}", tmp_path / str(number)) for number in (1, 2, 3))
    screen = Terminal()
    progress = make_progress(screen)
    assert isinstance(progress, LiveProgress)
    progress.update([first, second])
    assert shown(screen.getvalue()) == ["1/3  optimizer.lr=1  preparing · 0 s", "2/3  optimizer.lr=2  preparing · 0 s"]
    at_step(tmp_path / "1", 100)
    at_step(tmp_path / "2", 7)
    clock[0] = 0.6
    progress.update([first, second])
    two = ["1/3  optimizer.lr=1  step 100 · loss 2.5000 · 1 s", "2/3  optimizer.lr=2  step 7 · loss 2.5000 · 1 s"]
    assert shown(screen.getvalue()) == two
    progress.say("1/3  optimizer.lr=1  done")
    progress.update([second, third])
    assert shown(screen.getvalue()) == ["1/3  optimizer.lr=1  done", two[1], "3/3  optimizer.lr=3  preparing · 1 s"]
    progress.say("2/3  optimizer.lr=2  done")
    progress.update([third])
    progress.say("3/3  optimizer.lr=3  done")
    assert shown(screen.getvalue()) == [*(f"{number}/3  optimizer.lr={number}  done" for number in (1, 2, 3)), ""]


def test_a_terminal_is_rewritten_twice_a_second_and_at_once_for_news(tmp_path: Path, clock: list[float]) -> None:
    job, screen = JobLine("1/1", tmp_path), Terminal()
    progress = LiveProgress(screen)
    sizes = []
    for second, note in ((0.0, ""), (0.1, ""), (0.4, ""), (0.6, ""), (0.7, ""), (0.8, "told to stop"), (0.9, "told to stop")):
        clock[0], job.note = second, note
        progress.update([job])
        sizes.append(len(screen.getvalue()))
    assert [after > before for before, after in zip([0, *sizes], sizes, strict=False)] == [
        True,
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert shown(screen.getvalue()) == ["1/1  preparing · 1 s · told to stop"]


def test_more_jobs_than_rows_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "6")
    screen = Terminal()
    progress = LiveProgress(screen)
    for _ in range(2):
        progress.update([JobLine(f"{number}/40  x", tmp_path) for number in range(1, 10)])
    rows = shown(screen.getvalue())
    assert len(rows) == 5 and rows[0].startswith("1/40  x") and rows[-1] == "and 5 more"


def test_where_it_is_narrow_titles_are_cut_and_positions_stay_below_each_other(tmp_path: Path) -> None:
    at_step(tmp_path / "a", 12345)
    long = JobLine("3/12  precision=bf16 optimizer.lr=0.003 model.num_layers=12 model.dim=512", tmp_path / "a")
    short = JobLine("4/12  precision=fp32", tmp_path / "b")
    lines = job_lines([long, short], 79)
    assert all(len(line) <= 79 for line in lines)
    assert re.fullmatch(r"3/12  precision=bf16 optimizer.*…  step 12345 · loss 2.5000 · 0 s", lines[0])
    assert lines[0].index("step") == lines[1].index("preparing")
    assert job_lines([long], 200)[0].startswith(f"{long.title}  step")
    assert len(job_lines([long], 30)[0]) == 30 and job_lines([], 80) == []


def test_a_log_gets_a_line_after_three_seconds_and_then_more_rarely(tmp_path: Path, clock: list[float]) -> None:
    """For each job by itself: the second one starts a minute later."""
    stream = io.StringIO()
    progress = make_progress(stream)
    assert isinstance(progress, PlainProgress)
    at_step(tmp_path / "a", 5, '"NaN"')
    first = JobLine("1/2", tmp_path / "a")
    running, said = [first], {"1/2": [0], "2/2": [0]}
    for second in range(0, 601):
        clock[0] = float(second)
        if second == 60:
            running.append(JobLine("2/2", tmp_path / "b"))
        before = len(stream.getvalue())
        progress.update(running)
        for line in stream.getvalue()[before:].splitlines():
            said[line[:3]].append(second)
    assert said["1/2"][1:5] == [0, 3, 6, 9] and said["2/2"][1:5] == [60, 63, 66, 69]
    assert len(said["1/2"]) < 60 and "\x1b" not in stream.getvalue()
    assert "1/2  started\n1/2  step 5 · loss nan · 3 s\n" in stream.getvalue()


class CountedFile(io.FileIO):
    """Sums what is read from any of them."""

    num_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        CountedFile.num_bytes += len(data or b"")
        return data or b""

    def readall(self) -> bytes:
        data = super().readall()
        CountedFile.num_bytes += len(data or b"")
        return data or b""


def test_progress_reads_the_end_of_a_long_file_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {step}, "loss": 2.5}}\n' for step in range(1, 100_001)))
    monkeypatch.setattr(Path, "open", lambda self, mode: CountedFile(self, mode))
    assert JobLine("1/1", tmp_path).told().startswith("step 100000 · loss 2.5000")
    assert 0 < CountedFile.num_bytes <= TAIL_BYTES < os.path.getsize(file) / 10


def test_metrics_that_cannot_be_read_do_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    assert "cannot read" in JobLine("1/1", tmp_path).told()
