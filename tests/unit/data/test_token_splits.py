"""How token files are split, fingerprinted and cut into documents, against lists worked out by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.open_tokens import ids, opened, refused
from helpers.token_files import write_llm_c, write_megatron, write_raw
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import ConfigError
from llmtrain.config.typed_data import Packing, TokenFormat
from llmtrain.data.packing import pack
from llmtrain.data.token_array import TokenArray
from llmtrain.data.token_borders import IndexedBorders, MarkedBorders
from llmtrain.ops.cross_entropy import IGNORE_INDEX

EOS = 50256
DOCUMENTS = [[EOS, 1, 2, 3, 4], [EOS, 5, 6], [EOS, 7, 8, 9, 10, 11], [EOS, 12]]
"""As llm.c writes them: end-of-text first."""
IDS = [token for document in DOCUMENTS for token in document]
BORDERS = [0, 5, 8, 14, 16]


def test_the_tail_is_held_out_where_names_say_nothing(tmp_path: Path) -> None:
    path = write_llm_c(tmp_path / "shard.bin", IDS)
    found = opened(path, validation_fraction=0.2)
    assert found.held_out == "the last documents held out"
    assert ids(found.train) == IDS[:14] and ids(found.validation) == IDS[14:]
    assert found.train.offsets.tolist() == [0, 5, 8, 14] and found.validation.offsets.tolist() == [0, 2]
    # The nearest border would hold out more than twice of what was asked for: cut inside the document.
    found = opened(write_llm_c(path, [EOS, *range(49)] * 2), validation_fraction=0.1)
    assert found.held_out == "the tail held out" and ids(found.validation) == list(range(39, 49))
    assert found.train.offsets.tolist() == [0, 50, 90] and found.validation.offsets.tolist() == [0, 10]
    found = opened(write_raw(tmp_path / "raw.bin", list(range(100))), validation_fraction=0.1)
    assert found.held_out == "the tail held out" and ids(found.validation) == list(range(90, 100))


def test_validation_has_a_path_of_its_own(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [1, 2, 3])
    (tmp_path / "held").mkdir()
    write_raw(tmp_path / "held" / "x.bin", [4, 5])
    found = opened(tmp_path / "a.bin", validation_path=str(tmp_path / "held"))
    assert (ids(found.train), ids(found.validation)) == ([1, 2, 3], [4, 5]) and found.held_out == "data.validation_path"
    assert "x.bin would be trained on and held out" in refused(tmp_path, validation_path=str(tmp_path / "held"))


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        (["train.bin", "val.bin"], [0], [1]),
        (["TinyStories_train.bin", "TinyStories_val.bin"], [0], [1]),
        (["train/0.bin", "train/1.bin", "validation/0.bin"], [0, 1], [2]),
        (["train.bin", "valid.bin", "test.bin"], [0], [1]),
        (["train_0.bin", "train_1.bin"], None, None),
        (["constraint.bin", "interval.bin"], None, None),
    ],
)
def test_names_tell_splits_apart(tmp_path: Path, names: list[str], train: list[int] | None, held_out: list[int] | None) -> None:
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_raw(tmp_path / name, [number] * 10)
    found = opened(tmp_path)
    if train is None or held_out is None:
        assert found.held_out == "the tail held out" and len(found.validation.tokens) == 1
    else:
        assert sorted(set(ids(found.train))) == train and sorted(set(ids(found.validation))) == held_out


def test_b56_settings_that_token_files_do_not_read_are_refused(tmp_path: Path) -> None:
    """Also where their value is the default: nobody is told that it does something."""
    write_raw(tmp_path / "train.bin", [1, 2])
    write_raw(tmp_path / "val.bin", [3, 4])
    with pytest.raises(ConfigError, match=r"data.validation_fraction=0.05\n.*by file names"):
        opened(tmp_path, validation_fraction=0.05)
    path = write_llm_c(tmp_path / "shard.bin", IDS)
    assert opened(path, validation_fraction=0.2).held_out == "the last documents held out"
    for layout in (TokenFormat.AUTO, TokenFormat.LLM_C):
        with pytest.raises(ConfigError, match=r"data.dtype=uint16\n.*files of llm_c"):
            opened(path, format=layout, dtype="uint16")
    assert opened(tmp_path / "train.bin", dtype="uint16").format is TokenFormat.RAW


def test_a_file_that_no_name_puts_on_a_side_is_asked_about(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin", "extra.bin"):
        write_raw(tmp_path / name, [1, 2])
    assert "extra.bin is not" in refused(tmp_path) and "data.validation_path=PATTERN" in refused(tmp_path)


def test_nothing_to_split_is_said(tmp_path: Path) -> None:
    assert "1 tokens cannot be split" in refused(write_raw(tmp_path / "t.bin", [3]))
    assert "0 tokens cannot be split" in refused(write_raw(tmp_path / "t.bin", []))


def test_nothing_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no tokens")
    told = refused(tmp_path)
    assert ".bin, .ds" in told and "notes.txt" in told


# Fingerprints


def test_fingerprints_follow_content_and_not_the_place(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    write_llm_c(one / "a.bin", IDS[:10])
    write_llm_c(one / "b.bin", IDS[10:])
    shutil.copytree(one, tmp_path / "two" / "deep")
    (tmp_path / "two" / "deep" / "b.bin").rename(tmp_path / "two" / "deep" / "c.bin")
    base = opened(one).fingerprints
    assert base[0] != base[1] and opened(tmp_path / "two").fingerprints == base
    changed = [opened(one, eos_id=3).fingerprints[0], opened(one, validation_fraction=0.4).fingerprints[0]]
    write_llm_c(one / "a.bin", [*IDS[:3], 4, *IDS[4:10]])
    changed.append(opened(one).fingerprints[0])
    assert len({base[0], *changed}) == 4


def test_fingerprints_cover_the_document_borders(tmp_path: Path) -> None:
    write_megatron(tmp_path / "t", [[[1, 2]], [[3, 4, 5]], [[6]]])
    base = opened(tmp_path).fingerprints
    write_megatron(tmp_path / "t", [[[1, 2, 3]], [[4, 5]], [[6]]])
    assert opened(tmp_path).fingerprints[0] != base[0]


# Borders


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    begins=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_marks_and_index_tell_of_the_same_documents(lengths: list[int], begins: bool, data: st.DataObject) -> None:
    """Any stretch of a stream has the same borders by its index and by its marks, and the nearest border is the nearest."""
    offsets = np.cumsum([0, *lengths])
    stream = np.ones(offsets[-1], np.uint16)
    stream[offsets[:-1] if begins else offsets[1:] - 1] = 0
    total = len(stream)
    marked = MarkedBorders(TokenArray([stream]), 0, begins, lambda line: None)
    indexed = IndexedBorders(lambda: offsets)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    assert indexed.offsets(start, stop).tolist() == marked.offsets(start, stop).tolist()
    distances = [abs(int(border) - start) for border in offsets[1:-1]]
    for borders in (marked, indexed):
        near = borders.nearest(start)
        assert (near is None) == (not distances)
        if near is not None:
            assert near in offsets[1:-1] and abs(near - start) == min(distances)


def test_b30_documents_of_token_files_stay_apart(tmp_path: Path) -> None:
    """What one document holds changes nothing in the rows of the others but its own tokens, and no target crosses a border."""
    write_megatron(tmp_path / "a", [[[token] for token in document] for document in DOCUMENTS])
    write_megatron(tmp_path / "b", [[[EOS], [21], [22], [23], [24]], *[[document] for document in DOCUMENTS[1:]]])
    path = write_llm_c(tmp_path / "c.bin", IDS)
    rows = []
    for name in ("a.bin", "b.bin", path.name):
        stream = opened(tmp_path / name, validation_fraction=0.15).train
        packed_rows = pack(stream, Packing.DOCUMENT, 4)
        rows.append(packed_rows.read(np.arange(packed_rows.num_rows)))
    first, swapped, marked = rows
    assert first.document_ids is not None and first.positions is not None
    for other in (swapped, marked):
        assert (first.document_ids == other.document_ids).all() and (first.positions == other.positions).all()
    assert (first.tokens == marked.tokens).all() and (first.targets == marked.targets).all()
    places = np.arange(first.tokens.size).reshape(first.tokens.shape)
    later = places >= BORDERS[1]
    assert (first.tokens == swapped.tokens)[later].all() and (first.targets == swapped.targets)[later].all()
    # Tokens 4, 7 and 13 end documents: nothing is predicted there.
    assert sorted(places[first.targets == IGNORE_INDEX].tolist())[:2] == [4, 7]


def test_b35_a_target_is_the_next_token_also_across_files(tmp_path: Path) -> None:
    """Cyclic text in three files of lengths that are no multiple of a row: x is followed by x + 1, in every row and packing."""
    vocab, text = 11, [i % 11 for i in range(200)]
    for number, (start, stop) in enumerate([(0, 37), (37, 38), (38, 200)]):
        write_raw(tmp_path / f"{number}.bin", text[start:stop])
    for packing in Packing:
        rows = pack(opened(tmp_path, vocab_size=vocab, validation_fraction=0.05).train, packing, 8)
        arrays = rows.read(np.arange(rows.num_rows))
        scored = arrays.targets != IGNORE_INDEX
        assert scored.sum() == rows.num_targets == 189
        assert (arrays.targets[scored] == (arrays.tokens[scored] + 1) % vocab).all()
