"""Where a rank is: phase, step, micro-batch and how many collectives it has entered.

The trainer writes it several times a micro-batch, the watch and the launcher read it to say which rank is behind, and where. Kept in
a mapped file it survives SIGKILL: what was stored in a shared mapping belongs to the kernel, not to the process.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PHASE_BYTES = 24
_PAYLOAD = struct.Struct(f"<5q{_PHASE_BYTES}s")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 128
_NUM_SLOTS = 2


@dataclass(frozen=True)
class Snapshot:
    """A position at one moment. Two that are equal mean that nothing has moved between them."""

    phase: str
    step: int
    """Update that is being made, from 1; 0 before the first."""
    microbatch: int
    """Micro-batch of this rank within the update, from 0."""
    collectives: int
    """Collectives and meetings entered so far; the rank with fewer is the one that the others wait for."""
    ticks: int
    """Signs of life within a long phase."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Snapshot:
        counts = (int(values[name]) for name in ("step", "microbatch", "collectives", "ticks"))
        return cls(str(values["phase"]), *counts)


class Position:
    """The position of this process; changed by the main thread and the threads of backward, read by the watch's."""

    def __init__(self) -> None:
        self.phase = "start"
        self.step = 0
        self.microbatch = 0
        self.collectives = 0
        self.ticks = 0

    def enter(self, phase: str) -> None:
        """Begin `phase` (at most 24 ASCII characters); the one before ends."""
        self.phase = phase
        self._changed()

    def at_step(self, step: int) -> None:
        """Begin update `step`, with its micro-batch 0."""
        self.step = step
        self.microbatch = 0
        self._changed()

    def at_microbatch(self, index: int) -> None:
        """Begin micro-batch `index` of the update."""
        self.microbatch = index
        self._changed()

    def issued(self) -> None:
        """One more collective or meeting is being entered; called before it can wait."""
        self.collectives += 1
        self._changed()

    def tick(self) -> None:
        """Something long still moves: a status of the data preparation, a batch of an evaluation."""
        self.ticks += 1
        self._changed()

    def snapshot(self) -> Snapshot:
        """The position now. Read while another thread changes it, fields of two neighbouring moments can meet."""
        return Snapshot(self.phase, self.step, self.microbatch, self.collectives, self.ticks)

    def _changed(self) -> None:
        pass


class _MappedPosition(Position):
    """A position whose every change is stored in a mapping, in two slots by turns.

    A slot is a serial number, the fields and a checksum over both. The slot that is not being written is whole at every moment, on
    any processor's memory order, so a reader always finds one and a process that is killed within a change leaves the change before.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        super().__init__()
        self._mapping = mapping
        self._serial = 0
        self._changed()

    def _changed(self) -> None:
        self._serial = serial = self._serial + 1
        phase = self.phase.encode("ascii", "replace")
        payload = _PAYLOAD.pack(serial, self.step, self.microbatch, self.collectives, self.ticks, phase)
        start = serial % _NUM_SLOTS * _SLOT_BYTES
        record = payload + _CHECKSUM.pack(zlib.crc32(payload))
        self._mapping[start : start + len(record)] = record


def mapped_position(file: Path) -> Position:
    """A position kept in `file` too, which is made or emptied; one change takes about a microsecond.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, _NUM_SLOTS * _SLOT_BYTES)
        return _MappedPosition(mmap.mmap(descriptor, _NUM_SLOTS * _SLOT_BYTES))
    finally:
        os.close(descriptor)


def read_position(file: Path) -> Snapshot | None:
    """Last position stored by the process that keeps its own in `file`; None where there is no file or no whole record in it."""
    if not file.is_file():
        return None
    data = file.read_bytes()
    found = [slot for start in range(0, _NUM_SLOTS * _SLOT_BYTES, _SLOT_BYTES) if (slot := _read_slot(data, start))]
    return max(found, key=lambda slot: slot[0])[1] if found else None


def _read_slot(data: bytes, start: int) -> tuple[int, Snapshot] | None:
    """Serial number and position of a slot; None while it is being written, and before it ever was."""
    end = start + _PAYLOAD.size
    if len(data) < end + _CHECKSUM.size or _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(data[start:end]):
        return None
    serial, step, microbatch, collectives, ticks, phase = _PAYLOAD.unpack_from(data, start)
    return serial, Snapshot(phase.rstrip(b"\0").decode("ascii"), step, microbatch, collectives, ticks)
