"""What reading records is made of: documents, records that are none, and the stretches of files that are read on their own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llmtrain.data.paths import unreadable
from llmtrain.data.record_places import place_from

STAMP_BYTES = 1 << 16
STAMP_STRETCHES = 64
"""Of a file, up to this many stretches of STAMP_BYTES are hashed: all of a small one."""
KEPT_BYTES = 1 << 16
"""Of a record that is too long to be held in memory, this much is kept to show."""


class BadReason(StrEnum):
    """Why a record is no document."""

    EMPTY = "empty text"
    NULL = "null instead of a text"
    MISSING_FIELD = "without the text field"
    WRONG_TYPE = "something other than a text"
    NOT_JSON = "not JSON"
    NOT_UTF8 = "not UTF-8"
    CUT_OFF = "cut off by the end of the file"
    TOO_LONG = "longer than data.max_document_bytes"
    LONG_LINE = "line longer than 256 MiB and 6 x data.max_document_bytes"
    LONE_SURROGATE = "half of a surrogate pair"
    DAMAGED = "damaged file, what follows is lost"


class Storage(StrEnum):
    """How the records of a file are stored."""

    PLAIN = "plain"
    GZIP = "gzip"
    ZSTD = "zstd"
    PARQUET = "parquet"


@dataclass(frozen=True)
class SourceStamp:
    """A file as it was when it was found."""

    path: Path
    name: str
    """Path below the folder that was named: the same wherever that lies."""
    size: int
    """Bytes."""
    modified_ns: int
    sample_sha256: str
    """Of its content, or of evenly spaced stretches, the first and the last included."""


@dataclass(frozen=True)
class Unit:
    """A stretch of a file that one process reads on its own.

    Units in order, and the records of each in order, are the source: how it is cut changes nothing.
    """

    files: tuple[SourceStamp, ...]
    """The one file it lies in."""
    storage: Storage
    start: int
    """First byte of lines; first row group of a Parquet file."""
    stop: int
    """One after the last."""
    first_row: int
    """Rows before `start`; lines are counted only when somebody asks for a place."""
    source_bytes: int
    """Bytes it stands for: of the file, or of the uncompressed text column of a Parquet file."""

    @property
    def file(self) -> SourceStamp:
        return self.files[0]

    @property
    def where(self) -> str:
        """Where it begins, told without reading anything."""
        if not self.start:
            return str(self.file.path)
        return f"{self.file.path} from {f'row {self.first_row + 1}' if self.storage is Storage.PARQUET else f'byte {self.start}'} on"

    def place(self, record: int) -> str:
        """Where a record lies, which is counted from 0 in the unit; `record_places` says how it is told."""
        if self.storage is Storage.PARQUET:
            return f"{self.file.path}:row {self.first_row + record + 1}"
        return place_from(self.file.path, self.start, record)


@dataclass(frozen=True)
class Document:
    """The text of one record."""

    text: str
    unit: Unit
    record: int
    """Number within the unit, from 0."""

    @property
    def place(self) -> str:
        """Where it lies, see `record_places`."""
        return self.unit.place(self.record)


@dataclass(frozen=True)
class BadRecord:
    """A record that is no document."""

    place: str
    """Where it lies, see `record_places`."""
    reason: BadReason
    raw: bytes
    """As it was found; the beginning of one that is too long; what is left of one in a damaged file."""


def stamp(path: Path, name: str) -> SourceStamp:
    """Look at a file: size, time and a hash of its content, or of samples where there is much.

    Raises:
        DataError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            facts = path.stat()
            last = max(0, facts.st_size - STAMP_BYTES)
            count = min(STAMP_STRETCHES, -(-facts.st_size // STAMP_BYTES))
            for number in range(count):
                file.seek(last * number // max(1, count - 1))
                digest.update(file.read(STAMP_BYTES))
    except OSError as error:
        raise unreadable(path, error) from error
    return SourceStamp(path, name, facts.st_size, facts.st_mtime_ns, digest.hexdigest())
