"""What is scored is not trained on: files that data.path and data.validation_path both name, and many small files of records."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.records import line

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import ByteTokenizerConfig, DataConfig, OnBad, PrepareConfig
from llmtrain.data.corpus import build_corpus
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.prepare import find_preparation, prepare
from llmtrain.data.sources import describe_skipped
from llmtrain.data.units import Block, RecordUnit, WorkUnit, find_text

MakeConfig = Callable[..., DataConfig]
KINDS = ["txt", "jsonl", "parquet"]


def write(folder: Path, kind: str, count: int = 3) -> Path:
    """Files 0, 1, … of a document each, which says its number; the last one lies in a folder of its own."""
    (folder / "held").mkdir(parents=True)
    for number in range(count):
        path = folder / ("held" if number == count - 1 else "") / f"{number}.{kind}"
        text = f"document {number}\n"
        if kind == "parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.table({"text": [text]}), path)
        else:
            path.write_bytes(text.encode() if kind == "txt" else line(text))
    return folder


def config(make: MakeConfig, kind: str, path: Path | str, held_out: Path | str) -> DataConfig:
    data = make(Path(f"x.{kind}") if kind != "txt" else Path("x"))
    return replace(data, source=replace(data.source, path=str(path), validation_path=str(held_out)))  # type: ignore[type-var]


def numbers(data: DataConfig) -> tuple[list[int], list[int]]:
    """Documents of both splits."""
    found: dict[str, list[int]] = {"train": [], "validation": []}
    for block in blocks(find_text(data.source, 1 << 20).units(True)):  # type: ignore[arg-type]
        found[block.split].append(int(block.text.split()[1]))
    return found["train"], found["validation"]


def blocks(units: list[WorkUnit]) -> list[Block]:
    return [block for unit in units for block in unit.blocks(1 << 20) if isinstance(block, Block)]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_both_paths_name_are_not_trained_on(
    data_config: MakeConfig, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "all", kind)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder / "held" / f"2.{kind}")
    for held_out in (folder / "held", folder / "held" / f"2.{kind}", f"./all/../all/held/2.{kind}", "link"):
        data = config(data_config, kind, folder, held_out)
        assert numbers(data) == ([0, 1], [2])
        assert describe_skipped(find_text(data.source, 1 << 20).skipped) == "1 file is validation"  # type: ignore[arg-type]
    if kind != "txt":  # a path of text is no pattern
        assert numbers(config(data_config, kind, "all/**", f"{folder}/[12].{kind}")) == ([0, 2], [1])
    beside = write(tmp_path / "other", kind)
    data = config(data_config, kind, folder, beside)
    assert numbers(data) == ([0, 1, 2], [0, 1, 2]) and not find_text(data.source, 1 << 20).skipped.total()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_left_to_train_on_is_refused(
    data_config: MakeConfig, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "all", kind)
    monkeypatch.chdir(tmp_path)
    for path, held_out in [(folder, "./all"), (folder / f"0.{kind}", folder), (folder / "held", f"all/held/2.{kind}")]:
        with pytest.raises(DataError, match="nothing is left for training: data.validation_path names every file"):
            numbers(config(data_config, kind, path, held_out))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_scored_whole_is_both(data_config: MakeConfig, tmp_path: Path, kind: str) -> None:
    """`llmtrain evaluate` names one path twice, see train/saved_run.py."""
    folder = write(tmp_path / "all", kind)
    (folder / ".hidden").write_text("no text")
    data = config(data_config, kind, folder, folder)
    assert numbers(data) == ([0, 1, 2], [0, 1, 2])
    assert find_text(data.source, 1 << 20).skipped.total() == (kind == "txt")  # type: ignore[arg-type]


def test_the_run_card_says_how_many_files_are_validation(data_config: MakeConfig, tmp_path: Path) -> None:
    folder = write(tmp_path / "all", "txt", 5)
    (folder / "empty.txt").write_text("")
    corpus = build_corpus(
        config(data_config, "txt", folder, folder / "held"),
        ByteTokenizerConfig(),
        seed=0,
        vocab_size=None,
        progress=lambda line: None,
    )
    assert "1 file is validation, 1 file skipped (1 empty)" in corpus.summary


# Small files


@pytest.mark.parametrize("packed", [False, True])
def test_small_files_of_records_share_units(data_config: MakeConfig, tmp_path: Path, packed: bool) -> None:
    """However many there are: units are as large as elsewhere, in the order of the files, and no file is in two splits' units."""
    for number in range(300):
        path = tmp_path / f"{'held' if number >= 200 else 'all'}/{number:03}.jsonl{'.gz' if packed else ''}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(line(f"document {number} " * 5)) if packed else line(f"document {number} " * 5))
    for held_out, expected in [(tmp_path / "held", 2), (None, 1)]:
        data = data_config(Path("x.jsonl"))
        data = replace(
            data,
            source=replace(
                data.source, path=str(tmp_path / "all" if held_out else tmp_path), validation_path=held_out and str(held_out)
            ),
        )  # type: ignore[type-var]
        text = find_text(data.source, 1 << 20)  # type: ignore[arg-type]
        assert len(text.units(True)) == expected
        small = find_text(data.source, 1000).units(True)  # type: ignore[arg-type]
        assert all(isinstance(unit, RecordUnit) and unit.source_bytes <= 1000 for unit in small) and len(small) > expected
        for units in (text.units(True), small):
            assert [int(block.text.split()[1]) for block in blocks(units)] == list(range(300))


def test_places_in_small_files_are_those_of_the_file(data_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for name in "abc":
        (tmp_path / f"all/{name}.jsonl").write_bytes(line("good") + b"bad\n" + line("good too"))
    (tmp_path / "held.jsonl").write_bytes(line("held out"))
    data = config(data_config, "jsonl", tmp_path / "all", tmp_path / "held.jsonl")
    data = replace(data, source=replace(data.source, on_bad=OnBad.SKIP))  # type: ignore[type-var]
    beat = Heartbeat(lambda line: None)
    job = find_preparation(data, ByteTokenizerConfig(), PrepareConfig(None, None, 1 << 20), beat)
    assert prepare(job, beat).bad == {"not JSON": {"count": 3, "places": [f"{tmp_path}/all/{name}.jsonl:2" for name in "abc"]}}


# Places in large files


def large_file(path: Path) -> list[int]:
    """Writes a file with bad records; their lines."""
    bad = [7, 8, 400, 700, 701, 702, 703, 990]
    reasons = ["bad\n", '{"text": null}\n', "{}\n"]
    rows = [
        reasons[number % 3] if number in bad else json.dumps({"text": f"document {number}"}) + "\n" for number in range(1, 1001)
    ]
    path.write_text("".join(rows))
    return bad


@pytest.mark.parametrize("workers", [1, 3])
def test_b33_bad_records_of_cut_files_have_their_lines(data_config: MakeConfig, tmp_path: Path, workers: int) -> None:
    path = tmp_path / "large.jsonl"
    bad = large_file(path)
    data = data_config(path, on_bad=OnBad.QUARANTINE)
    beat = Heartbeat(lambda line: None)
    job = find_preparation(data, ByteTokenizerConfig(), PrepareConfig(None, workers, 300), beat)
    prepared = prepare(job, beat)
    told = {place for facts in prepared.bad.values() for place in facts["places"]}
    assert told == {f"{path}:{number}" for number in bad}
    copies = (prepared.folder / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(copy)["place"] for copy in copies] == [f"{path}:{number}" for number in bad]


def test_a_bad_record_that_ends_the_preparation_has_its_line(data_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    path.write_bytes(line("good") * 500 + b"bad\n")
    beat = Heartbeat(lambda line: None)
    job = find_preparation(data_config(path), ByteTokenizerConfig(), PrepareConfig(None, 1, 300), beat)
    with pytest.raises(DataError, match=r"large.jsonl:501\n"):
        prepare(job, beat)


# What files are known by


def key(data: DataConfig) -> Any:
    return find_text(data.source, 1 << 20).identity  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 100_000, 5_000_000, 9_999_990])
def test_a_copy_is_the_same_text_and_a_change_anywhere_is_not(data_config: MakeConfig, tmp_path: Path, place: int) -> None:
    """Of 10 MB: 64 samples leave no more than 100 kB between them."""
    path = tmp_path / "large.jsonl"
    body = bytearray(line("word " * 20) * 90_000)
    path.write_bytes(body)
    data, facts = data_config(path), path.stat()
    before = key(data)
    os.utime(path, ns=(0, facts.st_mtime_ns + 10**9))
    assert key(data) == before
    body[place : place + 110_000] = body[place : place + 110_000].replace(b"word", b"Word")
    path.write_bytes(body)
    os.utime(path, ns=(0, facts.st_mtime_ns))
    assert key(data) != before


# Linked folders


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_linked_folders_are_read_once(data_config: MakeConfig, tmp_path: Path, kind: str) -> None:
    """Also where links lead in a circle, and where two of them lead to one folder."""
    folder, elsewhere = write(tmp_path / "all", kind), tmp_path / "elsewhere"
    elsewhere.mkdir()
    text = "document 3\n"
    (elsewhere / f"3.{kind}").write_bytes(text.encode() if kind == "txt" else line(text))
    (folder / "link").symlink_to(elsewhere)
    (folder / "link again").symlink_to(elsewhere)
    (folder / "held" / "up").symlink_to(folder)
    (folder / "held" / "self").symlink_to(folder / "held")
    (elsewhere / "down").symlink_to(folder / "held")
    (tmp_path / f"x.{kind}").write_bytes(b"document 9\n" if kind == "txt" else line("document 9\n"))
    for path in [str(folder), *([f"{folder}/**"] if kind == "jsonl" else [])]:
        train, _ = numbers(config(data_config, kind, path, tmp_path / f"x.{kind}"))
        assert sorted(train) == [0, 1, 2, 3]
