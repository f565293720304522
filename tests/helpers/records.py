"""Reads record files as a preparation does, and tells what came of each record."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmtrain.config.typed_data import OnBad, RecordData
from llmtrain.data.record_places import PlaceTeller
from llmtrain.data.record_units import stamp
from llmtrain.data.records import BadReason, BadRecord, Document, Unit, cut_units, find_records, read_unit


def source(path: Path | str, **changes: Any) -> RecordData:
    fields = {
        "kind": "jsonl",
        "validation_path": None,
        "validation_fraction": 0.05,
        "cache_dir": None,
        "text_field": "text",
        "on_bad": OnBad.ERROR,
        "max_document_bytes": 2**28,
    }
    return RecordData(path=str(path), **{**fields, **changes})


def units_of(path: Path | str, shard_bytes: int = 2**26, **changes: Any) -> list[Unit]:
    setting, reading = f"data.path={path}", source(path, **changes)
    found = find_records(str(path), setting, reading)
    return cut_units([stamp(file, found.name(file)) for file in found.paths], setting, reading, shard_bytes)


def records_of(path: Path | str, shard_bytes: int = 2**26, **changes: Any) -> list[Document | BadRecord]:
    """All records, each unit sent through pickle as to a worker."""
    units = [pickle.loads(pickle.dumps(unit)) for unit in units_of(path, shard_bytes, **changes)]
    return [record for unit in units for record in read_unit(unit, source(path, **changes))]


def told(records: Iterable[Document | BadRecord], path: Path) -> list[tuple[str, str | BadReason]]:
    """Where each record lies in its file, and its text or what is wrong with it."""
    teller = PlaceTeller()
    return [
        (teller.tell(record.place).removeprefix(f"{path}:"), record.text if isinstance(record, Document) else record.reason)
        for record in records
    ]


def line(text: Any) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"
