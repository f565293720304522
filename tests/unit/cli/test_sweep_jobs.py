"""Running the jobs of a sweep: order, slots, signals, failures, and what is not run again.

Jobs are played, except where processes are what is tested.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from helpers.played_jobs import PlayedJob, Stage

from llmtrain.cli import sweep_jobs
from llmtrain.cli.arguments import parse_arguments
from llmtrain.cli.sweep_jobs import Process, run_jobs, start_process
from llmtrain.cli.sweep_layout import Sweep, lay_out
from llmtrain.cli.sweep_progress import PlainProgress
from llmtrain.cli.sweep_share import WholeMachine
from llmtrain.cli.sweep_table import JobResult, table
from llmtrain.config.errors import StorageError
from llmtrain.train.signals import STOP_SIGNALS

GRID = ["-m", "+precision=fp32,bf16", "optimizer.lr=0.001,0.01", "run.name=grid"]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for played jobs."""
    monkeypatch.setattr(sweep_jobs, "POLL_SECONDS", 0.0)


def grid(*words: str) -> Sweep:
    return lay_out(parse_arguments([*GRID, *words]))


def played(sweep: Sweep, stage: Stage) -> tuple[list[JobResult], bool, str]:
    stream = io.StringIO()
    results, stopped = run_jobs(sweep, WholeMachine(), stage, PlainProgress(stream))
    return results, stopped, stream.getvalue()


def test_a_failing_job_is_a_row_and_not_the_end() -> None:
    stage = Stage([0, 2, 0, 78], [1.5, None, 1.25, None])
    results, stopped, progress = played(grid(), stage)
    assert len(stage.jobs) == 4 and not stopped
    assert [result.exit_code for result in results] == [0, 2, 0, 78]
    assert results[1].reason == "out of luck: none" and results[0].reason == ""
    assert (results[0].tokens_per_second, results[0].peak_memory_bytes, results[0].steps) == (200.0, 5 * 2**20, 3)
    lines = table(results)
    assert lines[0].split() == ["precision", "optimizer.lr", "val", "loss", "tok/s", "peak", "MiB", "seconds", "ended"]
    assert lines[1].split()[:5] == ["bf16", "0.001", "1.2500", "200", "5"]
    assert lines[2].split()[:3] == ["fp32", "0.001", "1.5000"]
    assert lines[3].split()[:3] == ["fp32", "0.01", "–"] and lines[3].endswith("exit 2: out of luck: none")
    assert all(f"{number}/4  precision=" in progress for number in (1, 2, 3, 4))
    assert "2/4  precision=fp32 optimizer.lr=0.01  exit 2: out of luck: none · 0 s\n" in progress


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_so_many_run_at_a_time_and_start_in_order(num_slots: int) -> None:
    """The second is the slowest and the third fails; neither holds up the others or changes the order of the rows."""
    stage = Stage([0, 0, 77, 0], [1.0, 2.0, None, 4.0], num_polls=[3, 40, 2, 5])
    results, stopped, _ = played(grid(f"sweep.jobs={num_slots}"), stage)
    assert not stopped and [result.exit_code for result in results] == [0, 0, 77, 0]
    assert [result.val_loss for result in results] == [1.0, 2.0, None, 4.0]
    names = [next(word for word in command if word.startswith("run.name=")) for command in stage.commands]
    assert [name.removeprefix("run.name=")[0] for name in names] == ["0", "1", "2", "3"]
    running = {1: [(0,), (1,), (2,), (3,)], 2: [(0,), (0, 1), (1, 2), (1, 3)], 3: [(0,), (0, 1), (0, 1, 2), (0, 1, 3)]}
    running[4] = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert stage.at_once == running[num_slots]


class Slots:
    """A sharing that notes which slot each job has."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    def environment(self, index: int, slot: int) -> dict[str, str]:
        self.given.append((index, slot))
        return {"SLOT": str(slot)}


@pytest.mark.usefixtures("quick")
def test_a_job_gets_the_share_of_a_slot_nobody_has() -> None:
    stage, slots = Stage([0] * 4, num_polls=[2, 9, 2, 2]), Slots()
    run_jobs(grid("sweep.jobs=2"), slots, stage, PlainProgress(io.StringIO()))
    assert slots.given == [(0, 0), (1, 1), (2, 0), (3, 0)]
    assert [environment["SLOT"] for environment in stage.environments] == ["0", "1", "0", "0"]


@pytest.mark.usefixtures("quick")
def test_a_job_that_saved_and_ended_lets_the_others_end_and_starts_none() -> None:
    stage = Stage([75, 0, 0, 0], [1.0] * 4, num_polls=[2, 9, 1, 1])
    results, stopped, _ = played(grid("sweep.jobs=2"), stage)
    assert stopped and [result.exit_code for result in results] == [75, 0] and len(stage.jobs) == 2
    assert not any(job.signals for job in stage.jobs)


class Interrupted(Stage):
    """A stage whose process is struck when a job is polled for the third time; a job ends once it was told to."""

    def __init__(self, blows: Sequence[signal.Signals]) -> None:
        super().__init__([75] * 4)
        self.blows = list(blows)

    def ends(self, job: PlayedJob, poll: int) -> bool:
        if poll == 3 and self.blows:
            os.kill(os.getpid(), self.blows.pop(0))
        return poll >= 20 and bool(job.signals)


@pytest.mark.usefixtures("quick", "handlers_restored")
def test_a_signal_reaches_every_running_job_once_a_kind() -> None:
    stage = Interrupted([signal.SIGINT, signal.SIGTERM, signal.SIGINT])
    results, stopped, progress = played(grid("sweep.jobs=3"), stage)
    assert stopped and [result.exit_code for result in results] == [75] * 3
    assert [job.signals for job in stage.jobs] == [[signal.SIGINT, signal.SIGTERM]] * 3
    assert progress.count("stopping: 3 jobs save first; kill -KILL 4000 4001 4002 ends them at once") == 1


@pytest.mark.usefixtures("quick", "handlers_restored")
def test_a_signal_that_is_ignored_stays_so() -> None:
    """`nohup` has SIGHUP ignored, so that a sweep outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        class HungUp(Stage):
            def ends(self, job: PlayedJob, poll: int) -> bool:
                os.kill(os.getpid(), signal.SIGHUP)
                return True

        results, stopped, _ = played(grid(), HungUp([0] * 4))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not stopped and len(results) == 4


@pytest.mark.usefixtures("quick")
def test_jobs_are_not_left_behind_when_the_sweep_breaks(tmp_path: Path) -> None:
    """A folder that cannot be read ends the sweep; the other job is told to save, and waited for."""

    class Breaking(Stage):
        def ends(self, job: PlayedJob, poll: int) -> bool:
            if job.number == 0:
                (tmp_path / "runs/grid/0-precision-fp32-optimizer.lr-0.001/metrics.jsonl").mkdir(parents=True)
                return True
            return bool(job.signals) and poll > 9

    stage = Breaking([0] * 4)
    with pytest.raises(StorageError, match="cannot read"):
        played(grid("sweep.jobs=2"), stage)
    assert stage.jobs[1].signals == [signal.SIGTERM] and stage.jobs[1].code == 0


def finish(sweep: Sweep, index: int, *more: str, code: int = 0) -> Path:
    """The folder that a job leaves when it ends with this code."""
    folder = sweep.folder / sweep.names[index]
    folder.mkdir(parents=True)
    composed = lay_out(parse_arguments([*GRID, *more])).compose(index)
    assert composed is not None
    (folder / "config.yaml").write_text(yaml.safe_dump({"format_version": 1, **composed.wire}))
    os.utime(folder / "config.yaml", (1e9, 1e9))
    (folder / "status.json").write_text(json.dumps({"format_version": 1, "code": code, "step": 3, "reason": "told"}))
    os.utime(folder / "status.json", (1e9 + 50, 1e9 + 50))
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 2.0, "val_loss": 0.5}\n')
    return folder


def test_a_job_that_is_finished_is_not_started_again() -> None:
    """Two by an array, of which one was launched otherwise, and one that did not end well."""
    sweep, stage = grid("data=text", "data.path=texts"), Stage([0, 0], [1.0, 2.0])
    finish(sweep, 0, "data=text", f"data.path={Path.cwd() / 'texts'}")
    finish(sweep, 2, "data=text", f"data.path={Path.cwd() / 'texts'}", "launch.nproc=2", "launch.threads=1")
    finish(sweep, 3, "data=text", f"data.path={Path.cwd() / 'texts'}", code=77)
    results, stopped, progress = played(sweep, stage)
    assert not stopped and [result.val_loss for result in results] == [0.5, 1.0, 0.5, 2.0]
    assert [result.ended() for result in results] == ["done"] * 4 and results[0].seconds == 50.0
    assert "1/4  precision=fp32 optimizer.lr=0.001  finished before · val loss 0.5000" in progress
    assert len(stage.jobs) == 2


@pytest.mark.parametrize("words", [["train.steps=7"], ["train.stop_after=5"], ["optimizer.beta1=0.8"], ["run.seed=3"]])
def test_a_finished_job_that_is_asked_for_anything_else_is_started(words: list[str]) -> None:
    sweep, stage = grid(*words), Stage([0] * 4)
    for index in range(4):
        finish(sweep, index)
    played(sweep, stage)
    assert len(stage.jobs) == 4


def test_a_finished_folder_that_is_spoilt_is_left_to_its_job() -> None:
    sweep, stage = grid(), Stage([74, 0, 0, 0])
    (finish(sweep, 0) / "config.yaml").write_text("{")
    assert played(sweep, stage)[0][0].exit_code == 74 and len(stage.jobs) == 4


def wait_for(process: Process) -> int:
    while (code := process.poll()) is None:
        time.sleep(0.02)
    return code


def test_a_process_writes_its_log_and_returns_its_code(tmp_path: Path) -> None:
    # A process group of its own: Ctrl-C on the terminal must reach the job once, by way of the sweep.
    script = (
        "import os, sys; print(os.getpgid(0) == os.getpid(), os.environ['MINE']); print('err', file=sys.stderr); sys.exit(7)"
    )
    (tmp_path / "log").write_text("before\n")
    assert wait_for(start_process([sys.executable, "-c", script], tmp_path / "log", {"MINE": "own"})) == 7
    assert set((tmp_path / "log").read_text().split()) == {"before", "True", "own", "err"}
    with pytest.raises(StorageError, match="cannot write .*none"):
        start_process([sys.executable, "-c", script], tmp_path / "none" / "log", {})


SAVING_JOB = """
import signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
print("ready", flush=True)
while not got:
    time.sleep(0.02)
print("saving", flush=True)
time.sleep(2)
print("saved", *got, flush=True)
sys.exit(75)
"""


def strike(logs: Sequence[Path], blows: Sequence[tuple[str, signal.Signals]]) -> threading.Thread:
    """A thread that signals this process each time all logs hold the word."""

    def work() -> None:
        for word, number in blows:
            while not all(log.exists() and word in log.read_text() for log in logs):
                time.sleep(0.02)
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # two signals of a kind at once are one

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture
def handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.usefixtures("handlers_restored")
@pytest.mark.parametrize(
    ("blows", "passed_on"),
    [
        (["SIGINT"], ["SIGINT"]),
        (["SIGTERM"], ["SIGTERM"]),
        (["SIGUSR1"], ["SIGUSR1"]),
        (["SIGINT", "SIGINT", "SIGINT"], ["SIGINT"]),
        (["SIGINT", "SIGTERM", "SIGINT", "SIGTERM"], ["SIGINT", "SIGTERM"]),
    ],
)
def test_signals_stop_the_sweep_after_the_running_jobs_and_reach_them_once_a_kind(
    blows: list[str], passed_on: list[str]
) -> None:
    """Real processes. A second Ctrl-C would tell a job not to save."""
    sweep = grid("sweep.jobs=2")
    logs = [sweep.folder / "logs" / f"{name}.log" for name in sweep.names[:2]]

    def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
        return start_process([sys.executable, "-c", SAVING_JOB], log, environment)

    first, *others = (signal.Signals[name] for name in blows)
    thread = strike(logs, [("ready", first), *(("saving", number) for number in others)])
    screen = io.StringIO()
    results, stopped = run_jobs(sweep, WholeMachine(), start, PlainProgress(screen))
    thread.join()
    assert stopped and [result.exit_code for result in results] == [75, 75]
    for log in logs:
        assert log.read_text().split() == ["ready", "saving", "saved", *passed_on]
    assert screen.getvalue().count("stopping: 2 jobs save first; kill -KILL ") == 1


@pytest.mark.usefixtures("handlers_restored")
def test_a_signal_between_two_jobs_stops_the_sweep() -> None:
    class Struck(Stage):
        def ends(self, job: PlayedJob, poll: int) -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            return True

    stage = Struck([0] * 4, [1.0, 2.0, 3.0, 4.0])
    results, stopped, _ = played(grid(), stage)
    assert stopped and len(results) == len(stage.jobs) == 1 and not stage.jobs[0].signals


def test_a_job_is_told_to_stop_when_its_sweep_is_killed(tmp_path):
    """Whatever ends the sweep; the job saves and ends, as on any other SIGTERM."""
    told = tmp_path / "told"
    job = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], 'w').close(), sys.exit()));"
        "open(sys.argv[1] + '.ready', 'w').close(); time.sleep(60)"
    )
    sweep = (
        "import sys; from pathlib import Path; from llmtrain.cli.sweep_jobs import start_process;"
        "start_process([sys.executable, '-c', sys.argv[1], sys.argv[2]], Path(sys.argv[2] + '.log'), {}).wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", sweep, job, str(told)])
    until(lambda: told.with_name("told.ready").exists())
    process.kill()
    process.wait()
    until(told.exists)


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)
