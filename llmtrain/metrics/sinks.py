"""`metrics.jsonl`: one JSON record per update, strictly increasing, exact, and right after any crash and resume.

Floats are written so that reading them gives the same bits. JSON has no word for values that are not finite: they are the strings
"NaN", "Infinity" and "-Infinity" (as protobuf's JSON form has them), which `float()` and the reader here turn back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from llmtrain.config.errors import Problem, StorageError
from llmtrain.metrics.meters import StepRecord

NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class JsonlSink:
    """Appends records to an open file; make one with `open_sink`."""

    def __init__(self, path: Path, file: TextIO, last_step: int, num_damaged: int) -> None:
        self.num_damaged = num_damaged
        """Lines that could not be read and were dropped when the file was opened (the last one of a killed run may be such)."""
        self._path = path
        self._file = file
        self._last_step = last_step

    def write(self, record: StepRecord) -> None:
        """Append a record and hand it to the operating system, so that a kill loses nothing.

        Raises:
            StorageError: the disk refuses.
            AssertionError: the step is not larger than the last one.
        """
        assert record.step > self._last_step, f"step {record.step} after step {self._last_step}"
        self._last_step = record.step
        try:
            self._file.write(_to_line(record))
            self._file.flush()
        except OSError as error:
            raise _cannot("write", self._path, error) from error

    def sync(self) -> None:
        """Wait until all records are on the disk; called before a checkpoint that counts on them is made visible."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot("write", self._path, error) from error

    def close(self) -> None:
        self._file.close()


def open_sink(path: Path, resumed_step: int = 0) -> JsonlSink:
    """Open `metrics.jsonl` to continue after `resumed_step` (0 = a fresh run).

    Records of later steps, which will be made again, and lines that are torn are removed first: the kept lines are written to a file
    next to it that takes its place in one rename.

    Raises:
        StorageError: the folder cannot be written.
    """
    staged = path.with_name(path.name + ".tmp")
    last_step = num_damaged = 0
    try:
        with staged.open("w", encoding="utf-8", newline="\n") as file:
            for record in _records(path) if path.exists() else ():
                if record is None:
                    num_damaged += 1
                elif last_step < record.step <= resumed_step:
                    file.write(_to_line(record))
                    last_step = record.step
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
        return JsonlSink(path, path.open("a", encoding="utf-8", newline="\n"), last_step, num_damaged)
    except OSError as error:
        raise _cannot("write", path, error) from error


def read_metrics(path: Path) -> list[StepRecord]:
    """All records of a run, which may still be running: a last line without its end is not there yet.

    Raises:
        StorageError: the file cannot be read, or a line before the last one is damaged.
    """
    try:
        records = list(_records(path))
    except OSError as error:
        raise _cannot("read", path, error) from error
    if records and records[-1] is None:
        records.pop()
    if None in records:
        number = records.index(None) + 1
        raise StorageError(
            Problem(f"{path}, line {number}", "not a record of this version", "resume the run: it drops bad lines")
        )
    return [record for record in records if record is not None]


def _records(path: Path) -> Iterator[StepRecord | None]:
    """The record of each line; None for a line that is torn or is none."""
    with path.open("rb") as file:
        for line in file:
            yield _from_line(line)


def _to_line(record: StepRecord) -> str:
    values = {key: _writable(value) for key, value in record.to_dict().items()}
    return json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n"


def _from_line(line: bytes) -> StepRecord | None:
    try:
        values = json.loads(line)
        return StepRecord.from_dict({key: float(value) if value in NOT_FINITE else value for key, value in values.items()})
    except (ValueError, AttributeError, TypeError):
        return None


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _cannot(verb: str, path: Path, error: OSError) -> StorageError:
    return StorageError(Problem(f"cannot {verb} {path}", str(error.strerror or error), "check free space and permissions"))
