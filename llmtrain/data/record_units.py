"""What reading records is made of: documents, records that are none, and the stretches of files that are read on their own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from llmtrain.config.errors import DataError, Problem
from llmtrain.data.paths import unreadable

STAMP_BYTES = 1 << 16
"""Hashed at each end of a file."""
KEPT_BYTES = 1 << 16
"""Of a record that is too long to be held in memory, this much is kept to show."""
_COUNT_BYTES = 1 << 22


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
    ends_sha256: str
    """Of the first and the last STAMP_BYTES."""


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
        """`file:line` or `file:row` of a record, which is counted from 0 in the unit and from 1 in the file.

        The first call for lines that start inside a file reads the file up to there.
        """
        if self.storage is Storage.PARQUET:
            return f"{self.file.path}:row {self.first_row + record + 1}"
        return f"{self.file.path}:{(_lines_before(self.file, self.start) if self.start else 0) + record + 1}"


@dataclass(frozen=True)
class Document:
    """The text of one record."""

    text: str
    unit: Unit
    record: int
    """Number within the unit, from 0."""

    @property
    def place(self) -> str:
        """`file:line` or `file:row`."""
        return self.unit.place(self.record)


@dataclass(frozen=True)
class BadRecord:
    """A record that is no document."""

    place: str
    """`file:line` or `file:row`."""
    reason: BadReason
    raw: bytes
    """As it was found; the beginning of one that is too long; what is left of one in a damaged file."""


def stamp(path: Path, name: str) -> SourceStamp:
    """Look at a file: size, time and a hash of its ends.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            facts = path.stat()
            digest = hashlib.sha256(file.read(STAMP_BYTES))
            file.seek(max(0, facts.st_size - STAMP_BYTES))
            digest.update(file.read(STAMP_BYTES))
    except OSError as error:
        raise unreadable(path, error) from error
    return SourceStamp(path, name, facts.st_size, facts.st_mtime_ns, digest.hexdigest())


def check_unchanged(files: Iterable[SourceStamp]) -> None:
    """Raise DataError if a file is not what it was when it was found."""
    for file in files:
        if stamp(file.path, file.name) != file:
            raise changed(file.path)


def changed(path: Path) -> DataError:
    """The message for a file that is not what it was."""
    return DataError(Problem(str(path), "it changed while it was being read", "start again when nothing writes to it"))


_counted: dict[SourceStamp, tuple[int, int]] = {}
"""File -> (byte, lines before it), the furthest that this process has counted: units come in order, so a file is read once."""


def _lines_before(file: SourceStamp, byte: int) -> int:
    start, lines = _counted.get(file, (0, 0))
    if start > byte:
        start, lines = 0, 0
    try:
        with file.path.open("rb") as stream:
            stream.seek(start)
            while start < byte and (block := stream.read(min(_COUNT_BYTES, byte - start))):
                start += len(block)
                lines += block.count(b"\n")
    except OSError as error:
        raise unreadable(file.path, error) from error
    _counted[file] = (start, lines)
    return lines
