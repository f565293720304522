"""TensorBoard event files below the run folder, read back exactly.

Written with the record writer and the messages of the package tensorboard. Its own event writer, and torch's around it, keep records
in a queue that a kill would empty, and reach for TensorFlow's file system where TensorFlow is installed.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llmtrain.metrics.trackers import TrackedRun, Tracker

FILE_VERSION = "brain.Event:2"
"""From this version on, readers that have read steps already drop those from a start mark on."""
EVENT_FILES = "events.out.tfevents.[0-9]*.*"
HEAD_BYTES, FOOT_BYTES = 12, 4
"""Around the bytes of a record: their number (uint64) and its checksum, and their checksum."""
FSYNC_SECONDS = 30.0


def open_tensorboard(run: TrackedRun) -> TensorboardTracker:
    """A new event file in `<run folder>/tensorboard`; steps after `resumed_step`, which will be made again, leave the older ones,
    and what those lack of the steps before is taken from metrics.jsonl.

    Raises:
        ImportError: the package is missing.
        OSError: the folder cannot be written.
    """
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder = run.folder / "tensorboard"
    folder.mkdir(exist_ok=True)
    held = max((_cut(path, run.resumed_step, event_pb2.Event) for path in folder.glob(EVENT_FILES)), default=0)
    file = (folder / _next_name(folder)).open("xb")
    tracker = TensorboardTracker(file, RecordWriter(file), Messages(event_pb2.Event, summary_pb2.Summary, DT_DOUBLE))
    tracker.begin(held + 1)
    for step, values in run.history(after=held):
        tracker.log(step, values)
    return tracker


@dataclass(frozen=True)
class Messages:
    """What is used of tensorboard's messages."""

    event: Any
    summary: Any
    double: int
    """The type of a tensor of doubles."""


class TensorboardTracker(Tracker):
    """One event an update with all its numbers, as doubles (the older `simple_value` is a float of 32 bits).

    Args:
        file: the event file, just made.
        writer: frames what is written to `file`.
    """

    def __init__(self, file: BinaryIO, writer: Any, messages: Messages) -> None:
        self._file = file
        self._writer = writer
        self._messages = messages
        self._described: set[str] = set()
        """Names whose kind the file has already."""
        self._synced = time.monotonic()

    def begin(self, first_step: int) -> None:
        """Write the head of the file: its version, and a mark for a TensorBoard that runs and has seen later steps."""
        self._write(file_version=FILE_VERSION)
        self._write(step=first_step, session_log={"status": "START"})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._scalar(name, number) for name, number in values.items()]
        self._write(step=step, summary=self._messages.summary(value=scalars))
        if time.monotonic() - self._synced >= FSYNC_SECONDS:
            self._sync()

    def finish(self) -> None:
        self._sync()
        self._file.close()

    def abandon(self) -> None:
        self._file.close()

    def _scalar(self, name: str, number: float) -> Any:
        """A tensor without dimensions; the first of a name says that it is a scalar."""
        value = self._messages.summary.Value(tag=name)
        value.tensor.dtype = self._messages.double
        value.tensor.tensor_shape.SetInParent()
        value.tensor.double_val.append(number)
        if name not in self._described:
            self._described.add(name)
            value.metadata.plugin_data.plugin_name = "scalars"
        return value

    def _write(self, **fields: Any) -> None:
        """Hand an event to the operating system, so that a kill loses nothing."""
        self._writer.write(self._messages.event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def _cut(path: Path, last_step: int, event: Any) -> int:
    """Take the events after `last_step`, and an end that a kill has torn, out of a file; it is replaced as a whole.

    TensorBoard drops such steps by itself, but the class that other programs read event files with does so for floats only.

    Returns:
        The last step that is left; 0 when there is none.
    """
    held, staged = 0, path.with_name("cut.tmp")
    with path.open("rb") as old, staged.open("wb") as new:
        for step, record in _records(old, event):
            if step <= last_step:
                held = max(held, step)
                new.write(record)
        new.flush()
        os.fsync(new.fileno())
    os.replace(staged, path)
    return held


def _records(file: BinaryIO, event: Any) -> Iterator[tuple[int, bytes]]:
    """Step and whole bytes of each record, up to the first that is torn; a mark, which holds no values, has step 0."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    while len(head := file.read(HEAD_BYTES)) == HEAD_BYTES:
        length, checksum = struct.unpack("<QI", head)
        if checksum != masked_crc32c(head[:8]):
            return
        rest = file.read(length + FOOT_BYTES)
        content, foot = rest[:length], rest[length:]
        if foot != struct.pack("<I", masked_crc32c(content)):
            return
        found = event.FromString(content)
        yield found.step if found.HasField("summary") else 0, head + rest


def _next_name(folder: Path) -> str:
    """A name that sorts after those of earlier starts, however fast they followed or the clock was set back: readers go by names."""
    seconds = [int(path.name.split(".")[3]) for path in folder.glob(EVENT_FILES)]
    newest = max([int(time.time()), *(second + 1 for second in seconds)])
    return f"events.out.tfevents.{newest:010d}.{socket.gethostname()}.{os.getpid()}.0"
