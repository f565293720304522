"""Text to prepared folders: never stale, the same however it is made, where it was asked for."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.prepared import SETTINGS, SMALL, TEXTS, content, documents, entries, ids, job_of, prepare_path

from llmtrain.config.errors import ConfigError, DataError, StorageError
from llmtrain.config.typed_data import BpeTokenizerConfig, ByteTokenizerConfig, CharTokenizerConfig, DataConfig, OnBad, Packing
from llmtrain.data import prepare as prepare_module
from llmtrain.data.staging import cache_folder
from llmtrain.data.tokenizer import ByteTokenizer

MakeFolder = Callable[[Sequence[str]], Path]
MakeRecords = Callable[[Sequence[str]], Path]
MakeConfig = Callable[..., DataConfig]


def test_a_second_run_uses_what_the_first_prepared(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_config(make_folder(TEXTS))
    first = prepare_path(data)
    monkeypatch.setattr(prepare_module, "_make", lambda *args: pytest.fail("prepared twice"))
    again = prepare_path(replace(data, sequence_length=64, packing=Packing.PADDED))
    assert again.train.sha256 == first.train.sha256
    assert (first.is_new, again.is_new) == (True, False)
    assert isinstance(again.train.parts[0].base, np.memmap)


def test_stale_cache_is_missed_when_anything_that_changes_ids_changes(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    folder = make_folder(TEXTS)
    data = data_config(folder)
    variants: list[tuple[DataConfig, Any]] = [
        (data, ByteTokenizerConfig()),
        (data, CharTokenizerConfig()),
        (data, BpeTokenizerConfig(280)),
        (data, BpeTokenizerConfig(290)),
        (replace(data, bos=False), ByteTokenizerConfig()),
        (replace(data, eos=False), ByteTokenizerConfig()),
        (data_config(folder, fraction=0.5), ByteTokenizerConfig()),
        (data_config(folder, validation_path=str(folder)), ByteTokenizerConfig()),
    ]
    keys = [job_of(*variant).key for variant in variants]
    for index, text in enumerate(TEXTS):  # documents of both splits, at equal length
        (folder / f"{index:04d}.txt").write_text(text.replace("document", "Document"))
        keys.append(job_of(data).key)
    assert len(set(keys)) == len(keys)


def test_stale_cache_of_records_is_missed(make_records: MakeRecords, data_config: MakeConfig) -> None:
    path = make_records(TEXTS)
    data = data_config(path)
    variants = [
        data,
        data_config(path, fraction=0.5),
        data_config(path, text_field="other"),
        data_config(path, on_bad=OnBad.SKIP),
        data_config(path, max_document_bytes=10),
        data_config(path, validation_path=str(path)),
    ]
    keys = [job_of(variant).key for variant in variants]
    stamp = path.stat()
    path.write_text(path.read_text().replace("document 3", "Document 3"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # told by the content of its ends alone
    keys.append(job_of(data).key)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    keys.append(job_of(data).key)
    assert len(set(keys)) == len(keys)


def test_the_key_does_not_hold_where_the_text_lies(make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path) -> None:
    folder = make_folder(TEXTS)
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert job_of(data_config(folder)).key == job_of(data_config(tmp_path / "elsewhere")).key


def test_changed_text_of_equal_length_gives_new_tokens(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    folder = make_folder(["aaaa bbbb\n" * 20])
    data = data_config(folder)
    prepare_path(data)
    (folder / "0000.txt").write_text("cccc bbbb\n" * 20)
    assert ord("c") in ids(prepare_path(data).train)
    assert len(entries(data)) == 2


def test_shards_join_to_the_same_tokens_whatever_their_size(data_config: MakeConfig, tmp_path: Path) -> None:
    """A document longer than a shard goes on in the next one: no border, no second BOS, none lost."""
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {i} of a long text, {i * i}\n" for i in range(60)))
    data = data_config(path)
    whole = prepare_path(data)
    assert whole.train.documents == 1
    for size in (50, 64, 300):
        cut = prepare_path(data, settings=replace(SETTINGS, shard_bytes=size))
        assert len(cut.train.parts) > 3
        for split in ("train", "validation"):
            one, other = getattr(whole, split), getattr(cut, split)
            assert ids(one) == ids(other) and one.offsets().tolist() == other.offsets().tolist()
            assert (one.source_bytes, one.byte_counts) == (other.source_bytes, other.byte_counts)


def test_shards_of_bpe_join_to_the_ids_of_the_whole(data_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {i} isn't long, {i * i}  é\n\n" for i in range(80)))
    data, config = data_config(path), BpeTokenizerConfig(300)
    assert ids(prepare_path(data, config).train) == ids(prepare_path(data, config, SMALL).train)


def test_documents_of_many_files_keep_their_order(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(TEXTS))
    one, many = prepare_path(data), prepare_path(data, settings=SMALL)
    assert documents(one.train) == documents(many.train) == [text for text in TEXTS if text in documents(one.train)]
    assert sorted(documents(one.train) + documents(one.validation)) == sorted(TEXTS)


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_processes_makes_the_same_folder(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path, workers: int
) -> None:
    path = make_records([*TEXTS, "raw:null"])
    folders = []
    for count in (1, workers):
        data = data_config(path, cache_dir=str(tmp_path / str(count)), on_bad=OnBad.QUARANTINE)
        folders.append(prepare_path(data, settings=replace(SMALL, workers=count)).folder)
    assert content(folders[0]) == content(folders[1])
    assert "quarantine.jsonl" in content(folders[0]) and len(content(folders[0])) > 12


def test_a_cache_that_cannot_be_written_is_said(make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path) -> None:
    data = data_config(make_folder(TEXTS))
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="prepared tokens in"):
        prepare_path(data)


def test_a_text_that_changes_meanwhile_is_an_error(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(TEXTS)
    make = prepare_module.make_shards

    def make_and_change(*args: Any) -> Any:
        shards = make(*args)
        (folder / "0003.txt").write_text("something else")
        return shards

    monkeypatch.setattr(prepare_module, "make_shards", make_and_change)
    with pytest.raises(DataError, match="0003.txt"):
        prepare_path(data_config(folder))


def test_a_folder_of_its_own(make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path) -> None:
    """prepare.path: made there, found there, and never removed or overwritten."""
    data = data_config(make_folder(TEXTS))
    own = replace(SETTINGS, path=str(tmp_path / "own" / "tokens"))
    (tmp_path / "own" / "tokens").mkdir(parents=True)
    made = prepare_path(data, settings=own)
    assert made.folder == tmp_path / "own" / "tokens" and made.is_new and not (tmp_path / "cache").exists()
    assert not prepare_path(data, settings=own).is_new
    assert [path.name for path in made.folder.parent.iterdir()] == ["tokens"]
    with pytest.raises(StorageError, match="describes other tokens") as caught:
        prepare_path(replace(data, eos=False), settings=own)
    assert "prepare.path=NEW_FOLDER" in caught.value.problems[0].cure
    shutil.rmtree(made.folder)
    made.folder.mkdir()
    (made.folder / "thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match="prepare.path="):
        prepare_path(data, settings=own)
    assert (made.folder / "thesis.txt").read_text() == "mine"


def test_cache_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "llmtrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder(None) == tmp_path / "home" / ".cache" / "llmtrain"


def test_a_cache_in_a_home_folder_that_is_not_there_is_an_error_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="data.cache_dir=~nosuchuser/cache"):
        cache_folder("~nosuchuser/cache")

    def nobody(number: int) -> Any:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(ConfigError, match="data.cache_dir=FOLDER"):
        cache_folder(None)


class CountingTokenizer(ByteTokenizer):
    """Notes how much text it is given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def encode(self, text: str) -> Any:
        self.sizes.append(len(text.encode()))
        return super().encode(text)


@pytest.mark.parametrize("form", ["text", "records"])
def test_b33_a_giant_document_costs_what_many_small_ones_cost(data_config: MakeConfig, tmp_path: Path, form: str) -> None:
    """5 MB in one word: every byte is encoded once, in bounded pieces, as for a thousand documents of 5 kB."""
    total, counts = 5_000_000, {}
    for name, texts in (("whole", ["w" * total]), ("parts", ["w" * (total // 1000)] * 1000)):
        if form == "text":
            path = tmp_path / name
            path.mkdir()
            for index, text in enumerate(texts):
                (path / f"{index}.txt").write_text(text)
        else:
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        other = path.with_name(f"other-{path.name}")
        other.write_text('{"text": "validation"}\n')
        data = data_config(path, validation_path=str(other), bos=False, eos=False, cache_dir=str(tmp_path / f"{name} cache"))
        if form == "records":
            data = replace(data, source=replace(data.source, max_document_bytes=total))  # type: ignore[arg-type]
        tokenizer = CountingTokenizer()
        prepared = prepare_path(data, tokenizer, replace(SETTINGS, workers=1))
        assert len(prepared.train.tokens) == total and prepared.train.documents == len(texts)
        assert sum(tokenizer.sizes) == total + prepared.validation.source_bytes
        assert max(tokenizer.sizes) <= 1 << 18
        counts[name] = len(tokenizer.sizes)
    assert counts["whole"] < counts["parts"]


def test_progress_tells_speed_and_the_end_tells_everything(make_records: MakeRecords, data_config: MakeConfig) -> None:
    lines: list[str] = []
    prepare_path(data_config(make_records([*TEXTS, "raw:null"]), on_bad=OnBad.SKIP), lines=lines)
    assert lines[0].startswith("preparing tokens of records.jsonl")
    for word in ("24 documents", "tokens", "bytes/token", "MB/s", " s", "1 bad record ("):
        assert word in lines[-1]
