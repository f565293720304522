"""Files that hold many documents each, as units of work: what is where, and the documents of a unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed_data import RecordData
from llmtrain.data import jsonl, parquet
from llmtrain.data.paths import FoundFiles, find_files
from llmtrain.data.record_units import BadReason, BadRecord, Document, SourceStamp, Storage, Unit
from llmtrain.plan.plan import Availability

__all__ = [
    "BadReason",
    "BadRecord",
    "Document",
    "SourceStamp",
    "Storage",
    "Unit",
    "availability",
    "cut_units",
    "find_records",
    "read_unit",
]


def availability() -> dict[str, Availability]:
    """Which kinds of record files can be read here."""
    return {
        "jsonl": Availability(True),
        "parquet": parquet.parquet_availability(),
    }


def find_records(path: str, setting: str, source: RecordData) -> FoundFiles:
    """The files that `path` stands for: `source.path` or `source.validation_path`.

    Args:
        setting: how it was written, for messages, e.g. `data.path=shards`.

    Raises:
        ConfigError: the path names a home folder that is not there.
        DataError: no files, or a folder that cannot be read.
    """
    return find_files(path, setting, parquet.SUFFIXES if source.kind == "parquet" else jsonl.SUFFIXES)


def cut_units(files: Sequence[SourceStamp], setting: str, source: RecordData, shard_bytes: int) -> list[Unit]:
    """Files in order, cut into units; the same list wherever and whenever it is made.

    Args:
        shard_bytes: about how much text a unit holds at most. Compressed JSON lines cannot be cut: one unit a file.

    Raises:
        DataError: only empty files, a file that cannot be read, a column that is not there, a package not installed.
    """
    units: list[Unit] = []
    for file in files:
        if source.kind == "parquet":
            units += parquet.row_group_units(file, source, shard_bytes)
        else:
            units += jsonl.line_units(file, shard_bytes)
    if not units:
        many = f"all {len(files)} files are" if len(files) > 1 else f"{files[0].path} is"
        raise DataError(Problem(setting, f"{many} empty", f"{setting.partition('=')[0]}=PATH with text in it"))
    return units


def read_unit(unit: Unit, source: RecordData) -> Iterator[Document | BadRecord]:
    """The records of a unit in order: documents, and those that are none with the reason; the policy is the caller's.

    An empty text is no document. Memory is that of one record (JSON lines) or of one batch of rows (Parquet).

    Raises:
        DataError: the file cannot be read or is not what it was.
    """
    return parquet.read_rows(unit, source) if unit.storage is Storage.PARQUET else jsonl.read_lines(unit, source)
