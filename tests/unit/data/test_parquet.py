"""Documents of Parquet files, against the values that were written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.records import records_of, source, told, units_of

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import OnBad
from llmtrain.data.records import BadReason, BadRecord, Document, availability, read_unit

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write_table(path: Path, column: Any, name: str = "text", **options: Any) -> Path:
    pq.write_table(pa.table({"id": pa.array(range(len(column))), name: column}), path, **options)
    return path


VALUES = ["one", None, "", "ä", "five", "six", "seven"]
FOUND: list[str | BadReason] = ["one", BadReason.NULL, BadReason.EMPTY, "ä", "five", "six", "seven"]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())]
)
@pytest.mark.parametrize("shard_bytes", [2**26, 1])
def test_b33_parquet_columns_of_every_type(tmp_path: Path, kind: Any, shard_bytes: int) -> None:
    values = [None if value is None else value.encode() for value in VALUES] if "binary" in str(kind) else VALUES
    path = write_table(tmp_path / "a.parquet", pa.array(values, kind), row_group_size=3)
    units = units_of(path, shard_bytes, kind="parquet")
    assert len(units) == (1 if shard_bytes > 1 else 3)
    expected = [(f"row {number}", found) for number, found in enumerate(FOUND, 1)]
    assert told(records_of(path, shard_bytes, kind="parquet"), path) == expected


def test_parquet_field_of_a_struct(tmp_path: Path) -> None:
    rows = pa.array([{"body": {"text": "one"}, "n": 1}, {"body": None, "n": 2}, None, {"body": {"text": "four"}, "n": 4}])
    path = write_table(tmp_path / "a.parquet", rows, "doc")
    found = told(records_of(path, kind="parquet", text_field="doc.body.text"), path)
    assert [text for _, text in found] == ["one", BadReason.NULL, BadReason.NULL, "four"]
    path = write_table(tmp_path / "b.parquet", pa.array(["dotted"]), "doc.text")
    assert told(records_of(path, kind="parquet", text_field="doc.text"), path) == [("row 1", "dotted")]


def test_b33_empty_row_groups_and_bad_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    schema = pa.schema([("text", pa.binary())])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in ([b"one"], [], [b"\xff", b"three"], []):
            writer.write_table(pa.table({"text": pa.array(rows, pa.binary())}, schema), row_group_size=10)
    for shard_bytes in (1, 2**26):
        found = told(records_of(path, shard_bytes, kind="parquet"), path)
        assert found == [("row 1", "one"), ("row 2", BadReason.NOT_UTF8), ("row 3", "three")]
    (long,) = [record for record in records_of(path, kind="parquet", max_document_bytes=4) if record.place.endswith("row 3")]
    assert isinstance(long, BadRecord) and long.reason is BadReason.TOO_LONG


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("txt", "no column txt; it has id, text"),
        ("id", "column id holds int64 and no text"),
        ("text.x", "no column text.x"),
    ],
)
def test_a_wrong_column_lists_those_there_are(tmp_path: Path, field: str, rule: str) -> None:
    path = write_table(tmp_path / "a.parquet", pa.array(["x"]))
    with pytest.raises(DataError) as caught:
        units_of(path, kind="parquet", text_field=field)
    assert rule in str(caught.value)


def test_b33_damage_in_a_row_group_costs_that_row_group(tmp_path: Path) -> None:
    texts = ["".join(chr(97 + (number * step) % 26) for step in range(1, 40)) for number in range(300)]
    path = write_table(tmp_path / "a.parquet", pa.array(texts), row_group_size=100, use_dictionary=False, compression="zstd")
    group = pq.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    start = group.data_page_offset + group.total_compressed_size // 2
    data[start : start + 200] = bytes(200)
    path.write_bytes(data)
    for shard_bytes in (1, 2**26):
        records = records_of(path, shard_bytes, kind="parquet")
        assert [record.text for record in records if isinstance(record, Document)] == texts[:100] + texts[200:]
        (bad,) = [record for record in records if isinstance(record, BadRecord)]
        assert bad.reason is BadReason.DAMAGED and bad.place == f"{path}:row 101"


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-3], lambda data: b"", lambda data: b"PAR1 and no more", lambda data: data[:-40]]
)
def test_a_parquet_file_without_its_end_is_one_bad_record(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = write_table(tmp_path / "a.parquet", pa.array(["x"]))
    path.write_bytes(spoil(path.read_bytes()))
    (bad,) = records_of(path, kind="parquet", on_bad=OnBad.SKIP)
    assert isinstance(bad, BadRecord) and bad.reason is BadReason.DAMAGED and str(path) in bad.place


def test_a_file_of_the_other_kind_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    lines = tmp_path / "a.parquet"
    lines.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="it is no Parquet file") as caught:
        units_of(lines, kind="parquet")
    assert "data=jsonl" in str(caught.value)
    table = write_table(tmp_path / "b.jsonl", pa.array(["x"]))
    with pytest.raises(DataError, match="it is a Parquet file") as caught:
        units_of(table, on_bad=OnBad.SKIP)
    assert "data=parquet" in str(caught.value)


def test_parquet_memory_is_that_of_some_rows(tmp_path: Path) -> None:
    texts = [f"{number:06d}" * 2000 for number in range(6000)]  # 72 MB in one row group
    path = write_table(tmp_path / "a.parquet", pa.array(texts), use_dictionary=False)
    pool_before, most = pa.total_allocated_bytes(), 0
    for unit in units_of(path, kind="parquet"):
        for number, record in enumerate(read_unit(unit, source(path, kind="parquet"))):
            assert isinstance(record, Document) and record.text == texts[number]
            if number % 100 == 0:
                most = max(most, pa.total_allocated_bytes() - pool_before)
    assert most < 60_000_000


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(answer.available for answer in availability().values())
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    write_table(tmp_path / "a.parquet", pa.array(["x"]))
    for name in ("zstandard", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    for kind, package in (("jsonl", "zstandard"), ("parquet", "pyarrow")):
        with pytest.raises(DataError, match=f"pip install {package}"):
            units_of(tmp_path, kind=kind)
    answers = availability()
    assert answers["jsonl"].available
    assert "pip install pyarrow" in answers["parquet"].reason
