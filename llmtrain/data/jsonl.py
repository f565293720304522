"""JSON lines: one JSON object a line, its text in a named field; plain, gzip or zstd.

A line ends with a line feed; a carriage return before it, white space around the object and a byte order mark at the beginning of
a file mean nothing. A line with nothing but white space is no record and is not counted. A last line without a line feed is a
record if it is whole. Compression is told by the first bytes, several gzip members or zstd frames after each other are one file.

Only plain files are cut into several units: nothing in a compressed one says where a line begins. A damaged archive is read up to the
damage; gzip may notice it only at the end of a member, and then text before that place is wrong too.
"""

from __future__ import annotations

import codecs
import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed_data import RecordData
from llmtrain.data.paths import changed, unreadable
from llmtrain.data.record_units import KEPT_BYTES, BadReason, BadRecord, Document, SourceStamp, Storage, Unit
from llmtrain.plan.plan import Availability

SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst"))
BLOCK_BYTES = 1 << 20
_ZSTD_BLOCK_BYTES = 1 << 8
"""Compressed bytes decoded at once: 4 of them can become 128 KiB, and nothing bounds what comes out but what goes in."""
_ESCAPE_BYTES = 6
"""A byte of text takes at most this many in JSON, as in `\\u0001`."""
LONG_LINE_BYTES = 1 << 28
"""However short documents have to be, a line up to this length is read: its other fields may be long."""
_NAMES_BYTES = 1 << 20
"""Room for names and punctuation around a text of that length."""
_SEARCH_BYTES = 1 << 16
_MAGIC = {b"\x1f\x8b": Storage.GZIP, b"\x28\xb5\x2f\xfd": Storage.ZSTD}
# Frames to be skipped, with which pzstd begins.
_MAGIC |= {bytes([low, 0x2A, 0x4D, 0x18]): Storage.ZSTD for low in range(0x50, 0x60)}
PARQUET_MAGIC = b"PAR1"
_PACKED = {".gz": Storage.GZIP, ".zst": Storage.ZSTD}
# Whole numbers are never the text, and as a float one of any length is read: int() refuses those of over 4300 digits.
_decode = json.JSONDecoder(parse_int=float).decode


class _Damaged(Exception):
    """A compressed file breaks off or does not decode."""


class _Line(NamedTuple):
    data: bytes
    whole: bool = True
    """Ended by a line feed."""
    too_long: bool = False
    """`data` is only its beginning."""
    damaged: bool = False
    """The file cannot be read past `data`."""


def zstd_availability() -> Availability:
    """Whether .zst files can be read."""
    found = importlib.util.find_spec("zstandard") is not None
    return Availability(found, "" if found else "needs the package zstandard: pip install zstandard")


def line_units(file: SourceStamp, shard_bytes: int) -> list[Unit]:
    """The units of one file: a plain one is cut at the first line that begins at or after each multiple of `shard_bytes`.

    Raises:
        DataError: the file cannot be read, or the package that unpacks it is not installed.
    """
    storage = _storage(file)
    if storage is Storage.ZSTD and not zstd_availability().available:
        raise DataError(Problem(str(file.path), zstd_availability().reason))
    if storage is not Storage.PLAIN:
        return [Unit((file,), storage, 0, file.size, 0, file.size)]
    units, start = [], 0
    try:
        with file.path.open("rb") as stream:
            while start < file.size:
                stop = _line_start(stream, (start // shard_bytes + 1) * shard_bytes, file.size)
                units.append(Unit((file,), storage, start, stop, 0, stop - start))
                start = stop
    except OSError as error:
        raise unreadable(file.path, error) from error
    return units


def read_lines(unit: Unit, source: RecordData) -> Iterator[Document | BadRecord]:
    """The records of a unit of lines, in order.

    Memory is that of one line; one longer than any with a document in it should be is skipped unread.

    Raises:
        DataError: the file cannot be read or is shorter than it was.
    """
    limit = max(_ESCAPE_BYTES * source.max_document_bytes, LONG_LINE_BYTES) + _NAMES_BYTES
    for record, line in enumerate(_lines(_blocks(unit), limit)):
        if record == 0 and unit.start == 0:
            line = line._replace(data=line.data.removeprefix(codecs.BOM_UTF8))
        if not (line.too_long or line.damaged) and (not line.data or line.data.isspace()):
            continue
        found = _text(line, source)
        if isinstance(found, BadReason):
            yield BadRecord(unit.place(record), found, line.data)
        else:
            yield Document(found, unit, record)


def _storage(file: SourceStamp) -> Storage:
    try:
        with file.path.open("rb") as stream:
            head = stream.read(_SEARCH_BYTES)
    except OSError as error:
        raise unreadable(file.path, error) from error
    if head.startswith(PARQUET_MAGIC):
        raise DataError(Problem(str(file.path), "it is a Parquet file and no JSON lines", "data=parquet"))
    for magic, storage in _MAGIC.items():
        if head.startswith(magic):
            return storage
    # Downloads are sometimes unpacked on the way and keep their name; anything else of that name is a damaged file.
    plain = head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
    return Storage.PLAIN if plain else _PACKED.get(file.path.suffix, Storage.PLAIN)


def _line_start(stream: BinaryIO, byte: int, size: int) -> int:
    """First byte at or after `byte` at which a line begins; `size` where none does."""
    if byte >= size:
        return size
    stream.seek(byte - 1)
    while block := stream.read(_SEARCH_BYTES):
        if (place := block.find(b"\n")) >= 0:
            return min(size, stream.tell() - len(block) + place + 1)
    return size


def _text(line: _Line, source: RecordData) -> str | BadReason:
    """The text of a record, or why there is none."""
    if line.damaged:
        return BadReason.DAMAGED
    if line.too_long:
        return BadReason.LONG_LINE
    try:
        record = _decode(line.data.decode("utf-8"))
    except UnicodeDecodeError:
        return BadReason.NOT_UTF8 if line.whole else BadReason.CUT_OFF
    except (ValueError, RecursionError):  # the latter: brackets nested deeper than Python can follow
        return BadReason.NOT_JSON if line.whole else BadReason.CUT_OFF
    return check_text(_field(record, source.text_field), source.max_document_bytes)


def _field(record: Any, name: str) -> Any:
    """A field by name, or by dotted path where no field has the whole name; BadReason where there is none."""
    if not isinstance(record, dict):
        return BadReason.WRONG_TYPE
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    return _field(record[first], rest) if dot and first in record else BadReason.MISSING_FIELD


def check_text(value: Any, max_bytes: int) -> str | BadReason:
    """`value` if it is a text that may be a document, else why not."""
    if isinstance(value, BadReason):
        return value
    if value is None:
        return BadReason.NULL
    if not isinstance(value, str):
        return BadReason.WRONG_TYPE
    if not value:
        return BadReason.EMPTY
    try:
        return value if len(value.encode("utf-8")) <= max_bytes else BadReason.TOO_LONG
    except UnicodeEncodeError:
        return BadReason.LONE_SURROGATE


def _lines(blocks: Iterable[bytes], limit: int) -> Iterator[_Line]:
    """Lines without their line feeds; of one with more than `limit` bytes only the beginning."""
    held: list[bytes] = []
    size = 0
    try:
        for block in blocks:
            *ended, rest = block.split(b"\n")
            for piece in ended:
                yield _line(held, piece, size + len(piece) > limit, whole=True)
                held, size = [], 0
            if size <= limit:
                held.append(rest)
            size += len(rest)
    except _Damaged:
        yield _Line(b"".join(held)[:KEPT_BYTES], damaged=True)
        return
    if size:
        yield _line(held, b"", size > limit, whole=False)


def _line(held: list[bytes], last: bytes, too_long: bool, *, whole: bool) -> _Line:
    data = b"".join([*held, last])
    return _Line(data[:KEPT_BYTES] if too_long else data, whole, too_long)


def _blocks(unit: Unit) -> Iterator[bytes]:
    """The bytes of a unit, unpacked."""
    path = unit.file.path
    try:
        with path.open("rb") as stream:
            if unit.storage is Storage.PLAIN:
                yield from _plain_blocks(stream, unit)
            elif not unit.file.size:
                raise _Damaged
            else:
                yield from _gzip_blocks(stream) if unit.storage is Storage.GZIP else _zstd_blocks(stream, path)
    except OSError as error:
        raise unreadable(path, error) from error


def _plain_blocks(stream: BinaryIO, unit: Unit) -> Iterator[bytes]:
    stream.seek(unit.start)
    left = unit.stop - unit.start
    while left:
        block = stream.read(min(BLOCK_BYTES, left))
        if not block:
            raise changed(unit.file.path)
        left -= len(block)
        yield block


def _gzip_blocks(stream: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=stream) as file:
        while True:
            try:
                block = file.read1(BLOCK_BYTES)  # what there is: read() would lose what came before damage
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise _Damaged from error
            if not block:
                return
            yield block


def _zstd_blocks(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    # Its file reader takes a file that breaks off for one that ends; an object for each frame knows the end of the frame.
    import zstandard

    def new_frame() -> Any:
        return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

    frame, begun = new_frame(), False
    while data := stream.read(_ZSTD_BLOCK_BYTES):
        while data:
            try:
                block = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _Damaged from error
            if block:
                yield block
            begun, data = not frame.eof, frame.unused_data
            if frame.eof:
                frame = new_frame()
    if begun:
        raise _Damaged
