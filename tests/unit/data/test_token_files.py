"""Token files of other programs, against ids and document borders worked out by hand; the writers are in helpers/token_files.py."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.open_tokens import documents_of, ids, opened, refused
from helpers.token_files import packed, write_datatrove, write_llm_c, write_megatron, write_raw

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import Packing, TokenFormat
from llmtrain.data import token_files as token_files_module
from llmtrain.data.packing import pack

EOS = 50256
DOCUMENTS = [[EOS, 1, 2, 3, 4], [EOS, 5, 6], [EOS, 7, 8, 9, 10, 11], [EOS, 12]]
"""As llm.c writes them: end-of-text first."""
IDS = [token for document in DOCUMENTS for token in document]
BORDERS = [0, 5, 8, 14, 16]


# Layouts


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_raw_ids_are_read_as_written(tmp_path: Path, dtype: str) -> None:
    """nanoGPT: train.bin and val.bin; end-of-text ends a document where its id is given."""
    train = [1, 2, EOS, 3, EOS, 4, 5]
    write_raw(tmp_path / "train.bin", train, dtype)
    write_raw(tmp_path / "val.bin", [9, EOS, 8], dtype)
    found = opened(tmp_path, dtype=dtype, eos_id=EOS)
    assert found.format is TokenFormat.RAW and found.held_out == "by file names"
    assert found.name == f"{tmp_path.name} (raw {dtype}, 2 files)"
    assert ids(found.train) == train and ids(found.validation) == [9, EOS, 8]
    assert documents_of(found.train) == [[1, 2, EOS], [3, EOS], [4, 5]]
    assert documents_of(found.validation) == [[9, EOS], [8]]
    assert opened(tmp_path, dtype=dtype).train.offsets.tolist() == [0, 7]


@pytest.mark.parametrize(("model", "begin", "vocab"), [("gpt-2", EOS, 50257), ("llama-3", 128000, 128256)])
def test_llm_c_files_follow_each_other(tmp_path: Path, model: str, begin: int, vocab: int) -> None:
    """The third document lies in two files; the token that begins one is known from the header."""
    stream = [begin if token == EOS else token for token in IDS]
    write_llm_c(tmp_path / "fineweb_val_000000.bin", stream[:8], model=model)
    write_llm_c(tmp_path / "fineweb_train_000001.bin", stream[5:10], model=model)
    write_llm_c(tmp_path / "fineweb_train_000002.bin", stream[10:], model=model)
    found = opened(tmp_path, vocab_size=vocab)
    assert found.format is TokenFormat.LLM_C and found.name == f"{tmp_path.name} (llm_c, 3 files)"
    assert ids(found.train) == stream[5:] and found.train.offsets.tolist() == [0, 3, 9, 11]
    assert ids(found.validation) == stream[:8] and found.validation.offsets.tolist() == [0, 5, 8]
    # The header of GPT-2 is put on ids of other tokenizers too; Llama 3 has an end-of-text that is not in its files.
    assert opened(tmp_path, vocab_size=vocab, eos_id=7).train.offsets.tolist() == (
        [0, 4, 11] if begin == EOS else [0, 3, 9, 11]
    )


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_megatron_borders_come_from_the_index(tmp_path: Path, dtype: str) -> None:
    """Documents of several sequences, an empty one among them, in two pairs of files."""
    write_megatron(tmp_path / "a_text_document", [[[1, 2], [3]], [], [[4], [5, 6, 7]]], dtype=dtype)
    write_megatron(tmp_path / "b_text_document", [[[8, 9]], [[10], []]], dtype=dtype)
    found = opened(tmp_path, validation_fraction=0.1)
    assert found.format is TokenFormat.MEGATRON and found.held_out == "the last documents held out"
    assert documents_of(found.train) == [[1, 2, 3], [], [4, 5, 6, 7], [8, 9]]
    assert documents_of(found.validation) == [[10]]


def test_megatron_is_named_by_its_prefix_or_either_file(tmp_path: Path) -> None:
    write_megatron(tmp_path / "text", [[[1, 2, 3]], [[4, 5]]])
    expected = ids(opened(tmp_path / "text.bin").train)
    assert expected == ids(opened(tmp_path / "text").train) == ids(opened(tmp_path / "text.idx").train) == [1, 2, 3]


@pytest.mark.parametrize(
    ("width", "index", "metadata"), [(2, True, True), (4, True, True), (2, True, False), (4, True, False), (4, False, True)]
)
def test_datatrove_borders_come_from_the_index(tmp_path: Path, width: int, index: bool, metadata: bool) -> None:
    documents = [[5, 6, 1], [7, 1], [], [8, 9, 10, 1], [11, 1]]
    options: dict[str, Any] = {"width": width, "index": index, "metadata": metadata}
    write_datatrove(tmp_path / "000_web.ds", documents[:3], **options)
    write_datatrove(tmp_path / "001_web.ds", documents[3:], **options)
    # Its merger leaves the totals of all files under the name of none.
    (tmp_path / "web.ds.metadata").write_text("gpt2|2\n11\n11 T")
    found = opened(tmp_path, validation_fraction=0.2, eos_id=None if index else 1)
    assert found.format is TokenFormat.DATATROVE
    # An empty document leaves no token that could end it.
    assert documents_of(found.train) == [document for document in documents[:4] if document or index]
    assert documents_of(found.validation) == [[11, 1]]


# Damage


def test_b32_sizes_are_compared_with_headers(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "odd.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes() + b"x")
    assert "it has 7 bytes, which is not a multiple of the 2 of uint16" in refused(path)
    path = write_llm_c(tmp_path / "cut.bin", IDS, count=len(IDS) + 1)
    assert "its header counts 17 tokens, which makes 1,058 bytes, and it has 1,056" in refused(path)
    path.write_bytes(struct.pack("<3i", 20240520, 2, 0).ljust(1024, b"\0"))
    told = refused(path)
    assert "20240520 with version 2" in told and "20240801 with version 7" in told
    path.write_bytes(path.read_bytes()[:500])
    assert "the header of llm.c alone has 1,024" in refused(path)
    path.write_bytes(struct.pack("<3i", 20240522, 1, 5).ljust(2000, b"\0"))
    assert "evaluation file" in refused(path)


def change(path: Path, place: int, form: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, place, value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: change(folder / "t.idx", 0, "<B", 0), "MMIDIDX"),
        (lambda folder: change(folder / "t.idx", 9, "<Q", 2), "version 2 and type 8"),
        (lambda folder: change(folder / "t.idx", 17, "<B", 9), "version 1 and type 9"),
        (lambda folder: change(folder / "t.idx", 17, "<B", 7), "float32, which are no token ids"),
        (lambda folder: change(folder / "t.idx", 17, "<B", 4), "sequence 1 has length 1 and byte offset 4"),
        (
            lambda folder: change(folder / "t.idx", 18, "<Q", 4),
            "4 sequences and 3 document borders make 106 bytes, and it has 94",
        ),
        (lambda folder: change(folder / "t.idx", 34, "<i", 9), "sequence 1 has length 1 and byte offset 4"),
        (lambda folder: change(folder / "t.idx", 34 + 36, "<q", 1), "do not go from 0"),
        (lambda folder: change(folder / "t.idx", 34 + 36 + 16, "<q", 2), "do not go from 0 up to its 3 sequences"),
        (
            lambda folder: (folder / "t.bin").write_bytes(b"12345678"),
            "t.idx counts 5 tokens of 2 bytes, which makes 10, and it has 8",
        ),
        (lambda folder: (folder / "t.idx").unlink(), "t.idx"),
        (lambda folder: (folder / "t.idx").write_bytes(b"MMIDIDX"), "MMIDIDX"),
    ],
)
def test_a_damaged_megatron_index_is_refused(tmp_path: Path, spoil: Callable[[Path], None], told: str) -> None:
    write_megatron(tmp_path / "t", [[[1, 2], [3]], [[4, 5]]])
    spoil(tmp_path)
    assert told in refused(tmp_path / "t.bin", format=TokenFormat.MEGATRON)


def test_a_multimodal_megatron_index_is_refused(tmp_path: Path) -> None:
    assert "multimodal" in refused(write_megatron(tmp_path / "t", [[[1, 2], [3]]], modes=True))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.ds.index", packed([3, 4], "int64"), "4 tokens by t.ds.index and ids of 2 bytes make 8 bytes, and it has 10"),
        ("t.ds.index", packed([6, 5], "int64"), "ends before it begins"),
        ("t.ds.index", b"1234567", "not a multiple of 8"),
        ("t.ds.metadata", b"gpt2|4\n5\n5 T", "5 tokens of 4 bytes make 20 bytes, and t.ds has 10"),
        ("t.ds.metadata", b"gpt2", "it does not say"),
        ("t.ds", b"", "5 tokens of 2 bytes make 10 bytes, and t.ds has 0"),
    ],
)
def test_damaged_datatrove_files_are_refused(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    path = write_datatrove(tmp_path / "t.ds", [[1, 2, 3], [4, 5]])
    (tmp_path / name).write_bytes(content)
    assert told in refused(path)


def test_a_datatrove_file_alone_does_not_say_its_width(tmp_path: Path) -> None:
    path = write_datatrove(tmp_path / "t.ds", [[1, 2, 3]], index=False, metadata=False)
    assert "data.format=raw and data.dtype" in refused(path)
    assert ids(opened(path, format=TokenFormat.RAW).train) == [1, 2]


def test_files_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "a.ds", [[1, 2]], name="gpt2")
    write_datatrove(tmp_path / "b.ds", [[1, 2]], name="llama")
    assert "tokenizer llama, and a.ds with gpt2" in refused(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write_llm_c(other / "a.bin", IDS)
    write_llm_c(other / "b.bin", IDS, model="llama-3")
    assert "uint32 ids, and a.bin has uint16" in refused(other)


def test_files_of_two_formats_are_refused(tmp_path: Path) -> None:
    write_llm_c(tmp_path / "a.bin", IDS)
    write_raw(tmp_path / "b.bin", IDS)
    assert "a.bin looks like llm_c and b.bin like raw" in refused(tmp_path)


@pytest.mark.parametrize("head", [b"\x93NUMPY\x01\x00", b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1"])
def test_files_that_are_known_not_to_be_raw_ids_are_refused(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "t.bin").write_bytes(head + bytes(8))
    assert "t.bin" in refused(tmp_path) and "rule  it is " in refused(tmp_path)


# Ids and the vocabulary


def test_b32_the_wrong_width_is_noticed_and_the_right_one_named(tmp_path: Path) -> None:
    values = [(7919 * i) % 50257 for i in range(3000)]
    path = write_raw(tmp_path / "narrow.bin", values, "uint32")
    told = refused(path)
    assert "every second id read as uint16 is the upper half of one" in told and "try   data.dtype=uint32" in told
    path = write_raw(tmp_path / "narrow8.bin", values, "int64")
    assert "try   data.dtype=int64" in refused(path)
    path = write_raw(tmp_path / "wide.bin", values, "uint16")
    told = refused(path, dtype="uint32")
    assert f"as uint16 the largest id is {max(values)}" in told and "try   data.dtype=uint16" in told
    large = [(7919 * i) % 128256 for i in range(3000)]
    path = write_raw(tmp_path / "llama.bin", large, "uint32")
    assert "try   data.dtype=uint32" in refused(path, vocab_size=128256)
    assert ids(opened(path, vocab_size=128256, dtype="uint32").train) == large[:2850]


@pytest.mark.parametrize("vocab", [65536, 65537, 70000])
def test_b32_the_largest_id_survives(tmp_path: Path, vocab: int) -> None:
    dtype = "uint16" if vocab <= 65536 else "uint32"
    write_raw(tmp_path / "train.bin", [0, vocab - 1, 5], dtype)
    write_raw(tmp_path / "val.bin", [vocab - 1, 0], dtype)
    found = opened(tmp_path, vocab_size=vocab, dtype=dtype)
    assert ids(found.train) == [0, vocab - 1, 5] and ids(found.validation) == [vocab - 1, 0]
    assert f"model.vocab_size={vocab}" in refused(tmp_path, vocab_size=vocab - 1, dtype=dtype)


def test_b32_a_wrong_id_anywhere_is_found_when_files_are_opened(tmp_path: Path) -> None:
    stream = list(range(1000)) * 3
    write_llm_c(tmp_path / "a.bin", stream)
    stream[2500] = 50257
    write_llm_c(tmp_path / "b.bin", stream)
    told = refused(tmp_path)
    assert f"b.bin: the token at byte {1024 + 5000} has id 50257" in told and "50257 ids, 0 to 50256" in told


def test_b32_a_wrong_id_that_sampling_missed_is_found_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files_module, "ALL_IDS_BYTES", 6000)
    monkeypatch.setattr(token_files_module, "BLOCK_TOKENS", 50)
    monkeypatch.setattr(token_files_module, "FINGERPRINT_BLOCKS", 2)
    monkeypatch.setattr(token_files_module, "FINGERPRINT_TOKENS", 10)
    stream = [1] * 60_000
    stream[10_077], stream[54_000] = 60_000, EOS
    path = write_llm_c(tmp_path / "a.bin", stream)
    rows = pack(opened(path).train, Packing.CONCAT, 100)
    rows.read(np.arange(100))
    with pytest.raises(DataError, match=f"byte {1024 + 2 * 10_077} has id 60000"):
        rows.read(np.array([3, 100]))
    stream[10_000] = 60_000
    assert f"byte {1024 + 20_000}" in refused(write_llm_c(tmp_path / "a.bin", stream))


def test_text_is_not_taken_for_ids(tmp_path: Path) -> None:
    """Two letters make an id that the vocabulary of GPT-2 has, so no other check would see it."""
    (tmp_path / "a.txt").write_text("First Citizen:\nBefore we proceed any further, hear me speak. äöü\n" * 8)
    message = refused(tmp_path / "a.txt")
    assert "it is text and no token ids" in message and "data=text" in message
    assert len(ids(opened(tmp_path / "a.txt", format=TokenFormat.RAW, vocab_size=2**16).train)) > 100
