"""Records of JSON lines, against lists written by hand and against the json module on the whole file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.records import line, records_of, source, told, units_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import DataError
from llmtrain.data import jsonl
from llmtrain.data.paths import check_unchanged
from llmtrain.data.records import BadReason, BadRecord, Document, read_unit

zstandard = pytest.importorskip("zstandard")


# JSON lines


def test_b33_every_kind_of_bad_record_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    kept = b'{"id": 7, "text": "\xc3\xa4 kept", "n": ' + b"1" * 5000 + b', "x": NaN}\r\n'
    rows: list[tuple[bytes, str | BadReason | None]] = [
        (b"\xef\xbb\xbf" + line("first"), "first"),
        (b"\n", None),
        (b" \t\r\n", None),
        (kept, "ä kept"),
        (line(""), BadReason.EMPTY),
        (line(None), BadReason.NULL),
        (b'{"txt": "a"}\n', BadReason.MISSING_FIELD),
        (line(12), BadReason.WRONG_TYPE),
        (line(["a", "b"]), BadReason.WRONG_TYPE),
        (b'["text"]\n', BadReason.WRONG_TYPE),
        (b"17\n", BadReason.WRONG_TYPE),
        (b"{'text': 'a'}\n", BadReason.NOT_JSON),
        (line("a")[:-1] + line("b"), BadReason.NOT_JSON),
        (b"[" * 200_000 + b"\n", BadReason.NOT_JSON),
        (b'{"text": "\xff"}\n', BadReason.NOT_UTF8),
        (b'{"text": "a \\ud800 b"}\n', BadReason.LONE_SURROGATE),
        (b'{"text": "\\ud83d\\ude00"}\n', "😀"),
        (line(" "), " "),
        (line("word " * 30), BadReason.TOO_LONG),
        (line("last")[:-1], "last"),
    ]
    path.write_bytes(b"".join(data for data, _ in rows))
    expected = [(str(number), found) for number, (_, found) in enumerate(rows, 1) if found is not None]
    for shard_bytes in (2**26, 1, 40):
        records = records_of(path, shard_bytes, max_document_bytes=100)
        assert told(records, path) == expected
    raw = [record.raw for record in records if isinstance(record, BadRecord)]
    assert raw[3] == b'{"text": 12}' and raw[-1] == line("word " * 30)[:-1]


@pytest.mark.parametrize("tail", [b'{"text": "half', b'{"text": "half \xc3', b'{"te'])
def test_b33_a_last_line_that_breaks_off_is_a_bad_record(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(line("whole") + tail)
    assert told(records_of(path), path) == [("1", "whole"), ("2", BadReason.CUT_OFF)]


def test_text_field_by_name_and_by_path(tmp_path: Path) -> None:
    path = tmp_path / "nested.jsonl"
    path.write_text('{"a": {"b": {"c": "deep"}, "b.c": "near"}, "a.b": "whole"}\n')
    for field, found in [
        ("a.b", "whole"),
        ("a.b.c", "near"),
        ("a.x", BadReason.MISSING_FIELD),
        ("a.b.c.d", BadReason.WRONG_TYPE),
    ]:
        assert told(records_of(path, text_field=field), path) == [("1", found)]
    path.write_text('{"a": {"b": {"c": "deep"}}}\n')
    assert told(records_of(path, text_field="a.b.c"), path) == [("1", "deep")]


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
contents = st.lists(
    st.one_of(
        texts.map(line),
        texts.map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode() + b"\r\n"),
        st.sampled_from([b"\n", b"  \n", b"nonsense\n", b"{}\n", line(None), b'{"text": "\xe2\x82'[:-1] + b"\n"]),
    ),
    max_size=12,
)


@given(lines=contents, shard_bytes=st.integers(1, 60), ends=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_gives_the_same_records(tmp_path: Path, lines: list[bytes], shard_bytes: int, ends: bool) -> None:
    """Places included, and the documents are those that the json module finds."""
    data = b"".join(lines) + line("x")
    path = tmp_path / "cut.jsonl"
    path.write_bytes(data if ends else data[:-1])
    units = units_of(path, shard_bytes)
    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units[:-1])] and units[-1].stop == path.stat().st_size
    assert sum(unit.source_bytes for unit in units) == path.stat().st_size
    whole = records_of(path)
    assert told(records_of(path, shard_bytes), path) == told(whole, path)
    expected = []
    for number, row in enumerate(data.split(b"\n")[:-1], 1):
        try:
            text = json.loads(row.decode()).get("text")
        except (ValueError, AttributeError):
            continue
        if text:
            expected.append((str(number), text))
    assert [found for found in told(whole, path) if not isinstance(found[1], BadReason)] == expected


def test_units_are_about_as_large_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line("x" * 80) * 100)
    sizes = [unit.source_bytes for unit in units_of(path, 1000)]
    assert all(size % 93 == 0 and 1000 - 93 < size < 1000 + 93 for size in sizes[:-1]) and sum(sizes) == 9300
    assert units_of(path, 1000) == units_of(path, 1000)


# Compression

MANY = b"".join(line(f"document {number}") for number in range(3000))


def zstd(*parts: bytes, content_size: bool = True) -> bytes:
    return b"".join(zstandard.ZstdCompressor(write_content_size=content_size).compress(part) for part in parts)


SKIPPED = b"\x5a\x2a\x4d\x18\x05\0\0\0skips"
PACKED: dict[str, bytes] = {
    "gz": gzip.compress(MANY),
    "gz of several members, cut inside a line": gzip.compress(MANY[:10_007]) + gzip.compress(MANY[10_007:]),
    "zst": zstd(MANY),
    "zst of several frames, cut inside a line": zstd(MANY[:10_007], b"", MANY[10_007:], content_size=False),
    "zst with skippable frames": SKIPPED + zstd(MANY[:9]) + SKIPPED + zstd(MANY[9:]) + SKIPPED,
    "not packed after all": MANY,
}


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".jsonl"])
@pytest.mark.parametrize("kind", list(PACKED))
def test_packed_files_are_told_by_their_content(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACKED[kind])
    assert told(records_of(path), path) == [(str(number + 1), f"document {number}") for number in range(3000)]
    (unit,) = units_of(path, 2**26)
    assert unit.source_bytes == len(PACKED[kind])
    if kind != "not packed after all":
        assert len(units_of(path, 1)) == 1


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def flip_the_middle(data: bytes) -> bytes:
    return flipped(data, len(data) // 2)


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data)])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        flip_the_middle,
        lambda data: flipped(data, len(data) - 2),
        lambda data: data + b"rubbish",
        lambda data: b"",
        lambda data: bytes(len(data)),
    ],
    ids=["half", "one byte short", "flipped", "checksum", "rubbish behind", "empty", "zeros"],
)
def test_b33_a_damaged_archive_is_one_bad_record(
    tmp_path: Path, pack: Callable[[bytes], bytes], spoil: Callable[[bytes], bytes]
) -> None:
    """What came before it is kept, and the place is where the text breaks off."""
    path = tmp_path / ("a.jsonl.gz" if pack is gzip.compress else "a.jsonl.zst")
    path.write_bytes(spoil(pack(MANY)))
    records = records_of(path)
    assert [record.reason for record in records if isinstance(record, BadRecord)] == [BadReason.DAMAGED]
    found = told(records[:-1], path)
    assert told(records[-1:], path) == [(str(len(found) + 1), BadReason.DAMAGED)]
    if (
        path.suffix == ".zst" or spoil is not flip_the_middle
    ):  # gzip sees a flipped bit at the end of the member, after the text
        assert found == [(str(number + 1), f"document {number}") for number in range(len(found))]
        assert isinstance(records[-1], BadRecord) and MANY.startswith(
            b"".join(line(text) for _, text in found) + records[-1].raw
        )


def test_text_before_the_damage_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(MANY) + gzip.compress(MANY)[:-3])
    assert len(records_of(path)) == 6001


# Memory


def peak_bytes(action: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", ["plain", "gz", "zst"])
def test_b33_a_giant_line_is_skipped_without_being_held(tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "LONG_LINE_BYTES", 1000)
    giant = b'{"text": "' + b"x" * 60_000_000 + b'"}\n'
    data = line("before") + giant + line("after")
    path = tmp_path / "a.jsonl"
    path.write_bytes({"plain": lambda: data, "gz": lambda: gzip.compress(data, 1), "zst": lambda: zstd(data)}[packed]())
    records: list[Document | BadRecord] = []

    def read() -> None:
        records.extend(records_of(path, max_document_bytes=1000))

    # zstd packs this line into one block after another of 128 KiB for a few bytes each: the worst there is.
    assert peak_bytes(read) < (30_000_000 if packed == "zst" else 12_000_000)
    assert told(records, path) == [("1", "before"), ("2", BadReason.LONG_LINE), ("3", "after")]
    assert isinstance(records[1], BadRecord) and giant.startswith(records[1].raw) and 0 < len(records[1].raw) <= 2**16


def test_a_short_document_is_kept_however_long_its_other_fields_are(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"html": "' + b"x" * 3_000_000 + b'", "text": "short"}\n' + line("y" * 101))
    assert told(records_of(path, max_document_bytes=100), path) == [("1", "short"), ("2", BadReason.TOO_LONG)]


def test_memory_is_that_of_a_line_and_not_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line("x" * 1000) * 40_000)

    def read() -> None:
        for unit in units_of(path):
            for _ in read_unit(unit, source(path)):
                pass

    assert peak_bytes(read) < 10_000_000


def test_empty_files_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="a.jsonl is empty"):
        units_of(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(line("x"))
    assert [unit.files[0].name for unit in units_of(tmp_path)] == ["b.jsonl"]


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(MANY)
    units = units_of(path, 10_000)
    stamps = {file for unit in units for file in unit.files}
    check_unchanged(stamps)
    path.write_bytes(MANY[:-1000])
    with pytest.raises(DataError, match="changed"):
        check_unchanged(stamps)
    with pytest.raises(DataError, match="changed"):
        list(read_unit(units[-1], source(path)))
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(read_unit(units[0], source(path)))
