"""Trackers under kills, hangs, a full disk and a missing login: the training goes on, nothing is lost, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.tracker_files import BOTH, OFFLINE, tensorboard_values, wandb_records, wandb_run, wandb_runs, wandb_values

from llmtrain.config.typed import TrackerConfig, WandbConfig
from llmtrain.metrics import tracker_tensorboard, tracker_wandb, trackers
from llmtrain.metrics.meters import StepRecord
from llmtrain.metrics.sinks import open_sink, read_metrics
from llmtrain.metrics.trackers import Trackers, open_trackers

TESTS = Path(__file__).parents[1]
RUNNER = TESTS / "helpers" / "tracker_runner.py"
WANDB = TrackerConfig(OFFLINE, tensorboard=False)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
DISCARD = "127.0.0.1:9"
"""A port of this host that nobody listens on."""
SOON = 10.0
"""Seconds after which nothing of a tracker may be alive."""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home folder and a folder for temporary files that must be empty at the end."""
    for name, variable in (("home", "HOME"), ("temporary", "TMPDIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_"))]:
        monkeypatch.delenv(name)
    yield
    assert sorted((tmp_path / "home").rglob("*")) == []


def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def start(folder: Path, mode: str, *numbers: object, prefix: tuple[str, ...] = (), **environment: str) -> Any:
    """One start of the runner in a process of its own."""
    variables = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"} | environment
    command = [*prefix, sys.executable, str(RUNNER), str(folder), mode, *map(str, numbers)]
    return subprocess.run(command, capture_output=True, text=True, env=variables, stdin=subprocess.DEVNULL, timeout=120)


def opened(folder: Path, config: TrackerConfig) -> tuple[Trackers, list[str]]:
    warnings: list[str] = []
    found = open_trackers(config, folder=folder, run_name="demo", wire={}, resumed_step=0, warn=warnings.append)
    return found, warnings


def record(step: int) -> StepRecord:
    return StepRecord(step=step, tokens=step, loss=1 / step, lr=1e-3, grad_norm=0.5, step_seconds=0.1, tokens_per_second=10.0)


def alive(folder: Path) -> list[int]:
    """Living processes that work in the run's folder for wandb: ours, and the one wandb starts."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve(strict=True) == folder / "wandb":
                found.append(int(entry.name))
        except OSError:
            continue  # gone, or dead and not collected yet
    return sorted(found)


def wait_until(condition: Any, seconds: float = SOON) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.05)


def assert_equal_to_metrics(folder: Path) -> None:
    """Both trackers hold what metrics.jsonl holds, each step once; of wandb's folders the newest does."""
    expected = {
        values["step"]: {name: value for name, value in values.items() if name != "step"}
        for values in read_metrics(folder / "metrics.jsonl").records
    }
    assert tensorboard_values(folder / "tensorboard") == expected
    assert wandb_values(wandb_runs(folder / "wandb")[-1]) == expected


@pytest.mark.parametrize("fork", ["", "+fork"])
def test_b58_killed_at_8_after_a_save_at_5_and_resumed(tmp_path: Path, fork: str) -> None:
    folder = run_folder(tmp_path)
    killed = start(folder, "offline", 0, 12, f"8{fork}")
    assert killed.returncode == -signal.SIGKILL and killed.stdout == "", killed
    wait_until(lambda: not alive(folder), 6)
    assert list((tmp_path / "temporary").iterdir()) == []
    ended = start(folder, "offline", 5, 12)
    first, second = wandb_runs(folder / "wandb")
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", f"wandb sync {second.parent}\n")
    assert alive(folder) == [] and list((tmp_path / "temporary").iterdir()) == []
    assert_equal_to_metrics(folder)
    assert sorted(wandb_values(first)) == list(range(1, 9))
    assert wandb_run(first).run_id == wandb_run(second).run_id


def test_event_files_with_a_spoilt_end_lose_that_end_alone(tmp_path: Path) -> None:
    """Zeros behind, as a power cut leaves them; zeros in the last record; a record cut off."""
    folder = run_folder(tmp_path)
    spoilt = (lambda data: data + bytes(700), lambda data: data[:-40] + bytes(40), lambda data: data[:-40], lambda data: data)
    for number, spoil in enumerate(spoilt):
        assert start(folder, "offline", 3 * number, 3 * number + 3).returncode == 0
        newest = max((folder / "tensorboard").iterdir())
        newest.write_bytes(spoil(newest.read_bytes()))
    assert_equal_to_metrics(folder)
    assert not [path for path in (folder / "tensorboard").iterdir() if path.read_bytes().endswith(bytes(8))]


def test_signals_to_our_process_leave_the_records_whole(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    found, warnings = opened(folder, WANDB)
    wait_until(lambda: len(alive(folder)) == 2 and wandb_runs(folder / "wandb"))
    for step in range(1, 9):
        found.log(record(step))
        if step == 4:
            for number in STOPPING:
                os.kill(alive(folder)[0], number)
    found.finish()
    assert warnings == [] and alive(folder) == []
    assert sorted(wandb_values(wandb_runs(folder / "wandb")[0])) == list(range(1, 9))


def test_b58_what_a_signal_to_all_processes_loses_is_there_after_the_resume(tmp_path: Path) -> None:
    """As Slurm does at a time limit; wandb's own process ends at once."""
    folder = run_folder(tmp_path)
    found, warnings = opened(folder, BOTH)
    sink = open_sink(folder / "metrics.jsonl")
    for step in range(1, 9):
        if step == 3:
            wait_until(lambda: len(alive(folder)) == 2 and wandb_runs(folder / "wandb"))
            for process in alive(folder):
                os.kill(process, signal.SIGTERM)
            wait_until(lambda: len(alive(folder)) < 2)
        found.log(record(step))
        sink.write(record(step))
    found.finish()
    sink.close()
    assert len(warnings) == 1 and warnings[0].startswith("tracker wandb is off: ")
    assert start(folder, "offline", 8, 10).returncode == 0
    assert_equal_to_metrics(folder)


def test_b58_trackers_switched_on_later_show_the_whole_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    sink = open_sink(folder / "metrics.jsonl")
    for step in range(1, 2000):
        sink.write(record(step))
    sink.close()
    ended = start(folder, "offline", 1990, 1995)
    assert (ended.returncode, ended.stdout.count("off:")) == (0, 0)
    assert_equal_to_metrics(folder)


@pytest.mark.parametrize("victim", [0, 1], ids=["our process", "wandb's process"])
def test_a_killed_process_is_told_once_and_the_training_goes_on(tmp_path: Path, victim: int) -> None:
    folder = run_folder(tmp_path)
    found, warnings = opened(folder, BOTH)
    wait_until(lambda: len(alive(folder)) == 2 and wandb_runs(folder / "wandb"))
    found.log(record(1))
    os.kill(alive(folder)[victim], signal.SIGKILL)
    for step in range(2, 40):
        found.log(record(step))
        time.sleep(0.02)
    found.finish()
    wait_until(lambda: not alive(folder))
    assert len(warnings) == 1 and warnings[0].startswith("tracker wandb is off: "), warnings
    assert sorted(tensorboard_values(folder / "tensorboard")) == list(range(1, 40))


@pytest.mark.parametrize("victims", [1, 2], ids=["our process", "both"])
def test_a_finish_that_hangs_is_cut_off_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: int
) -> None:
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 1.0)
    folder = run_folder(tmp_path)
    found, warnings = opened(folder, WANDB)
    wait_until(lambda: len(alive(folder)) == 2 and wandb_runs(folder / "wandb"))
    found.log(record(1))
    stopped = alive(folder)[:victims]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    began = time.monotonic()
    found.finish()
    assert 1.0 <= time.monotonic() - began < 3.0
    assert [warning.split(";")[0] for warning in warnings] == ["tracker wandb is off: no answer within 1 s"]
    for process in stopped[1:]:
        os.kill(process, signal.SIGCONT)
    wait_until(lambda: not alive(folder))


def test_a_process_that_does_not_read_costs_no_time_and_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_wandb, "PIPE_BYTES", 1 << 12)
    monkeypatch.setattr(tracker_wandb, "BACKLOG_BYTES", 1 << 14)
    folder = run_folder(tmp_path)
    found, warnings = opened(folder, WANDB)
    os.kill(alive(folder)[0], signal.SIGSTOP)
    slowest = 0.0
    for step in range(1, 300):
        began = time.monotonic()
        found.log(record(step))
        slowest = max(slowest, time.monotonic() - began)
    found.finish()
    assert slowest < 1.0
    assert [warning.split(";")[0] for warning in warnings] == ["tracker wandb is off: it does not keep up with the training"]
    wait_until(lambda: not alive(folder))


@pytest.mark.parametrize("text", ["raise ImportError('half installed')", "import sys; sys.exit(3)", "import os; os._exit(4)"])
def test_a_broken_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    folder = run_folder(tmp_path)
    found, warnings = opened(folder, WANDB)
    found.log(record(1))
    found.finish()
    reason = "half installed" if "half" in text else f"its process ended with code {text[-2]}"
    assert [warning.split(";")[0] for warning in warnings] == [f"tracker wandb is off: {reason}"]
    assert found.notes() == [] and alive(folder) == []


def test_folders_that_cannot_be_made_are_told_each(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    for name in ("wandb", "tensorboard"):
        (folder / name).write_text("a file")
    found, warnings = opened(folder, BOTH)
    found.log(record(1))
    found.finish()
    assert [warning.split(":")[0] for warning in warnings] == ["tracker wandb is off", "tracker tensorboard is off"]
    assert all("exists" in warning for warning in warnings)


def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    found, warnings = opened(folder, TrackerConfig(None, tensorboard=True))
    tracker: Any = found._opened["tensorboard"]
    tracker._file.close()
    with Path("/dev/full").open("wb") as full:
        tracker._file, tracker._writer = full, type(tracker._writer)(full)
        for step in range(1, 4):
            found.log(record(step))
        found.finish()
    assert len(warnings) == 1 and "No space left" in warnings[0]


def test_events_reach_the_disk_every_half_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    now = [0.0]
    monkeypatch.setattr(tracker_tensorboard.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tracker_tensorboard.os, "fsync", synced.append)
    found = tracker_tensorboard.open_tensorboard(trackers.TrackedRun(run_folder(tmp_path), "demo", {}, 0))
    for step in range(1, 91):
        now[0] = float(step)
        found.log(step, {"loss": 1.0})
    assert len(synced) == 3
    found.finish()
    assert len(synced) == 4


def test_online_without_a_login_is_a_warning_and_no_prompt(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    began = time.monotonic()
    ended = start(folder, "online", 0, 8)
    assert time.monotonic() - began < 20
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout.startswith("tracker wandb is off: ") and "API key" in ended.stdout and ended.stdout.count("off") == 1
    assert sorted(tensorboard_values(folder / "tensorboard")) == list(range(1, 9))
    assert alive(folder) == []


def test_online_without_a_network_is_a_warning_and_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a loopback port that nobody listens on: the connection is refused, and wandb tries again and again."""
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 20.0)
    monkeypatch.setattr(tracker_wandb, "SETTINGS", {**tracker_wandb.SETTINGS, "init_timeout": 2.0})
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://{DISCARD}")
    folder = run_folder(tmp_path)
    found, warnings = opened(folder, TrackerConfig(WandbConfig("online", "p", None, None, ()), tensorboard=True))
    for step in range(1, 9):
        found.log(record(step))
    found.finish()
    assert len(warnings) == 1 and warnings[0].startswith("tracker wandb is off: "), warnings
    wait_until(lambda: not alive(folder), 20)
    assert sorted(tensorboard_values(folder / "tensorboard")) == list(range(1, 9))


def test_the_record_of_a_kill_says_that_the_run_died(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    start(folder, "offline", 0, 4, 2)
    wait_until(lambda: not alive(folder))
    assert "off:" not in start(folder, "offline", 0, 4).stdout
    codes = [
        record.exit.exit_code
        for file in wandb_runs(folder / "wandb")
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "exit"
    ]
    assert codes == [1, 0]
