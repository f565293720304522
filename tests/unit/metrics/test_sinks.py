"""metrics.jsonl: exact, valid JSON, each step once whatever happened before."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.errors import StorageError
from llmtrain.metrics.memory import MemorySummary
from llmtrain.metrics.meters import METRIC_KEYS, StepRecord
from llmtrain.metrics.sinks import TAIL_BYTES, Metrics, finite_json, newest_record, open_sink, read_metrics

DESIGN_KEYS = (
    "step tokens loss lr grad_norm step_seconds tokens_per_second mfu peak_memory_bytes memory activations_peak_bytes "
    "loss_peak_bytes loss_scale skipped exposed_comm_seconds val_loss unscored"
).split()


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = dict(
        step=step, tokens=100 * step, loss=3.0 / step, lr=1e-3, grad_norm=0.1 + step, step_seconds=0.5, tokens_per_second=200.0
    )
    return StepRecord(**(values | changes))


def read_records(path: Path) -> list[StepRecord]:
    """What is in a file without damage."""
    metrics = read_metrics(path)
    assert metrics.num_damaged == 0
    return [StepRecord.from_dict(values) for values in metrics.records]


def write_steps(path: Path, first: int, last: int, *, resumed_step: int = 0, **changes: Any) -> None:
    sink = open_sink(path, resumed_step)
    for step in range(first, last + 1):
        sink.write(record(step, **changes))
    sink.close()


def test_names_are_those_of_the_design_and_what_does_not_apply_is_absent(tmp_path: Path) -> None:
    assert list(METRIC_KEYS) == DESIGN_KEYS
    write_steps(tmp_path / "metrics.jsonl", 1, 1)
    values = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(values) == ["step", "tokens", "loss", "lr", "grad_norm", "step_seconds", "tokens_per_second", "skipped"]


def test_every_field_survives_a_round_trip_bit_for_bit(tmp_path: Path) -> None:
    at_peak = dict(params=1, grads=2, optimizer=3, activations=4, loss=5, other=6)
    full = record(
        1,
        loss=0.1 + 0.2,
        lr=5e-324,
        grad_norm=1.7976931348623157e308,
        mfu=1 / 3,
        peak_memory_bytes=2**53 + 1,
        memory=MemorySummary(21, at_peak, 40, 50),
        loss_scale=65536.0,
        skipped=2,
        exposed_comm_seconds=0.0,
        val_loss=-0.0,
        unscored=True,
    )
    path = tmp_path / "metrics.jsonl"
    sink = open_sink(path)
    sink.write(full)
    sink.sync()
    sink.close()
    assert list(json.loads(path.read_text())) == DESIGN_KEYS
    assert read_records(path) == [full]
    assert math.copysign(1.0, json.loads(path.read_text())["val_loss"]) == -1.0


def test_values_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 1, loss=math.nan, grad_norm=math.inf, val_loss=-math.inf)

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    values = json.loads(path.read_text(), parse_constant=refuse)
    assert (values["loss"], values["grad_norm"], values["val_loss"]) == ("NaN", "Infinity", "-Infinity")
    (read,) = read_records(path)
    assert math.isnan(read.loss) and read.grad_norm == math.inf and read.val_loss == -math.inf


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AssertionError, match="caches"):
        record(1, memory=MemorySummary(1, {"caches": 1}, 0, 0)).to_dict()
    with pytest.raises(ValueError, match="perplexity"):
        StepRecord.from_dict(record(1).to_dict() | {"perplexity": 1.0})
    with pytest.raises(ValueError, match="grad_norm"):
        StepRecord.from_dict({"step": 1})


def test_steps_only_grow(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "metrics.jsonl")
    sink.write(record(3))
    for step in (3, 2):
        with pytest.raises(AssertionError, match="after step 3"):
            sink.write(record(step))
    sink.close()


def test_a_record_is_on_file_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = open_sink(path)
    for step in (1, 2, 3):
        sink.write(record(step))
        assert [r.step for r in read_records(path)] == list(range(1, step + 1))
    sink.close()


@pytest.mark.parametrize("resumed_step", range(0, 9))
@pytest.mark.parametrize("torn", ["", '{"', '{"step":9,"tok', '{"step":9}\n', "\0\0\0\0", "\n"])
def test_b58_each_step_once_after_a_resume(tmp_path: Path, resumed_step: int, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 8, val_loss=1.0)
    with path.open("a") as file:
        file.write(torn)
    write_steps(path, resumed_step + 1, 12, resumed_step=resumed_step, val_loss=2.0)
    records = read_records(path)
    assert [r.step for r in records] == list(range(1, 13))
    assert [r.val_loss for r in records] == [1.0] * resumed_step + [2.0] * (12 - resumed_step)
    assert records[:resumed_step] == [record(step, val_loss=1.0) for step in range(1, resumed_step + 1)]


def test_b58_a_last_line_that_lacks_only_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    path.write_bytes(path.read_bytes()[:-1])
    write_steps(path, 4, 4, resumed_step=3)
    assert [r.step for r in read_records(path)] == [1, 2, 3, 4]


def test_b58_file_of_an_older_kill_with_repeated_steps_is_put_right(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 6)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[3:6]))
    open_sink(path, resumed_step=6).close()
    assert [r.step for r in read_records(path)] == [1, 2, 3, 4, 5, 6]


def test_resume_rewrites_in_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 5)
    before = path.read_bytes()

    def killed(source: Path, target: Path) -> None:
        assert path.read_bytes() == before, "the old file is whole until the rename"
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        open_sink(path, resumed_step=3)
    assert path.read_bytes() == before
    monkeypatch.undo()
    open_sink(path, resumed_step=3).close()
    assert [r.step for r in read_records(path)] == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fuller_record_takes_the_place_of_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = open_sink(path)
    for step in (1, 2):
        sink.write(record(step, val_loss=1.0))
    sink.write(record(3, unscored=True))
    earlier = path.read_bytes().splitlines(keepends=True)[:2]
    sink.replace_last(record(3, val_loss=2.0))
    assert path.read_bytes().splitlines(keepends=True)[:2] == earlier
    assert read_records(path)[2:] == [record(3, val_loss=2.0)] and b"unscored" not in path.read_bytes()
    sink.sync()
    with pytest.raises(AssertionError, match="step 2 for step 3"):
        sink.replace_last(record(2))
    sink.write(record(4))
    sink.close()
    assert read_records(path)[2:] == [record(3, val_loss=2.0), record(4)], "what follows goes into the new file"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "no room")], ids=["ended", "refused"])
def test_a_fuller_record_that_does_not_get_there_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = open_sink(path)
    sink.write(record(1, unscored=True))
    before = path.read_bytes()

    def fail(source: Path, target: Path) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else StorageError):
            sink.replace_last(record(1, val_loss=2.0))
    assert path.read_bytes() == before
    sink.write(record(2))
    sink.close()
    assert read_records(path) == [record(1, unscored=True), record(2)]
    open_sink(path, resumed_step=1).close()
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_damaged_lines_are_counted_and_in_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\0\n" + b"".join(lines[2:]) + b'{"st')
    metrics = read_metrics(path)
    assert [values["step"] for values in metrics.records] == [1, 3, 4]
    assert metrics.num_damaged == 1, "the last line may still be being written"
    sink = open_sink(path, resumed_step=4)
    sink.close()
    assert sink.num_damaged == 2
    assert [r.step for r in read_records(path)] == [1, 3, 4]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "3",
        "[]",
        "null",
        '"step"',
        '{"step":1}',
        '{"loss":1.0}',
        '{"step":"1","loss":1.0}',
        '{"step":1,"loss":"low"}',
        "\xff",
    ],
)
def test_what_is_no_record_is_damaged(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line.encode("latin-1") + b"\n")
    assert read_metrics(path) == Metrics((), 1)
    assert newest_record(path) is None


def test_the_newest_record_is_the_last_whole_line_wherever_the_tail_begins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_record(path) is None and read_metrics(path) == Metrics((), 0)
    path.touch()
    assert newest_record(path) is None
    write_steps(path, 1, 1000, val_loss=math.nan)
    size = path.stat().st_size
    assert size > 2 * TAIL_BYTES
    newest = newest_record(path)
    assert newest is not None and newest["step"] == 1000 and math.isnan(newest["val_loss"])
    for torn in (b'{"step":1001,"lo', b"\0\0\n", b"x" * 1000):
        with path.open("ab") as file:
            file.write(torn)
        found = newest_record(path)
        assert found is not None and found["step"] == 1000
        with path.open("ab") as file:
            file.truncate(size)


def test_words_for_what_json_cannot_say_at_any_depth() -> None:
    document = {"a": math.nan, "b": [1.5, (math.inf, -math.inf)], "c": {"d": {"e": math.nan}}, "f": "inf", "g": None, "h": True}
    words = finite_json(document)
    assert words == {
        "a": "NaN",
        "b": [1.5, ["Infinity", "-Infinity"]],
        "c": {"d": {"e": "NaN"}},
        "f": "inf",
        "g": None,
        "h": True,
    }
    assert json.loads(json.dumps(words, allow_nan=False)) == words


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        open_sink(tmp_path / "absent" / "metrics.jsonl")
    for read in (read_metrics, newest_record):
        with pytest.raises(StorageError, match="cannot read"):
            read(tmp_path)
    sink = open_sink(tmp_path / "metrics.jsonl")
    with open("/dev/full", "w", encoding="utf-8") as full:
        sink._file = full
        with pytest.raises(StorageError, match="free space"):
            sink.write(record(1))
        with pytest.raises(OSError):
            full.flush()
        full.close = lambda: None  # type: ignore[method-assign]
