"""`metrics.jsonl`: one JSON record per update, strictly increasing, exact, and right after any crash and resume.

Floats are written so that reading them gives the same bits. JSON has no word for values that are not finite: they are the strings
"NaN", "Infinity" and "-Infinity" (as protobuf's JSON form has them), which `float()` and the readers here turn back.

Reading needs no torch: a sweep watches the files of its jobs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from llmtrain.config.errors import Problem, StorageError

if TYPE_CHECKING:
    from llmtrain.metrics.meters import StepRecord

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
TAIL_BYTES = 1 << 16
"""What is read to find the newest record; a record has less than 2 KiB."""


class Sink(Protocol):
    """Where records go."""

    def replace_last(self, record: StepRecord) -> None:
        """Put a fuller record of the same update in the place of the newest one."""
        ...

    def write(self, record: StepRecord) -> None:
        """Keep the record of an update; steps are strictly increasing."""
        ...

    def sync(self) -> None:
        """Wait until all records are durable."""
        ...


class NoSink:
    """On ranks whose records another one writes."""

    def write(self, record: StepRecord) -> None:
        pass

    def replace_last(self, record: StepRecord) -> None:
        pass

    def sync(self) -> None:
        pass


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

    def replace_last(self, record: StepRecord) -> None:
        """Put a fuller record of the same update in the place of the newest one; a kill leaves the one or the other.

        Raises:
            StorageError: the disk refuses; the record stays as it was.
        """
        assert record.step == self._last_step, f"step {record.step} for step {self._last_step}"
        try:
            _rewrite(self._path, record.step - 1, record)
            self._file.close()
            self._file = self._path.open("a", encoding="utf-8", newline="\n")
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
    try:
        last_step, num_damaged = _rewrite(path, resumed_step)
        return JsonlSink(path, path.open("a", encoding="utf-8", newline="\n"), last_step, num_damaged)
    except OSError as error:
        raise _cannot("write", path, error) from error


def _rewrite(path: Path, kept_step: int, added: StepRecord | None = None) -> tuple[int, int]:
    """Keep the records up to `kept_step`, and add one, in a file that takes the place of this one in a rename.

    Returns:
        The last step that is kept, and how many lines were torn.
    """
    staged = path.with_name(path.name + ".tmp")
    last_step = num_damaged = 0
    with staged.open("w", encoding="utf-8", newline="\n") as file, _lines(path) as lines:
        for line in lines:
            record = _step_record(line)
            if record is None:
                num_damaged += 1
            elif last_step < record.step <= kept_step:
                file.write(_to_line(record))
                last_step = record.step
        if added is not None:
            file.write(_to_line(added))
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)
    return last_step, num_damaged


@dataclass(frozen=True)
class Metrics:
    """What a file of metrics holds."""

    records: tuple[Mapping[str, Any], ...]
    """Plain values under the names of `METRIC_KEYS`, in the order of the file; each has a whole number `step` and a number `loss`."""
    num_damaged: int
    """Lines that are no records and were left out."""


def read_metrics(path: Path) -> Metrics:
    """Everything in the file of a run, which may still be going on: a last line without its end is not there yet, nor is a file
    before the first update.

    Raises:
        StorageError: the file cannot be read.
    """
    found = list(_each_line(path))
    records = tuple(values for values in found if values is not None)
    return Metrics(records, len(found) - len(records))


def each_record(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of `read_metrics` one after the other, so that a long file takes no memory.

    Raises:
        StorageError: the file cannot be read.
    """
    return (values for values in _each_line(path) if values is not None)


def newest_record(path: Path) -> Mapping[str, Any] | None:
    """The last record in the file, read from its end however long it is; None where there is none.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot("read", path, error) from error
    # The first line may have lost its beginning, and then it is no record.
    found = (_parse(line) for line in reversed(lines) if line.endswith(b"\n"))
    return next((values for values in found if values is not None), None)


def record_of_step(path: Path, step: int) -> StepRecord | None:
    """The record of one update; None where the file has none that can be read.

    Raises:
        StorageError: the file cannot be read.
    """
    from llmtrain.metrics.meters import StepRecord  # here: torch comes with it

    found = next((values for values in read_metrics(path).records if values["step"] == step), None)
    return None if found is None else StepRecord.from_dict(found)


def finite_json(value: Any) -> Any:
    """A document for JSON: every float in it, at any depth, that is not finite becomes one of the words of `NOT_FINITE`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_json(item) for item in value]
    return value


def _each_line(path: Path) -> Iterator[dict[str, Any] | None]:
    """The values of each line that has its end; None for one that is no record."""
    try:
        with _lines(path) as lines:
            yield from (_parse(line) for line in lines if line.endswith(b"\n"))
    except OSError as error:
        raise _cannot("read", path, error) from error


def _lines(path: Path) -> AbstractContextManager[Iterable[bytes]]:
    """Context with the lines of a file; none where there is no file."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return nullcontext(())


def _to_line(record: StepRecord) -> str:
    return json.dumps(finite_json(record.to_dict()), allow_nan=False, separators=(",", ":")) + "\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """The values of a line; None for one that is torn or is no record."""
    try:
        values = {key: float(value) if value in NOT_FINITE else value for key, value in json.loads(line).items()}
    except (ValueError, AttributeError, TypeError):
        return None
    numbers = all(isinstance(value, (int, float)) for key, value in values.items() if key != "memory")
    return values if numbers and isinstance(values.get("step"), int) and "loss" in values else None


def _step_record(line: bytes) -> StepRecord | None:
    """The record of a line; None also for one that this version does not write."""
    from llmtrain.metrics.meters import StepRecord  # here: torch comes with it

    values = _parse(line)
    try:
        return None if values is None else StepRecord.from_dict(values)
    except (ValueError, AttributeError, TypeError):
        return None


def _cannot(verb: str, path: Path, error: OSError) -> StorageError:
    return StorageError(Problem(f"cannot {verb} {path}", str(error.strerror or error), "check free space and permissions"))
