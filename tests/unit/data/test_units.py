"""Text as units of work: where it is cut, what is held out, and that neither depends on anything but the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import ByteTokenizerConfig, DataConfig, OnBad, PrepareConfig
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.prepare import find_preparation, prepare
from llmtrain.data.sources import Document, SourceFile, cut_document
from llmtrain.data.text_cuts import last_cut
from llmtrain.data.units import SMALLEST_UNIT_BYTES, Block, find_text, is_held_out, unit_bytes

MakeFolder = Callable[[Sequence[str]], Path]
MakeRecords = Callable[..., Path]
MakeConfig = Callable[..., DataConfig]


def texts_of(data: DataConfig, shard_bytes: int = 1 << 30, block_bytes: int = 1 << 20) -> dict[str, list[str]]:
    """The documents of both splits, put together again from blocks."""
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for unit in find_text(data.source, shard_bytes).units(True):  # type: ignore[arg-type]
        for block in unit.blocks(block_bytes):
            assert isinstance(block, Block) and block.split in (unit.split or block.split)
            side = found[block.split]
            side[:] = [*side, block.text] if block.begins else [*side[:-1], side[-1] + block.text]
    return found


@given(text=st.text(alphabet="aB é日\n\t1.", min_size=1, max_size=200), size=st.integers(8, 60))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_join_to_the_document(tmp_path: Path, text: str, size: int) -> None:
    path, data = tmp_path / "document", text.encode()
    path.write_bytes(data)
    pieces = cut_document(Document(SourceFile(path, len(data), 0, ""), 0, len(data)), size)
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, len(data))
    for piece in pieces:
        assert 0 < piece.stop - piece.start
        data[piece.start : piece.stop].decode()  # no character is halved
        if piece.stop - piece.start > size:  # only where there was nowhere to cut
            assert not last_cut(data[piece.start : piece.start + size])


@pytest.mark.parametrize(
    ("block", "cut"),
    [
        (b"one two three", 7),
        (b"one two. three", 3),  # cl100k and its like join punctuation with the line break after it
        (b"one ;\n;\t;", 3),
        (b"a1 2", 2),
        ("né é".encode(), 3),
        ("a é; é".encode(), 1),
        ("é é… é".encode(), 2),  # not after punctuation of any script
        ("日本 日本".encode(), 6),
        ("🙂 🙂".encode(), 0),  # no letter
        (b"xxxx", 0),
        ("日本".encode(), 0),
    ],
)
def test_cuts_lie_between_a_word_and_white_space(block: bytes, cut: int) -> None:
    assert last_cut(block) == cut


def test_units_are_of_the_text_and_the_setting_alone() -> None:
    assert unit_bytes(100, 64 << 20) == SMALLEST_UNIT_BYTES
    assert unit_bytes(1 << 30, 64 << 20) == 16 << 20
    assert unit_bytes(1 << 40, 64 << 20) == 64 << 20
    assert unit_bytes(100, 1) == 8


@pytest.mark.parametrize("shard_bytes", [10, 100, 1 << 20])
def test_records_keep_their_order_and_their_side(make_records: MakeRecords, data_config: MakeConfig, shard_bytes: int) -> None:
    texts = [f"document {i} " * (1 + i % 4) for i in range(100)]
    found = texts_of(data_config(make_records(texts)), shard_bytes, block_bytes=16)
    assert found["validation"] == [text for text in texts if is_held_out(text.encode(), 0.2)]
    assert found["train"] == [text for text in texts if not is_held_out(text.encode(), 0.2)]
    assert 5 < len(found["validation"]) < 40


def test_a_record_keeps_its_side_whatever_else_comes_and_goes(make_records: MakeRecords, data_config: MakeConfig) -> None:
    texts = [f"document {i}" for i in range(200)]
    before = texts_of(data_config(make_records(texts)))
    random.Random(0).shuffle(texts)
    after = texts_of(data_config(make_records([*texts[:120], "another"], name="other.jsonl")))
    assert set(after["validation"]) - {"another"} <= set(before["validation"])
    assert set(after["train"]) - {"another"} <= set(before["train"])
    # A larger share holds out the same ones and more.
    more = texts_of(data_config(make_records(texts), fraction=0.5))
    assert set(before["validation"]) < set(more["validation"])


def test_records_with_a_path_for_validation(make_records: MakeRecords, data_config: MakeConfig) -> None:
    train, held_out = make_records(["one", "two"]), make_records(["three"], name="held_out.jsonl")
    data = data_config(train, validation_path=str(held_out))
    assert texts_of(data) == {"train": ["one", "two"], "validation": ["three"]}
    assert find_text(data.source, 1 << 20).held_out == "all of data.validation_path"  # type: ignore[arg-type]


def test_text_with_a_path_for_validation(make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path) -> None:
    train = make_folder(["one\n", "two\n"])
    (tmp_path / "held_out.txt").write_text("three\n")
    data = data_config(train, validation_path=str(tmp_path / "held_out.txt"))
    assert texts_of(data) == {"train": ["one\n", "two\n"], "validation": ["three\n"]}
    with pytest.raises(DataError, match="data.validation_path=.*nothing") as caught:
        texts_of(data_config(train, validation_path=str(tmp_path / "nothing")))
    assert "data.validation_path=FILE_OR_FOLDER" in caught.value.problems[0].cure


@pytest.mark.parametrize(("texts", "name"), [(["only one"], "validation"), (["five"], "training")])
def test_an_empty_split_is_an_error_with_a_cure(
    make_records: MakeRecords, data_config: MakeConfig, texts: list[str], name: str
) -> None:
    fraction = 1e-9 if name == "validation" else 1 - 1e-9
    data = data_config(make_records(texts), fraction=fraction)
    beat = Heartbeat(lambda line: None)
    with pytest.raises(DataError, match=f"nothing is left for {name}") as caught:
        prepare(find_preparation(data, ByteTokenizerConfig(), PrepareConfig(None, None, 1 << 20), beat), beat)
    assert "data.validation_fraction" in caught.value.problems[0].cure


def test_a_file_of_bad_records_says_that_they_are_the_reason(make_records: MakeRecords, data_config: MakeConfig) -> None:
    data = data_config(make_records(["raw:null", "raw:3"]), on_bad=OnBad.SKIP)
    beat = Heartbeat(lambda line: None)
    with pytest.raises(DataError, match="nothing is left for training: 0 documents, 2 bad records"):
        prepare(find_preparation(data, ByteTokenizerConfig(), PrepareConfig(None, None, 1 << 20), beat), beat)
