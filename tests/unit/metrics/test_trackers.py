"""What trackers are given: the numbers of metrics.jsonl under its names, each step once, and one tracker's failure is its own."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.tracker_files import BOTH, NONE, OFFLINE, tensorboard_values, wandb_run, wandb_runs, wandb_values

from llmtrain.config.compose import compose_config
from llmtrain.config.typed import TrackerConfig, WandbConfig
from llmtrain.metrics import tracker_tensorboard, tracker_wandb, trackers
from llmtrain.metrics.memory import MemorySummary
from llmtrain.metrics.meters import METRIC_KEYS, StepRecord
from llmtrain.metrics.sinks import open_sink, read_metrics
from llmtrain.metrics.tracker_wandb import keep_run_id
from llmtrain.metrics.trackers import TrackedRun, Tracker, Trackers, availability, flat_values, open_trackers

TENSORBOARD = TrackerConfig(wandb=None, tensorboard=True)
AT_PEAK = {"params": 1, "grads": 2, "optimizer": 3, "activations": 4, "loss": 5, "other": 6}


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = dict(
        step=step,
        tokens=100 * step,
        loss=math.log(step + 1),
        lr=1e-3,
        grad_norm=0.1 + step,
        step_seconds=1 / 3,
        tokens_per_second=2e2,
    )
    return StepRecord(**(values | changes))


ODD = (
    record(
        1, loss=0.1 + 0.2, lr=5e-324, grad_norm=1.7976931348623157e308, mfu=1 / 3, memory=MemorySummary(21, AT_PEAK, 40, 50)
    ),
    record(2, loss=math.nan, grad_norm=math.inf, val_loss=-math.inf, skipped=3),
    record(3, peak_memory_bytes=2**53 - 1, exposed_comm_seconds=0.0, loss_scale=65536.0),
)


class Recorder(Tracker):
    """Keeps what it is given; fails in the methods named."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.steps: list[int] = []
        self.calls: list[str] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call("log")
        self.steps.append(step)

    def finish(self) -> None:
        self._call("finish")

    def abandon(self) -> None:
        self._call("abandon")

    def notes(self) -> list[str]:
        self._call("notes")
        return ["noted"]

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise RuntimeError(f"no {name}\nhere.")


def opened(folder: Path, config: TrackerConfig, *, resumed_step: int = 0, **others: Any) -> tuple[Trackers, list[str]]:
    """Trackers of a run in `folder`, and the warnings they give."""
    warnings: list[str] = []
    wire = {"model": {"dim": 32, "vocab_size": None}, "tracker": {"wandb": {"tags": ["a", "b"]}}}
    found = open_trackers(
        config, folder=folder, run_name="demo", wire=wire, resumed_step=resumed_step, warn=warnings.append, others=others
    )
    return found, warnings


def log_all(folder: Path, config: TrackerConfig, records: Any, *, resumed_step: int = 0) -> Trackers:
    """One start that ends well: the file of metrics and the trackers get the same records."""
    found, warnings = opened(folder, config, resumed_step=resumed_step)
    sink = open_sink(folder / "metrics.jsonl", resumed_step)
    for item in records:
        sink.write(item)
        found.log(item)
    sink.close()
    found.finish()
    assert warnings == []
    return found


def expected_values(folder: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl with nested values joined, read without the writer's code."""
    found: dict[int, dict[str, float]] = {}
    for values in read_metrics(folder / "metrics.jsonl").records:
        flat = {key: value for key, value in values.items() if key not in ("step", "memory")}
        flat |= {f"memory/{name}": value for name, value in values.get("memory", {}).items()}
        found[values["step"]] = flat
    return found


def as_bits(values: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, str]]:
    """Values that compare equal only when every bit of the double is (NaN too)."""
    return {step: {name: float(value).hex() for name, value in sorted(row.items())} for step, row in sorted(values.items())}


def test_without_trackers_nothing_happens(tmp_path: Path) -> None:
    threads = threading.active_count()
    found, warnings = opened(tmp_path, NONE)
    found.log(record(1))
    found.finish()
    assert (found.notes(), warnings, list(tmp_path.iterdir()), threading.active_count()) == ([], [], [], threads)


def test_names_are_those_of_the_metrics_file() -> None:
    values = flat_values(ODD[0].to_dict())
    assert [name for name in values if not name.startswith("memory/")] == [
        key for key in METRIC_KEYS if key in values and key not in ("step", "memory")
    ]
    assert {name: value for name, value in values.items() if name.startswith("memory/")} == {
        f"memory/{name}": value for name, value in AT_PEAK.items()
    }
    assert "step" not in values


def test_b58_both_trackers_hold_the_numbers_of_the_file_to_the_bit(tmp_path: Path) -> None:
    found = log_all(tmp_path, BOTH, ODD)
    expected = as_bits(expected_values(tmp_path))
    assert as_bits(tensorboard_values(tmp_path / "tensorboard")) == expected
    (file,) = wandb_runs(tmp_path / "wandb")
    assert as_bits(wandb_values(file)) == expected
    assert found.notes() == [f"wandb sync {file.parent}"]


def test_wandb_is_told_the_run_and_nothing_about_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_ID", "PROJECT", "ENTITY", "TAGS", "NAME", "NOTES", "JOB_TYPE", "SWEEP_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "other")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config = WandbConfig(mode="offline", project="sea", entity="us", group="first try", tags=("a", "b c"))
    log_all(tmp_path, TrackerConfig(config, tensorboard=False), ODD)
    (file,) = wandb_runs(tmp_path / "wandb")
    run = wandb_run(file)
    assert (run.project, run.entity, run.run_group, list(run.tags), run.display_name) == (
        "sea",
        "us",
        "first try",
        ["a", "b c"],
        "demo",
    )
    assert run.run_id == json.loads((tmp_path / "trackers.json").read_text())["wandb"]["id"]
    told = {item.key: json.loads(item.value_json) for item in run.config.update if item.key != "_wandb"}
    assert told == {"model": {"dim": 32, "vocab_size": None}, "tracker": {"wandb": {"tags": ["a", "b"]}}}
    assert run.git.remote_url == run.git.commit == run.notes == run.job_type == run.sweep_id == ""
    assert [path.name for path in (file.parent / "files").rglob("*") if path.suffix in (".py", ".txt", ".patch", ".json")] == []


def test_b58_after_a_resume_each_step_is_once_and_the_later_value_counts(tmp_path: Path) -> None:
    log_all(tmp_path, BOTH, [record(step, loss=float(step)) for step in range(1, 9)])
    log_all(tmp_path, BOTH, [record(step, loss=100.0 + step) for step in range(6, 11)], resumed_step=5)
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 106.0, 107.0, 108.0, 109.0, 110.0]
    events = tensorboard_values(tmp_path / "tensorboard")
    assert [events[step]["loss"] for step in range(1, 11)] == losses and len(events) == 10
    assert as_bits(events) == as_bits(expected_values(tmp_path))
    first, second = wandb_runs(tmp_path / "wandb")
    assert wandb_run(first).run_id == wandb_run(second).run_id
    assert [wandb_values(first)[step]["loss"] for step in range(1, 9)] == [float(step) for step in range(1, 9)]
    assert as_bits(wandb_values(second)) == as_bits(expected_values(tmp_path))


def test_a_tensorboard_that_watches_sees_each_update_at_once(tmp_path: Path) -> None:
    found, _ = opened(tmp_path, TENSORBOARD)
    for step in range(1, 4):
        found.log(record(step))
        assert len(tensorboard_values(tmp_path / "tensorboard")) == step
    found.finish()


@pytest.mark.parametrize("clock", [1_000_000_000.0, 999_999_000.0], ids=["same second", "set back"])
def test_b58_event_files_of_later_starts_sort_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: float) -> None:
    times = iter([1_000_000_000.0, clock, clock])
    for start in range(3):
        with monkeypatch.context() as patch:
            now = next(times)
            patch.setattr(tracker_tensorboard.time, "time", lambda now=now: now)
            log_all(
                tmp_path, TENSORBOARD, [record(step, loss=start + step / 8) for step in range(start + 1, 5)], resumed_step=start
            )
    assert [row["loss"] for _, row in sorted(tensorboard_values(tmp_path / "tensorboard").items())] == [1 / 8, 1.25, 2.375, 2.5]


def test_a_fresh_start_takes_back_all_steps_of_one_that_was_killed_before_a_save(tmp_path: Path) -> None:
    log_all(tmp_path, BOTH, [record(step, loss=1.0) for step in range(1, 4)])
    log_all(tmp_path, BOTH, [record(1, loss=2.0)])
    assert {step: row["loss"] for step, row in tensorboard_values(tmp_path / "tensorboard").items()} == {1: 2.0}
    assert len({wandb_run(file).run_id for file in wandb_runs(tmp_path / "wandb")}) == 1


def test_the_run_id_is_drawn_once_and_a_damaged_file_is_no_reason_to_draw_another(tmp_path: Path) -> None:
    path = tmp_path / "trackers.json"
    first = keep_run_id(path)
    assert first == keep_run_id(path) and len(first) == 8 and first.isalnum() and first.islower() or first.isdigit()
    assert [item.name for item in tmp_path.iterdir()] == ["trackers.json"]
    for text in ("{", "[]", '{"format_version": 1}', '{"format_version": 2, "wandb": {"id": "abcdefgh"}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="trackers.json"):
            keep_run_id(path)
        assert path.read_text() == text


@pytest.mark.parametrize("method", ["log", "finish"])
def test_the_first_failure_is_told_once_and_the_others_go_on(tmp_path: Path, method: str) -> None:
    bad, good = Recorder(method), Recorder()
    found, warnings = opened(tmp_path, NONE, bad=lambda run: bad, good=lambda run: good)
    for step in range(1, 4):
        found.log(record(step))
    found.finish()
    found.finish()
    found.log(record(4))
    assert warnings == [f"tracker bad is off: no {method} here; the run goes on without it, metrics.jsonl has every record"]
    assert bad.calls == (["log", "abandon"] if method == "log" else ["log", "log", "log", "finish", "abandon"])
    assert good.steps == [1, 2, 3] and good.calls == ["log", "log", "log", "finish"]
    assert found.notes() == ["noted", "noted"]


def test_a_tracker_that_cannot_open_or_does_nothing_right_is_told_once(tmp_path: Path) -> None:
    def cannot(run: TrackedRun) -> Tracker:
        raise OSError(28, "No space left on device", str(run.folder))

    found, warnings = opened(tmp_path, NONE, full=cannot, bad=lambda run: Recorder("log", "finish", "abandon", "notes"))
    found.log(record(1))
    found.finish()
    assert found.notes() == []
    assert [warning.split(";")[0] for warning in warnings] == [
        f"tracker full is off: [Errno 28] No space left on device: '{tmp_path}'",
        "tracker bad is off: no log here",
    ]


@pytest.mark.parametrize("method", ["open", "log", "finish"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_passes_through(tmp_path: Path, method: str, error: type[BaseException]) -> None:
    def stop(*arguments: Any) -> Any:
        raise error

    def make(run: TrackedRun) -> Tracker:
        return stop() if method == "open" else type("Stopping", (Recorder,), {method: stop})()

    warnings: list[str] = []
    with pytest.raises(error):
        found = open_trackers(
            NONE, folder=tmp_path, run_name="", wire={}, resumed_step=0, warn=warnings.append, others={"stopping": make}
        )
        found.log(record(1))
        found.finish()
    assert warnings == []


@pytest.mark.parametrize("method", ["open", "finish", "abandon"])
def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(trackers, "OPEN_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.2)
    for_ever = threading.Event()
    hanging = Recorder("log") if method == "abandon" else Recorder()
    if method != "open":
        setattr(hanging, method, for_ever.wait)

    def make(run: TrackedRun) -> Tracker:
        if method == "open":
            for_ever.wait()
        return hanging

    good = Recorder()
    found, warnings = opened(tmp_path, NONE, hanging=make, good=lambda run: good)
    found.log(record(1))
    found.finish()
    for_ever.set()
    assert good.calls == ["log", "finish"]
    reason = "no log here" if method == "abandon" else "no answer within 0.2 s"
    assert [warning.split(";")[0] for warning in warnings] == [f"tracker hanging is off: {reason}"]


def test_a_missing_package_is_known_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: state.available for name, state in availability().items()} == {"wandb": True, "tensorboard": True}
    before = set(sys.modules)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert {name: state.reason for name, state in availability().items()} == {
        name: f"the package {name} is not installed (pip install {name})" for name in ("wandb", "tensorboard")
    }
    assert set(sys.modules) == before


def test_a_folder_that_wandb_left_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert not availability()["wandb"].available


def test_a_package_that_breaks_at_import_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    found, warnings = opened(tmp_path, TENSORBOARD)
    found.log(record(1))
    assert len(warnings) == 1 and warnings[0].startswith("tracker tensorboard is off: ")


@pytest.mark.parametrize(
    ("words", "wandb", "tensorboard"),
    [
        ((), None, False),
        (("tracker=wandb",), OFFLINE, False),
        (("tracker=tensorboard",), None, True),
        (("tracker=[wandb,tensorboard]",), OFFLINE, True),
        (("+tracker=wandb", "+tracker=tensorboard"), OFFLINE, True),
    ],
)
def test_words_compose_to_the_trackers_named(words: tuple[str, ...], wandb: WandbConfig | None, tensorboard: bool) -> None:
    assert compose_config(words).config.tracker == TrackerConfig(wandb, tensorboard)


def test_settings_the_installed_wandb_lacks_are_left_out_and_the_others_exist() -> None:
    import wandb

    assert set(tracker_wandb.SETTINGS) <= set(wandb.Settings.model_fields)
