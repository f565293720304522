"""Parquet: a table a file, the text of its documents in a named column, read by row groups and a few rows at a time.

The column holds strings, or bytes that are UTF-8; a field of a struct is named by its dotted path. A row group that does not decode
is one bad record, and the ones after it are read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed_data import OnBad, RecordData
from llmtrain.data.jsonl import PARQUET_MAGIC, check_text
from llmtrain.data.paths import changed, unreadable
from llmtrain.data.record_units import BadReason, BadRecord, Document, SourceStamp, Storage, Unit
from llmtrain.plan.plan import Availability

SUFFIXES = (".parquet", ".parq", ".pq")
BATCH_BYTES = 8 << 20
"""Text read at a time, as far as the file says how long its texts are."""
MAX_BATCH_ROWS = 4096


def parquet_availability() -> Availability:
    """Whether Parquet files can be read."""
    found = importlib.util.find_spec("pyarrow") is not None
    return Availability(found, "" if found else "needs the package pyarrow: pip install pyarrow")


def row_group_units(file: SourceStamp, source: RecordData, shard_bytes: int) -> list[Unit]:
    """The units of one file: row groups together until their text has `shard_bytes` bytes.

    A file that is no Parquet file, or whose end is damaged, is one unit without row groups; reading it gives the bad record.

    Raises:
        DataError: no such column, one that holds no text, an unreadable file, or pyarrow is not installed.
    """
    if not parquet_availability().available:
        raise DataError(Problem(str(file.path), parquet_availability().reason))
    table = _open(file)
    if table is None:
        _refuse_other_files(file, source)
        return [Unit((file,), Storage.PARQUET, 0, 0, 0, file.size)]
    column = _column(table, file, source.text_field)
    units, start, rows, first_row, size = [], 0, 0, 0, 0
    for index in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(index)
        rows += group.num_rows
        size += group.column(column).total_uncompressed_size
        if size >= shard_bytes or index == table.metadata.num_row_groups - 1:
            units.append(Unit((file,), Storage.PARQUET, start, index + 1, first_row, size))
            start, first_row, size = index + 1, rows, 0
    return units


def _refuse_other_files(file: SourceStamp, source: RecordData) -> None:
    """Raise DataError for what was never a Parquet file, unless bad files are to be passed over."""
    with file.path.open("rb") as stream:
        is_parquet = stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    if source.on_bad is OnBad.ERROR and not is_parquet:
        raise DataError(Problem(str(file.path), "it is no Parquet file", "data=jsonl for JSON lines, or data.on_bad=skip"))


def read_rows(unit: Unit, source: RecordData) -> Iterator[Document | BadRecord]:
    """The records of a unit of row groups, in order; memory is that of one batch of rows.

    Raises:
        DataError: the file cannot be read, or is not what it was.
    """
    table = _open(unit.file)
    if table is None:
        yield BadRecord(unit.place(0), BadReason.DAMAGED, b"")
        return
    if unit.stop > table.metadata.num_row_groups:
        raise changed(unit.file.path)
    column = _column(table, unit.file, source.text_field)
    first = 0
    for index in range(unit.start, unit.stop):
        group = table.metadata.row_group(index)
        record = first
        for value in _values(table, index, source.text_field, _batch_rows(group, column)):
            found = value if isinstance(value, BadReason) else _decoded(value, source)
            if isinstance(found, BadReason):
                yield BadRecord(unit.place(record), found, value if isinstance(value, bytes) else b"")
            else:
                yield Document(found, unit, record)
            record += 1
        first += group.num_rows


def _open(file: SourceStamp) -> Any:
    """The file as pyarrow sees it; None if it cannot make sense of it."""
    import pyarrow
    import pyarrow.parquet

    try:
        with file.path.open("rb"):
            pass
    except OSError as error:
        raise unreadable(file.path, error) from error
    try:
        return pyarrow.parquet.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError):
        return None


def _column(table: Any, file: SourceStamp, name: str) -> int:
    """Number of the column among those without parts (a struct is one for each of its fields)."""
    import pyarrow

    schema = table.metadata.schema
    paths = [schema.column(index).path for index in range(len(schema))]
    if paths.count(name) != 1:
        rule = f"no column {name}; it has {', '.join(paths)}"
        raise DataError(Problem(str(file.path), rule, f"data.text_field={paths[0] if paths else 'COLUMN'}"))
    kind = _type(table.schema_arrow, name)
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or _is_binary(kind)):
        raise DataError(Problem(str(file.path), f"column {name} holds {kind} and no text", "data.text_field=COLUMN"))
    return paths.index(name)


def _type(schema: Any, name: str) -> Any:
    import pyarrow

    kind = pyarrow.struct(list(schema))
    for part in _steps(schema.names, name):
        kind = kind.field(part).type
    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def _is_binary(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind) or pyarrow.types.is_binary_view(kind)


def _steps(names: list[str], name: str) -> list[str]:
    """The fields on the way to a column: the column itself, or the parts of a dotted path."""
    return [name] if name in names else name.split(".")


def _batch_rows(group: Any, column: int) -> int:
    """Rows to read at once. Follows from the row group alone, so that cutting a file otherwise changes nothing."""
    mean_bytes = group.column(column).total_uncompressed_size // max(1, group.num_rows)
    return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // max(1, mean_bytes)))


def _values(table: Any, row_group: int, name: str, batch_rows: int) -> Iterator[bytes | None | BadReason]:
    """The column of a row group as bytes; ends with DAMAGED where it does not decode."""
    import pyarrow

    try:
        batches = table.iter_batches(batch_size=batch_rows, row_groups=[row_group], columns=[name], use_threads=False)
        for batch in batches:
            yield from _as_bytes(batch, name)
    except (pyarrow.ArrowException, OSError):
        yield BadReason.DAMAGED


def _as_bytes(batch: Any, name: str) -> list[bytes | None]:
    import pyarrow
    import pyarrow.compute

    first, *others = _steps(batch.schema.names, name)
    column = batch.column(first)
    if others:
        column = pyarrow.compute.struct_field(column, others)
    # As bytes, so that a string that is not UTF-8 is a bad record and not an exception.
    return column.cast(pyarrow.large_binary()).to_pylist()


def _decoded(value: bytes | None, source: RecordData) -> str | BadReason:
    if value is None:
        return BadReason.NULL
    if len(value) > source.max_document_bytes:
        return BadReason.TOO_LONG
    try:
        return check_text(value.decode("utf-8"), source.max_document_bytes)
    except UnicodeDecodeError:
        return BadReason.NOT_UTF8
