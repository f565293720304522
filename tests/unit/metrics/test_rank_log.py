"""The log of a rank: what it holds, that starts add to it, and that nothing that befalls it ends a training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from llmtrain.metrics.console import PlainConsole, Row, Tone
from llmtrain.metrics.meters import StepRecord
from llmtrain.metrics.rank_log import MOST_HELD_LINES, STATUS_SECONDS, LogConsole, LoggedConsole, RankLog
from llmtrain.train.startup import StartupClock, seconds_since_start

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z(?:  (.*))?")
NOON = datetime(2026, 1, 2, 12, 0, 0, 345678, tzinfo=UTC)


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def said(path: Path) -> list[str]:
    """The lines of a log without their times, each of which must be there; headers left out."""
    found = [STAMP.fullmatch(line) for line in path.read_text().splitlines()]
    assert all(found), path.read_text()
    return [match[1] or "" for match in found if match and not (match[1] or "").startswith("=== ")]


def record(step: int, **changes: float) -> StepRecord:
    values = dict(
        step=step, tokens=64 * step, loss=2.5, lr=1e-3, grad_norm=0.5, step_seconds=0.1, tokens_per_second=640.0, mfu=0.1
    )
    return StepRecord(**(values | changes))


def test_each_start_adds_a_header_and_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run" / "logs" / "rank3.log"
    for words in (["llmtrain", "data.path=my texts"], []):
        log = RankLog(path, rank=3, size=4, words=words, now=lambda: NOON)
        log.write("hello")
        log.close()
    first, hello, second, again = path.read_text().splitlines()
    assert first == (
        f"2026-01-02T12:00:00.345Z  === rank 3 of 4 on {os.uname().nodename}, process {os.getpid()}: llmtrain 'data.path=my texts'"
    )
    assert second == first.partition(": llmtrain")[0]
    assert hello == again == "2026-01-02T12:00:00.345Z  hello"


def test_what_is_said_before_there_is_a_folder_is_kept_with_its_time(tmp_path: Path) -> None:
    times = iter([NOON, NOON, NOON.replace(hour=13)])
    log = RankLog(now=lambda: next(times))
    log.write("early")
    log.open(tmp_path / "logs" / "rank0.log")
    log.write("late")
    header, early, late = (tmp_path / "logs" / "rank0.log").read_text().splitlines()
    assert header[:13] == early[:13] == "2026-01-02T12" and late[:13] == "2026-01-02T13"
    assert early.endswith("early") and late.endswith("late") and "=== rank 0 of 1" in header
    held = RankLog()
    for number in range(2 * MOST_HELD_LINES):
        held.write(str(number))
    held.open(tmp_path / "held.log")
    assert len((tmp_path / "held.log").read_text().splitlines()) == MOST_HELD_LINES


def test_every_line_of_a_text_has_a_time_and_no_line_obeys_escapes(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "log")
    log.write("one\n\nthree \x1b[31mred\x1b[0m\udcff")
    one, empty, three = said(tmp_path / "log")
    assert (one, empty) == ("one", "") and three.startswith("three ") and "\x1b" not in three


def test_threads_do_not_cut_each_others_lines(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "log")
    texts = ["a" * 300, "b" * 300, "c" * 300]
    writers = [threading.Thread(target=lambda text=text: [log.write(text) for _ in range(50)]) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(said(tmp_path / "log")) == sorted(texts * 50)


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """A full disk, a file in the place of the folder, a log that was closed."""
    full = RankLog(Path("/dev/full"))
    full.write("nowhere")
    (tmp_path / "logs").write_text("a file")
    RankLog(tmp_path / "logs" / "rank1.log").write("nowhere")
    closed = RankLog(tmp_path / "closed.log")
    closed.close()
    closed.close()
    closed.write("nowhere")
    console = LogConsole(full)
    console.warn("still here")
    console.close()
    assert "nowhere" not in (tmp_path / "closed.log").read_text()


def test_both_get_everything_and_the_document_only_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RankLog(tmp_path / "log")
    console = LoggedConsole(PlainConsole(sys.stdout), log)
    console.status("building the model")
    console.card("llmtrain train · runs/a", [Row("device", "cpu"), Row("resume", "llmtrain run.name=a", is_command=True)])
    console.line("one remark")
    console.warn("be careful")
    console.start_training(first_step=0, total_steps=6, log_every=3, baseline_loss=3.0)
    for step in range(1, 7):
        console.step(record(step, **({"val_loss": 2.25} if step == 4 else {})))
    console.block("done", ["6 of 6 steps"], Tone.GOOD)
    console.document({"code": 0})
    console.next(["llmtrain evaluate runs/a"])
    console.close()
    shown, logged = capsys.readouterr().out.splitlines(), said(tmp_path / "log")
    assert logged[0] == "… building the model"
    assert [line for line in logged[1:] if line] == [line for line in shown if line]
    steps = [re.findall(r"\d+", line)[0] for line in logged if line.startswith("step")]
    assert sorted(set(steps)) == ["1", "3", "4", "6"], logged
    assert "code" not in "\n".join(logged)


def test_the_document_reaches_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from llmtrain.metrics.console import JsonConsole

    console = LoggedConsole(JsonConsole(PlainConsole(sys.stderr), sys.stdout), RankLog(tmp_path / "log"))
    console.line("for people")
    console.document({"code": 75})
    console.close()
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"code": 75} and "for people" in captured.err
    assert said(tmp_path / "log") == ["for people"]


def test_the_log_has_the_last_words_when_the_console_fails(tmp_path: Path) -> None:
    class Broken(PlainConsole):
        def line(self, text: str) -> None:
            raise BrokenPipeError

    console = LoggedConsole(Broken(sys.stdout), RankLog(tmp_path / "log"))
    with pytest.raises(BrokenPipeError):
        console.line("before it broke")
    assert said(tmp_path / "log") == ["before it broke"]


def test_a_status_is_logged_once_and_counting_ones_now_and_then(tmp_path: Path) -> None:
    clock = ManualClock()
    console = LogConsole(RankLog(tmp_path / "log"), clock=clock)
    threads = threading.active_count()
    for _ in range(3):
        console.status("looking at the machine")
    for megabytes in range(100):
        clock.now += STATUS_SECONDS / 40
        console.status(f"tokenizing: {megabytes}.5 of 1,000 MB")
    console.status("")
    console.status("tokenizing: 100 of 1,000 MB")
    assert threading.active_count() == threads
    lines = said(tmp_path / "log")
    assert lines[0] == "… looking at the machine" and lines[1] == "… tokenizing: 0.5 of 1,000 MB"
    assert lines[2:] == ["… tokenizing: 40.5 of 1,000 MB", "… tokenizing: 80.5 of 1,000 MB", "… tokenizing: 100 of 1,000 MB"]


REDIRECTED = """
import contextlib, os, subprocess, sys
from pathlib import Path
from llmtrain.metrics.rank_log import redirect_output
print("before")
screen = redirect_output(Path(sys.argv[1]))
print("from print, ünï")
print("half a line", end="", file=sys.stderr)
sys.stderr.write("\\n")
with contextlib.suppress(OSError):
    os.write(1, b"from C\\n")
subprocess.run(["sh", "-c", "echo from a child >&2"])
print("for the user", file=screen)
if len(sys.argv) > 2:
    sys.stdout.flush()
    os.abort()
"""


def redirected(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", REDIRECTED, str(path), *more], capture_output=True, text=True, timeout=120)


def test_all_output_goes_into_the_log_and_the_screen_stays_within_reach(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank1.log"
    path.parent.mkdir()
    path.write_text("an earlier start\n")
    result = redirected(path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "before\n", "for the user\n")
    assert path.read_text() == "an earlier start\nfrom print, ünï\nhalf a line\nfrom C\nfrom a child\n"


def test_a_crash_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    result = redirected(tmp_path / "rank1.log", "crash")
    assert result.returncode == -6 and "Fatal Python error" not in result.stderr
    assert "Fatal Python error: Aborted" in (tmp_path / "rank1.log").read_text()


def test_print_on_a_full_disk_ends_nothing() -> None:
    result = redirected(Path("/dev/full"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "before\n", "for the user\n")


def test_output_stays_where_it_is_without_a_log(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    result = redirected(tmp_path / "logs" / "rank1.log")
    assert result.returncode == 0
    assert {"before", "from print, ünï", "from C"} == set(result.stdout.splitlines())
    assert "for the user" in result.stderr and "from a child" in result.stderr


def test_start_up_seconds_by_phase() -> None:
    clock = ManualClock()
    startup = StartupClock(before=0.8, clock=clock)
    for phase, seconds in (("torch", 1.4), ("ranks", 0.3), ("data", 0.04), ("ranks", 0.2), ("first update", 0.5)):
        startup.enter(phase)
        clock.now += seconds
    startup.finish()
    clock.now += 100
    assert startup.told() == "start-up 3.2 s: python 0.8 · torch 1.4 · ranks 0.5 · first update 0.5"
    assert startup.seconds["data"] == pytest.approx(0.04) and sum(startup.seconds.values()) == pytest.approx(3.24)
    nothing = StartupClock(clock=clock)
    assert nothing.told() == "start-up 0.0 s"


def test_the_age_of_a_process_is_that_of_the_system() -> None:
    code = (
        "import time; time.sleep(0.5)\nfrom llmtrain.train.startup import seconds_since_start as age\nimport sys\n"
        "first = age(); time.sleep(0.25); print(first, age() - first, 'torch' in sys.modules)"
    )
    first, later, torch_there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    assert 0.5 <= float(first) < 60 and 0.24 <= float(later) < 30 and torch_there == "False"


def test_the_age_of_a_process_is_unknown_elsewhere(tmp_path: Path) -> None:
    assert seconds_since_start(tmp_path) is None
    age = seconds_since_start()
    assert age is not None and age > 0
