"""Text to prepared folders: never stale, the same however it is made, where it was asked for."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.prepared import SETTINGS, SMALL, TEXTS, content, documents, entries, ids, job_of, prepare_path
from helpers.tokenizer_files import byte_level_json, write

from llmtrain.config.errors import ConfigError, DataError, StorageError
from llmtrain.config.typed_data import (
    BpeTokenizerConfig,
    ByteTokenizerConfig,
    CharTokenizerConfig,
    DataConfig,
    FileTokenizerConfig,
    OnBad,
    Packing,
    TokenData,
    TokenFormat,
)
from llmtrain.data import prepare as prepare_module
from llmtrain.data.corpus import build_corpus
from llmtrain.data.formats import is_prepared
from llmtrain.data.shards import GROUP_CHARACTERS
from llmtrain.data.staging import cache_folder
from llmtrain.data.text_cuts import BLOCK_BYTES, LONGEST_WORD_BYTES
from llmtrain.data.tokenizer import ByteTokenizer, Tokenizer, train_tokenizer

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


def test_stale_cache_is_missed_when_anything_that_changes_ids_changes(
    make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
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
    body = byte_level_json(("<s>", "</s>"))
    other = {**body, "pre_tokenizer": {**body["pre_tokenizer"], "add_prefix_space": True}}
    for name, described in (("one", body), ("other", other)):
        file = write(tmp_path / name, tokenizer=described)
        variants += [
            (data, FileTokenizerConfig(str(file), "<s>", "</s>")),
            (data, FileTokenizerConfig(str(file), "</s>", "<s>")),
        ]
    keys = [job_of(*variant).key for variant in variants]
    write(tmp_path / "one", tokenizer={**other, "normalizer": {"type": "Lowercase"}})  # the same path, another content
    keys.append(job_of(*variants[8]).key)
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
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # told by its content alone
    keys.append(job_of(data).key)
    assert len(set(keys)) == len(keys)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert job_of(data).key == keys[-1]


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
            assert one.sha256 == other.sha256 and ids(one) == ids(other) and one.offsets().tolist() == other.offsets().tolist()
            assert (one.source_bytes, one.byte_counts) == (other.source_bytes, other.byte_counts)


def test_shards_of_bpe_join_to_the_ids_of_the_whole(data_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {i} isn't long, {i * i}  é\n\n" for i in range(80)))
    data, config = data_config(path), BpeTokenizerConfig(300)
    whole, cut = prepare_path(data, config), prepare_path(data, config, SMALL)
    assert ids(whole.train) == ids(cut.train) and whole.train.sha256 == cut.train.sha256


def test_the_hash_of_a_split_is_of_its_tokens_and_borders(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    """Against a reference; the same tokens with a border elsewhere are other content."""
    folder = make_folder(["ab", "c", "held out"])
    hashes = set()
    for texts in (("ab", "c"), ("a", "bc")):
        for index, text in enumerate(texts):
            (folder / f"{index:04d}.txt").write_text(text)
        data = data_config(folder, validation_path=str(folder / "0002.txt"), bos=False, eos=False)
        train = prepare_path(data).train
        assert ids(train) == list(b"abc")
        parts = np.array(list(b"abc"), "<u2").tobytes(), np.array([0, len(texts[0])], "<i8").tobytes()
        expected = hashlib.sha256("/".join(hashlib.sha256(part).hexdigest() for part in parts).encode()).hexdigest()
        assert train.sha256 == expected
        hashes.add(train.sha256)
    assert len(hashes) == 2


def test_the_tokenizer_that_was_asked_for_is_handed_back(
    make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
    """Two files that make the same ids share prepared tokens; each decodes as it says."""
    data = data_config(make_folder(TEXTS))
    body = byte_level_json(("<s>", "</s>"))
    prints = {}
    for decoder in (body["decoder"], {"type": "Fuse"}):
        file = write(tmp_path / decoder["type"], tokenizer={**body, "decoder": decoder})
        prepared = prepare_path(data, FileTokenizerConfig(str(file), "<s>", "</s>"))
        assert prepared.tokenizer.to_json()["tokenizer"]["decoder"]["type"] == decoder["type"]
        prints[decoder["type"]] = prepared.tokenizer.fingerprint
        stored = TokenData(str(prepared.folder), None, None, TokenFormat.AUTO, None)
        opened = build_corpus(
            replace(data, source=stored), prepared.tokenizer, seed=0, vocab_size=None, progress=lambda line: None
        )
        assert opened.tokenizer.decode(ids(prepared.train)[:9]) == prepared.tokenizer.decode(ids(prepared.train)[:9])
    assert len(prints) == 2 and len(set(prints.values())) == 1 and len(entries(data)) == 1


def test_documents_of_many_files_keep_their_order(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(TEXTS))
    one, many = prepare_path(data), prepare_path(data, settings=SMALL)
    assert one.train.sha256 == many.train.sha256 and len(many.train.parts) > 3
    assert one.train.offsets().tolist() == many.train.offsets().tolist()
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


@pytest.mark.parametrize("place", ["new", "empty", "link", "dangling link", "working folder", "read-only parent"])
def test_a_folder_of_its_own_may_be_anything_that_is_empty(
    make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It is filled and never renamed: what it is, and what is beside it, stays."""
    data = data_config(make_folder(TEXTS))
    target = tmp_path / "there" / "tokens"
    target.parent.mkdir()
    path = str(target)
    if place not in ("new", "dangling link"):
        target.mkdir()
    if "link" in place:
        (tmp_path / "link").symlink_to(target)
        path = str(tmp_path / "link")
    elif place == "working folder":
        monkeypatch.chdir(target)
        path = "."
    elif place == "read-only parent":  # as seen from a mount point: nothing can be made beside it, and it cannot be renamed
        monkeypatch.setattr(os, "rename", refuse_outside(os.rename, target))
        monkeypatch.setattr(os, "mkdir", refuse_outside(os.mkdir, target))
    inode = target.stat().st_ino if target.exists() else None
    made = prepare_path(data, settings=replace(SMALL, path=path))
    assert made.folder == target and made.is_new and inode in (None, target.stat().st_ino)
    assert not [name for name in os.listdir(target) if name.startswith(".")] and os.listdir(target.parent) == ["tokens"]
    assert not prepare_path(data, settings=replace(SMALL, path=path)).is_new
    assert "link" not in place or (tmp_path / "link").is_symlink()


def refuse_outside(call: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """A system call that fails for everything that does not lie below a folder."""

    def checked(*paths: Any, **others: Any) -> Any:
        for path in paths[:2]:
            if not isinstance(path, int) and folder not in Path(path).parents:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return call(*paths, **others)

    return checked


def test_a_kill_while_a_folder_of_its_own_is_filled(make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path) -> None:
    """After every single file: never taken for tokens by anybody, and the same command ends in the same folder."""
    data = data_config(make_folder(TEXTS))
    settings = replace(SMALL, shard_bytes=400)
    calm = content(prepare_path(data, settings=settings).folder)
    rename = os.rename
    for number in range(len(calm)):
        own = replace(settings, path=str(tmp_path / f"tokens {number}"))
        moved: list[Any] = []

        def die(source: Any, target: Any) -> None:
            if len(moved) == number:
                raise KeyboardInterrupt
            moved.append(target)
            rename(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", die)
            with pytest.raises(KeyboardInterrupt):
                prepare_path(data, settings=own)
        assert not is_prepared(Path(str(own.path)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare_module, "make_shards", lambda *args: pytest.fail("tokenized again"))
            assert content(prepare_path(data, settings=own).folder) == calm


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


def written(path: Path, form: str, texts: Sequence[str]) -> Path:
    """Documents as files of a folder, or as the records of one file."""
    if form == "records":
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path
    path.mkdir()
    for index, text in enumerate(texts):
        (path / f"{index}.txt").write_text(text)
    return path


@pytest.mark.parametrize("form", ["text", "records"])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
@pytest.mark.parametrize(("word", "most_bytes"), [("word ", BLOCK_BYTES), ("w", LONGEST_WORD_BYTES + BLOCK_BYTES)])
def test_b33_a_giant_document_costs_what_many_small_ones_cost(
    data_config: MakeConfig, tmp_path: Path, form: str, kind: str, word: str, most_bytes: int
) -> None:
    """Megabytes of words, or in one word: each byte is encoded once, in bounded pieces, to the ids of the whole."""
    total = 5_000_000 if kind == "byte" else 1_000_000
    tokenizer: Tokenizer = ByteTokenizer()
    if kind == "bpe":
        tokenizer = train_tokenizer(BpeTokenizerConfig(300), lambda: ["some words, a word, and the word word"] * 20)
    encode, calls = tokenizer.encode_many, {}
    for name, texts in (("whole", [word * (total // len(word))]), ("parts", [word * (total // len(word) // 400)] * 400)):
        path = written(tmp_path / name, form, texts)
        other = path.with_name(f"other-{path.name}")
        other.write_text('{"text": "validation"}\n')
        data = data_config(path, validation_path=str(other), bos=False, eos=False, cache_dir=str(tmp_path / f"{name} cache"))
        if form == "records":
            data = replace(data, source=replace(data.source, max_document_bytes=total))  # type: ignore[arg-type]
        sizes: list[int] = []

        def count_bytes(texts: Sequence[str]) -> Any:
            sizes.extend(len(text.encode()) for text in texts)
            return encode(texts)

        tokenizer.encode_many = count_bytes  # type: ignore[method-assign]
        tracemalloc.start()
        prepared = prepare_path(data, tokenizer, replace(SETTINGS, workers=1))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert prepared.train.documents == len(texts) and sum(sizes) == total + prepared.validation.source_bytes
        assert max(sizes) <= most_bytes
        # Ids of a byte each take 8 bytes, twice; a record is held whole as well, as bytes and as text.
        assert peak < 16 * (GROUP_CHARACTERS + most_bytes) + (5 * total if form == "records" else 0)
        calls[name] = len(sizes)
        if name == "whole" and (kind == "byte" or word.endswith(" ")):
            assert np.array_equal(prepared.train.tokens.read_range(0, len(prepared.train.tokens)), encode(texts)[0])
    assert calls["whole"] < calls["parts"]


def test_progress_tells_speed_and_the_end_tells_everything(make_records: MakeRecords, data_config: MakeConfig) -> None:
    lines: list[str] = []
    prepare_path(data_config(make_records([*TEXTS, "raw:null"]), on_bad=OnBad.SKIP), lines=lines)
    assert lines[0].startswith("preparing tokens of records.jsonl")
    for word in ("24 documents", "tokens", "bytes/token", "MB/s", " s", "1 bad record ("):
        assert word in lines[-1]
