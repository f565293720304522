"""Preparing tokens: special tokens, ids that fit, a cache that is never stale, not trusted when damaged, shared safely."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.config.errors import ConfigError, DataError, StorageError
from llmtrain.config.typed import BpeTokenizerConfig, ByteTokenizerConfig, CharTokenizerConfig, DataConfig, Packing
from llmtrain.data import prepare as prepare_module
from llmtrain.data.formats import Prepared, SplitWriter, open_prepared, token_dtype, write_metadata
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.packing import TokenStream, pack
from llmtrain.data.prepare import Framing, cache_folder, cache_key, prepare, write_split
from llmtrain.data.sources import Document, SourceFile, scan_source
from llmtrain.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer
from llmtrain.ops.cross_entropy import IGNORE_INDEX

MakeFolder = Callable[[Sequence[str]], Path]
MakeConfig = Callable[..., DataConfig]
TEXTS = [f"document {i}\nwith {i} in it\n" * (1 + i % 3) for i in range(24)]


def prepare_path(data: DataConfig, tokenizer: Any = ByteTokenizerConfig(), lines: list[str] | None = None) -> Prepared:
    cache = Path(data.source.cache_dir)  # type: ignore[union-attr, arg-type]
    said: list[str] = [] if lines is None else lines
    return prepare(scan_source(data.source), data, tokenizer, cache, Heartbeat(said.append))  # type: ignore[arg-type]


def entries(data: DataConfig) -> list[Path]:
    return sorted(Path(data.source.cache_dir).iterdir())  # type: ignore[union-attr, arg-type]


def write_documents(folder: Path, contents: Sequence[str], tokenizer: Tokenizer, framing: Framing) -> dict[str, Any]:
    documents = []
    for index, content in enumerate(contents):
        path = folder / f"{index}.txt"
        path.write_bytes(content.encode())
        documents.append(Document(SourceFile(path, 0, 0, ""), 0, len(content.encode())))
    return write_split(folder, "train", documents, tokenizer, framing, Heartbeat(lambda line: None))


def write_both(folder: Path, ids: Sequence[int], vocab_size: int) -> None:
    """A prepared folder with the same ids in both splits."""
    splits = {}
    for split in ("train", "validation"):
        with (folder / f"{split}.tokens").open("wb") as file:
            writer = SplitWriter(file, split, vocab_size)
            writer.add(np.array(ids, dtype=np.int64))
            writer.end_document()
            splits[split] = {**writer.finish(folder / f"{split}.offsets"), "source_bytes": 1, "byte_counts": [0] * 256}
    write_metadata(folder, "key", IdTokenizer(vocab_size), splits)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("packing", list(Packing))
def test_b31_bos_and_eos_once_per_document(tmp_path: Path, bos: bool, eos: bool, packing: Packing) -> None:
    """Empty, short, spelling a special token, longer than a read block and a row: [BOS?] text [EOS?] in file and rows."""
    tokenizer = ByteTokenizer()
    contents = ["", "short", "<|endoftext|><s>", "long words " * 50_000, ""]
    write_documents(tmp_path, contents, tokenizer, Framing(bos, eos))
    tokens = np.fromfile(tmp_path / "train.tokens", dtype="<u2").astype(np.int64)
    offsets = np.fromfile(tmp_path / "train.offsets", dtype="<i8")
    framed = [[256] * bos + list(content.encode()) + [257] * eos for content in contents]
    assert [tokens[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:])] == framed
    stream = TokenStream(tokens, offsets)
    rows = pack(stream, packing, 1000)
    arrays = rows.read(np.arange(rows.num_rows, dtype=np.int64))
    scored = arrays.targets[arrays.targets != IGNORE_INDEX].tolist()
    # As targets: every EOS that has a predecessor; BOS only across borders, so never where documents are kept apart.
    with_predecessor = [ids for ids in framed if len(ids) > 1]
    if packing is Packing.CONCAT:
        assert (scored.count(257), scored.count(256)) == (5 * eos - (eos and not bos), 4 * bos)
    else:
        assert (scored.count(257), scored.count(256)) == (eos * len(with_predecessor), 0)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(258, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (70_000, "<u4"), (151_643, "<u4")]
)
def test_b32_ids_survive_at_every_vocabulary_size(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = [i for i in (0, 1, 257, 65_535, 65_536, 69_999, vocab_size - 1) if i < vocab_size]
    assert token_dtype(vocab_size) == np.dtype(dtype)
    write_both(tmp_path, ids, vocab_size)
    opened = open_prepared(tmp_path, "key", lambda line: None)
    assert opened.train.stream.tokens.tolist() == ids
    assert opened.train.stream.tokens.dtype == np.dtype(dtype)


@pytest.mark.parametrize("bad", [-1, 300, 65_536])
def test_b32_an_id_outside_the_vocabulary_is_refused_when_written(tmp_path: Path, bad: int) -> None:
    with (tmp_path / "train.tokens").open("wb") as file:
        writer = SplitWriter(file, "train", 300)
        writer.add(np.array([1, 2]))
        with pytest.raises(DataError, match=f"token 3 of train has id {bad}"):
            writer.add(np.array([299, bad]))


def test_b32_reading_with_another_width_is_refused(tmp_path: Path) -> None:
    """Metadata that claims 32-bit tokens for a vocabulary stored in 16 bits, with checksums made to fit."""
    write_both(tmp_path, [1, 2, 3, 4], 300)
    body = json.loads((tmp_path / "metadata.json").read_text())
    del body["sha256"]
    body["dtype"] = "<u4"
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (tmp_path / "metadata.json").write_text(json.dumps({"sha256": digest, **body}))
    with pytest.raises(DataError, match="<u4"):
        open_prepared(tmp_path, "key", lambda line: None)


def test_b32_an_id_outside_the_vocabulary_is_found_when_opened(tmp_path: Path) -> None:
    write_both(tmp_path, [1, 2, 3, 4], 300)
    tokens = np.fromfile(tmp_path / "validation.tokens", dtype="<u2")
    tokens[2] = 300
    tokens.tofile(tmp_path / "validation.tokens")
    with pytest.raises(DataError, match="id 300 at byte 4 is outside the vocabulary of 300") as caught:
        open_prepared(tmp_path, "key", lambda line: None)
    assert "validation.tokens" in str(caught.value)


def test_a_second_run_uses_what_the_first_prepared(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_config(make_folder(TEXTS))
    first = prepare_path(data)
    monkeypatch.setattr(prepare_module, "_build", lambda *args: pytest.fail("prepared twice"))
    again = prepare_path(replace(data, sequence_length=64, packing=Packing.PADDED))
    assert again.train.sha256 == first.train.sha256
    assert isinstance(again.train.stream.tokens.base, np.memmap)


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
    ]
    keys = [cache_key(scan_source(d.source), d, t) for d, t in variants]  # type: ignore[arg-type]
    for index, text in enumerate(TEXTS):  # documents of both splits, at equal length
        (folder / f"{index:04d}.txt").write_text(text.replace("document", "Document"))
        keys.append(cache_key(scan_source(data.source), data, ByteTokenizerConfig()))  # type: ignore[arg-type]
    assert len(set(keys)) == len(keys)


def test_changed_text_of_equal_length_gives_new_tokens(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    folder = make_folder(["aaaa bbbb\n" * 20])
    data = data_config(folder)
    prepare_path(data)
    (folder / "0000.txt").write_text("cccc bbbb\n" * 20)
    assert ord("c") in prepare_path(data).train.stream.tokens
    assert len(entries(data)) == 2


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def drop_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], None]] = {"flipped": flip_bit, "short": drop_byte, "gone": Path.unlink}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", ["train.tokens", "train.offsets", "validation.tokens", "validation.offsets", "metadata.json"])
def test_a_damaged_cache_is_said_and_made_again(
    make_folder: MakeFolder, data_config: MakeConfig, name: str, damage: str
) -> None:
    data = data_config(make_folder(TEXTS))
    before = prepare_path(data).train.stream.tokens.tolist()
    (folder,) = entries(data)
    DAMAGES[damage](folder / name)
    lines: list[str] = []
    assert prepare_path(data, lines=lines).train.stream.tokens.tolist() == before
    assert any("damaged" in line and name in line for line in lines)
    assert entries(data) == [folder]
    lines.clear()
    prepare_path(data, lines=lines)
    assert lines == []


def test_a_changed_number_in_the_description_is_noticed(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(TEXTS))
    prepare_path(data)
    (folder,) = entries(data)
    body = json.loads((folder / "metadata.json").read_text())
    body["splits"]["validation"]["source_bytes"] += 1
    (folder / "metadata.json").write_text(json.dumps(body))
    lines: list[str] = []
    assert prepare_path(data, lines=lines).validation.source_bytes == body["splits"]["validation"]["source_bytes"] - 1
    assert "its checksum or key is wrong" in lines[0]


def test_two_processes_may_prepare_at_once(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both finish their staging folder before either renames it: both succeed with the same tokens, and one folder is left."""
    data = data_config(make_folder(TEXTS))
    both_built = threading.Barrier(2, timeout=30)
    publish = prepare_module._publish

    def publish_together(staging: Path, folder: Path) -> None:
        both_built.wait()
        publish(staging, folder)

    monkeypatch.setattr(prepare_module, "_publish", publish_together)
    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: results.append(prepare_path(data).train.stream.tokens.tolist())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1]
    assert len(entries(data)) == 1


def test_a_killed_preparation_is_invisible_and_swept_up(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    """Whatever a kill leaves behind under a staging name is neither opened nor kept, unless its owner is still at work."""
    data = data_config(make_folder(TEXTS))
    key = cache_key(scan_source(data.source), data, ByteTokenizerConfig())  # type: ignore[arg-type]
    cache = Path(data.source.cache_dir)  # type: ignore[union-attr, arg-type]
    abandoned = cache / f".staging-{key[:32]}-0123"
    abandoned.mkdir(parents=True)
    (abandoned / "train.tokens").write_bytes(b"half")
    with prepare_module._staging(cache / key[:32]) as at_work:
        prepare_path(data)
        assert at_work.exists() and not abandoned.exists()
    assert entries(data) == [cache / key[:32]]


def test_a_failed_preparation_leaves_nothing(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_config(make_folder(TEXTS))

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_module, "write_metadata", fail)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        prepare_path(data)
    assert "data.cache_dir" in str(caught.value)
    assert entries(data) == []


def test_a_cache_that_cannot_be_written_is_said(make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path) -> None:
    data = data_config(make_folder(TEXTS))
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="prepared tokens in"):
        prepare_path(data)


def test_cache_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "llmtrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder(None) == tmp_path / "home" / ".cache" / "llmtrain"


class CountingTokenizer(ByteTokenizer):
    """Notes how much text it is given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def encode(self, text: str) -> Any:
        self.sizes.append(len(text.encode()))
        return super().encode(text)


def test_b33_a_giant_document_costs_what_many_small_ones_cost(tmp_path: Path) -> None:
    """5 MB in one word: every byte is encoded once, in bounded pieces, as for a thousand documents of 5 kB."""
    whole, parts = CountingTokenizer(), CountingTokenizer()
    total = 5_000_000
    for name, tokenizer, contents in (("whole", whole, ["w" * total]), ("parts", parts, ["w" * (total // 1000)] * 1000)):
        (tmp_path / name).mkdir()
        description = write_documents(tmp_path / name, contents, tokenizer, Framing(bos=False, eos=False))
        assert description["tokens"] == sum(tokenizer.sizes) == total
        assert description["documents"] == len(contents)
    assert max(whole.sizes) <= 1 << 18 and len(whole.sizes) < len(parts.sizes)


def test_b33_kept_documents_are_whole_and_in_order(tmp_path: Path) -> None:
    contents = ["first", "", "\r\n", "日本 " * 100_000, "last\n"]
    write_documents(tmp_path, contents, ByteTokenizer(), Framing(bos=False, eos=True))
    tokens = np.fromfile(tmp_path / "train.tokens", dtype="<u2")
    texts = [bytes(part[part < 256].astype(np.uint8)).decode() for part in np.split(tokens, np.flatnonzero(tokens == 257) + 1)]
    assert texts == [*contents, ""]


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


@pytest.mark.parametrize(("number", "is_tolerated"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_flush_folders_will_do(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, number: int, is_tolerated: bool
) -> None:
    flush = os.fsync

    def fsync(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    data = data_config(make_folder(TEXTS))
    if is_tolerated:
        assert len(prepare_path(data).train.stream.tokens) > 0
    else:
        with pytest.raises(StorageError, match="Input/output error"):
            prepare_path(data)
