"""One unit of text as files: special tokens, ids that fit, documents of every size, what is no document."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import BpeTokenizerConfig, DataConfig, OnBad, Packing, SyntheticData
from llmtrain.data import formats
from llmtrain.data.framing import Framing, settle_framing
from llmtrain.data.packing import TokenStream, pack
from llmtrain.data.records import BadReason, BadRecord
from llmtrain.data.shards import ShardSettings, SplitWriter, describe_bad, make_shard, read_json, token_dtype
from llmtrain.data.token_array import TokenArray
from llmtrain.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer, train_tokenizer
from llmtrain.data.units import Block
from llmtrain.ops.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class Documents:
    """A unit of given documents, cut into blocks of a few characters; a `BadRecord` among them is handed on."""

    items: Sequence[str | BadRecord]
    block_characters: int = 1000
    split: str | None = "train"
    place: str = "memory"
    source_bytes: int = 1

    def blocks(self, block_bytes: int) -> Iterator[Block | BadRecord]:
        step = min(self.block_characters, block_bytes)
        for item in self.items:
            if isinstance(item, BadRecord):
                yield item
                continue
            starts = range(0, len(item), step) or [0]
            for start in starts:
                yield Block("train", item[start : start + step], start == 0, start == starts[-1])


def shard(
    folder: Path,
    items: Sequence[str | BadRecord],
    tokenizer: Tokenizer | None = None,
    framing: Framing = Framing(None, None),
    on_bad: OnBad = OnBad.ERROR,
) -> dict[str, Any]:
    settings = ShardSettings(folder, "key", tokenizer or ByteTokenizer(), framing, on_bad)
    return make_shard(settings, 0, Documents(items), lambda source_bytes, tokens: None)


def stored(folder: Path) -> list[list[int]]:
    """Ids of each document."""
    tokens = np.fromfile(folder / "train-00000.tokens", dtype="<u2").astype(np.int64)
    starts = np.fromfile(folder / "train-00000.offsets", dtype="<i8")
    return [part.tolist() for part in np.split(tokens, starts[1:])]


CONTENTS = ["", "short", "<|endoftext|><s>", "long words " * 500, ""]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("packing", list(Packing))
def test_b31_bos_and_eos_once_per_document(tmp_path: Path, bos: bool, eos: bool, packing: Packing) -> None:
    """Empty, short, spelling a special token, longer than a block and a row: [BOS?] text [EOS?] in file and rows."""
    tokenizer = ByteTokenizer()
    data = DataConfig(SyntheticData(), 16, packing, bos, eos)
    shard(tmp_path, CONTENTS, tokenizer, settle_framing(data, tokenizer))
    framed = [[256] * bos + list(content.encode()) + [257] * eos for content in CONTENTS]
    assert stored(tmp_path) == framed
    tokens = np.concatenate([np.array(ids, np.int64) for ids in framed])
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in framed])]).astype(np.int64)
    rows = pack(TokenStream(TokenArray([tokens]), offsets), packing, 1000)
    arrays = rows.read(np.arange(rows.num_rows, dtype=np.int64))
    scored = arrays.targets[arrays.targets != IGNORE_INDEX].tolist()
    # As targets: every EOS that has a predecessor; BOS only across borders, so never where documents are kept apart.
    with_predecessor = [ids for ids in framed if len(ids) > 1]
    if packing is Packing.CONCAT:
        assert (scored.count(257), scored.count(256)) == (5 * eos - (eos and not bos), 4 * bos)
    else:
        assert (scored.count(257), scored.count(256)) == (eos * len(with_predecessor), 0)


class Marks(ByteTokenizer):
    """Bytes with the special tokens of a test."""

    def __init__(self, bos_id: int | None, eos_id: int | None) -> None:
        super().__init__()
        self.bos_id, self.eos_id = bos_id, eos_id


@pytest.mark.parametrize(
    ("marks", "flags", "expected"),
    [
        ((256, 257), (None, True), (256, 257)),
        ((256, 257), (False, False), (None, None)),
        # One token for both, as in GPT-2: before a document only when that is asked for.
        ((257, 257), (None, True), (None, 257)),
        ((257, 257), (True, True), (257, 257)),
        ((None, 257), (None, True), (None, 257)),
        ((256, None), (None, False), (256, None)),
        ((None, None), (None, False), (None, None)),
    ],
)
def test_b31_flags_mean_the_tokens_the_tokenizer_has(
    marks: tuple[int | None, int | None], flags: tuple[bool | None, bool], expected: tuple[int | None, int | None]
) -> None:
    data = DataConfig(SyntheticData(), 16, Packing.CONCAT, *flags)
    assert settle_framing(data, Marks(*marks)) == Framing(*expected)


@pytest.mark.parametrize(("marks", "flags", "cure"), [((None, 257), (True, True), "bos"), ((256, None), (None, True), "eos")])
def test_b31_a_token_that_is_not_there_is_refused(marks: Any, flags: Any, cure: str) -> None:
    with pytest.raises(DataError, match=f"data.{cure}=true") as caught:
        settle_framing(DataConfig(SyntheticData(), 16, Packing.CONCAT, *flags), Marks(*marks))
    assert f"data.{cure}=false" in caught.value.problems[0].cure


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(258, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (70_000, "<u4"), (151_643, "<u4")]
)
def test_b32_ids_survive_at_every_vocabulary_size(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = [i for i in (0, 1, 257, 65_535, 65_536, 69_999, vocab_size - 1) if i < vocab_size]
    assert token_dtype(vocab_size) == np.dtype(dtype)
    shard(tmp_path, [" ".join(map(str, ids))], IdTokenizer(vocab_size))
    assert np.fromfile(tmp_path / "train-00000.tokens", dtype=dtype).tolist() == ids


@pytest.mark.parametrize("bad", [-1, 300, 65_536])
def test_b32_an_id_outside_the_vocabulary_is_refused_when_written(tmp_path: Path, bad: int) -> None:
    writer = SplitWriter(tmp_path, "train", 0, 300)
    writer.begin_document()
    writer.add(np.array([1, 2]), "")
    with pytest.raises(DataError, match=f"token 3 of train has id {bad}"):
        writer.add(np.array([299, bad]), "")
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_b33_a_document_border_takes_8_bytes_of_memory(tmp_path: Path) -> None:
    """A shard of many short documents, written and read: the borders are held once, as numbers and not as objects."""
    count, peaks = 100_000, {}
    writer = SplitWriter(tmp_path, "train", 0, 258)
    tracemalloc.start()
    for _ in range(count):
        writer.begin_document()
        writer.add(np.array([1]), "x")
    facts = {"index": 0, **writer.finish()}
    peaks["written"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    opener = formats._Opener(tmp_path, np.dtype("<u2"), 258, lambda line: None)
    borders = opener.open_split(
        "train", {"documents": count, "source_bytes": count, "byte_counts": [], "sha256": "", "shards": [facts]}
    )
    assert borders.offsets()[[0, count - 1, count]].tolist() == [0, count - 1, count]
    peaks["read"] = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert facts["documents"] == count and peaks["written"] < 2.5 * 8 * count and peaks["read"] < 1.5 * 8 * count


class CountingTokenizer(ByteTokenizer):
    """Notes how much text it is given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def encode(self, text: str) -> Any:
        self.sizes.append(len(text.encode()))
        return super().encode(text)


def test_b33_kept_documents_are_whole_and_in_order(tmp_path: Path) -> None:
    contents = ["first", "", "\r\n", "日本 " * 1000, "last\n"]
    shard(tmp_path, contents)
    assert [bytes(ids).decode() for ids in stored(tmp_path)] == contents


def test_a_tokenizer_that_must_see_whole_documents_does(tmp_path: Path) -> None:
    unit = Documents(["w " * 300_000], block_characters=1 << 60)
    sizes = {}
    for kind, cuts_at_words in (("cut", True), ("whole", False)):
        tokenizer = CountingTokenizer()
        tokenizer.cuts_at_words = cuts_at_words
        make_shard(ShardSettings(tmp_path, kind, tokenizer, Framing(None, None), OnBad.ERROR), 0, unit, lambda *counts: None)
        sizes[kind] = tokenizer.sizes
    assert sizes["whole"] == [600_000] and max(sizes["cut"]) <= 1 << 18 and sum(sizes["cut"]) == 600_000


BAD = [
    BadRecord("a.jsonl:1", BadReason.NULL, b'{"text": null}'),
    BadRecord("a.jsonl:7", BadReason.NOT_JSON, b"\xff\x00 not"),
    BadRecord("a.jsonl:9", BadReason.NULL, b'{"text": null}'),
]


def test_b33_bad_records_are_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a.jsonl:7") as caught:
        shard(tmp_path, ["good", BAD[1]])
    assert "not JSON" in caught.value.problems[0].rule and "data.on_bad=skip" in caught.value.problems[0].cure
    assert list(tmp_path.iterdir()) == [], "nothing half-made is left"


@pytest.mark.parametrize("on_bad", [OnBad.SKIP, OnBad.QUARANTINE])
def test_b33_bad_records_are_counted_with_their_places(tmp_path: Path, on_bad: OnBad) -> None:
    found = shard(tmp_path, [BAD[0], "one", BAD[1], "two", BAD[2]], on_bad=on_bad)
    assert [bytes(ids) for ids in stored(tmp_path)] == [b"one", b"two"]
    null, no_json = str(BadReason.NULL), str(BadReason.NOT_JSON)
    assert found["bad"][null] == {"count": 2, "places": ["a.jsonl:1", "a.jsonl:9"]}
    assert found["bad"][no_json] == {"count": 1, "places": ["a.jsonl:7"]}
    assert describe_bad(found["bad"]) == f"3 bad records (1 {no_json}, 2 {null})"
    copies = tmp_path / "quarantine-00000.jsonl"
    assert copies.exists() == (on_bad is OnBad.QUARANTINE)
    if copies.exists():
        lines = [json.loads(line) for line in copies.read_text().splitlines()]
        assert [line["place"] for line in lines] == [record.place for record in BAD]
        assert lines[1] == {"place": "a.jsonl:7", "reason": no_json, "raw": "\\xff\x00 not"}


def test_only_the_first_places_are_kept(tmp_path: Path) -> None:
    records = [BadRecord(f"a:{i}", BadReason.EMPTY, b"") for i in range(100)]
    facts = shard(tmp_path, records, on_bad=OnBad.SKIP)["bad"][str(BadReason.EMPTY)]
    assert facts == {"count": 100, "places": [f"a:{i}" for i in range(5)]}


def test_a_finished_shard_is_not_made_again_but_a_damaged_one_is(tmp_path: Path) -> None:
    first, second, third = CountingTokenizer(), CountingTokenizer(), CountingTokenizer()
    found = shard(tmp_path, ["text"], first)
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert shard(tmp_path, ["text"], second) == found == read_json(tmp_path / "shard-00000.json")
    assert first.sizes and not second.sizes
    for name in content:
        third.sizes.clear()
        (tmp_path / name).write_bytes(content[name][:-1])
        assert shard(tmp_path, ["text"], third) == found and third.sizes
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == content


@pytest.mark.parametrize(
    ("before", "after", "is_kept"),
    [
        (OnBad.ERROR, OnBad.SKIP, True),
        (OnBad.SKIP, OnBad.ERROR, False),
        (OnBad.SKIP, OnBad.QUARANTINE, False),
        (OnBad.QUARANTINE, OnBad.SKIP, True),
    ],
)
def test_shards_are_taken_over_where_the_new_policy_would_have_made_them(
    tmp_path: Path, before: OnBad, after: OnBad, is_kept: bool
) -> None:
    items = ["good"] if before is OnBad.ERROR else ["good", BAD[0]]
    shard(tmp_path, items, on_bad=before)
    tokenizer = CountingTokenizer()
    if after is OnBad.ERROR:
        with pytest.raises(DataError, match="a.jsonl:1"):
            shard(tmp_path, items, tokenizer, on_bad=after)
    else:
        shard(tmp_path, items, tokenizer, on_bad=after)
        assert bool(tokenizer.sizes) != is_kept


def test_b31_text_that_spells_a_special_token_stays_text(tmp_path: Path) -> None:
    spelled = "<|endoftext|> <s></s> <bos><eos> [BOS]"
    tokenizer = train_tokenizer(BpeTokenizerConfig(300), lambda: [spelled] * 20)
    shard(tmp_path, [spelled], tokenizer, Framing(tokenizer.bos_id, tokenizer.eos_id))
    (ids,) = stored(tmp_path)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids[1:-1])
    assert tokenizer.decode(ids) == spelled
