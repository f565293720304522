"""How other programs lay out token files, and what is checked before one is believed. All numbers are little-endian.

raw        Ids and nothing else: `train.bin` and `val.bin` of nanoGPT (data/*/prepare.py, uint16). The type is not stored.
llm_c      256 int32, of which the first three are a magic number, a version and the number of tokens; then the ids. 20240520,
           version 1: GPT-2 in uint16; 20240801, version 7: Llama 3 in uint32. From llm.c (dev/data/data_common.py) and
           modded-nanogpt (data/fineweb.py). Every document begins with the end-of-text token (50256) or begin-of-text (128000),
           and goes on in the next file where one is full.
megatron   NAME.bin has the ids. NAME.idx has `MMIDIDX`, two zero bytes, uint64 version 1, uint8 code of the type, uint64 number S
           of sequences, uint64 number D of document borders; then int32 [S] lengths, int64 [S] byte offsets into NAME.bin and
           int64 [D] borders, as numbers of sequences from 0 to S; for images int8 [S] modes after that. From Megatron-LM
           (megatron/core/datasets/indexed_dataset.py).
datatrove  NAME.ds has the ids; NAME.ds.index uint64 for each document, the number of tokens up to its end; NAME.ds.metadata
           lines of text: `tokenizer|bytes of an id`, the number of tokens, the same to be read. Ids have 2 bytes, or 4 where the
           tokenizer has more than 65,536. From datatrove (pipeline/tokens/tokenizer.py, merger.py; utils/tokenization.py).
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed_data import TokenFormat
from llmtrain.data.paths import unreadable
from llmtrain.data.token_array import BLOCK_TOKENS, map_file

LLM_C_HEADER_BYTES = 1024
LLM_C_KINDS: dict[int, tuple[int, np.dtype[Any], int]] = {
    20240520: (1, np.dtype("<u2"), 50256),
    20240801: (7, np.dtype("<u4"), 128000),
}
"""Magic number -> version, type of the ids, token that begins a document."""
LLM_C_EVALUATION = 20240522
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_OTHER_FILES = {
    b"\x93NUMPY": "a NumPy array with a header; array.tofile(path) writes the ids alone",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file; data=parquet reads text from it",
}


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids, opened."""

    path: Path
    tokens: NDArray[Any]
    """A memory map."""
    first_byte: int
    """Of the first token."""
    index: Path | None = None
    """The file that has its document borders."""
    read_borders: Callable[[], NDArray[np.int64]] | None = None
    """All of them, from 0 to the number of tokens."""
    begin_token: int | None = None
    """Token that begins a document by the rules of the format."""
    made_with: str = ""
    """Tokenizer, where the file names it."""


_TEXT_BYTES = 1 << 16
"""Read of a file to see whether it is text."""
_FEWEST_TEXT_BYTES = 16
"""Fewer bytes may look like text by chance."""


def tell_format(path: Path) -> TokenFormat:
    """The format of a file, by its name and its first bytes.

    Raises:
        DataError: it cannot be read, or it is plain text: two letters make an id below 65,536, and a vocabulary of GPT-2's size has it.
    """
    if path.suffix == ".ds":
        return TokenFormat.DATATROVE
    if path.suffix == ".idx" or path.with_suffix(".idx").is_file():
        return TokenFormat.MEGATRON
    head = _head(path, _TEXT_BYTES)
    if int.from_bytes(head[:4], "little") in (*LLM_C_KINDS, LLM_C_EVALUATION):
        return TokenFormat.LLM_C
    if _is_text(head):
        raise DataError(Problem(str(path), "it is text and no token ids", "data=text, data=jsonl, or data.format=raw for ids"))
    return TokenFormat.RAW


def _is_text(head: bytes) -> bool:
    """Whether the beginning of a file is UTF-8 without control characters, of which ids of two or more bytes are full."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        text = decoder.decode(head)
    except UnicodeDecodeError:
        return False
    return len(head) >= _FEWEST_TEXT_BYTES and all(letter.isprintable() or letter in "\t\n\r\f" for letter in text)


def open_token_file(path: Path, layout: TokenFormat, dtype: str) -> TokenFile:
    """Open a file and check what it says of itself against its size.

    Args:
        dtype: of raw ids.

    Raises:
        DataError: it is not what the format says; names the file, what is there and what there should be.
    """
    if layout is TokenFormat.RAW:
        return _open_raw(path, np.dtype(dtype).newbyteorder("<"))
    return {TokenFormat.LLM_C: _open_llm_c, TokenFormat.MEGATRON: _open_megatron, TokenFormat.DATATROVE: _open_datatrove}[
        layout
    ](path)


def _open_raw(path: Path, dtype: np.dtype[Any]) -> TokenFile:
    head = _head(path, 8)
    for magic, what in _OTHER_FILES.items():
        if head.startswith(magic):
            raise DataError(Problem(str(path), f"it is {what}", "a file of ids alone"))
    size = _size(path)
    if size % dtype.itemsize:
        rule = f"it has {size:,} bytes, which is not a multiple of the {dtype.itemsize} of {dtype.name}"
        raise DataError(
            Problem(str(path), rule, "data.dtype=TYPE that the ids were written with; the file may also be cut off")
        )
    return TokenFile(path, map_file(path, dtype, 0, size // dtype.itemsize), 0)


def _open_llm_c(path: Path) -> TokenFile:
    size = _size(path)
    if size < LLM_C_HEADER_BYTES:
        raise DataError(Problem(str(path), f"it has {size:,} bytes, and the header of llm.c alone has {LLM_C_HEADER_BYTES:,}"))
    magic, version, count = struct.unpack("<3i", _head(path, 12))
    if magic == LLM_C_EVALUATION:
        rule = "it is an evaluation file of llm.c, questions with answers and no stream of tokens"
        raise DataError(Problem(str(path), rule, "data.path=PATTERN that leaves it out"))
    if magic not in LLM_C_KINDS or version != LLM_C_KINDS[magic][0]:
        known = " or ".join(f"{magic} with version {kind[0]}" for magic, kind in LLM_C_KINDS.items())
        rule = f"its header says {magic} with version {version} where llm.c writes {known}"
        raise DataError(Problem(str(path), rule, "data.format=raw if it has no header"))
    _, dtype, begin_token = LLM_C_KINDS[magic]
    expected = LLM_C_HEADER_BYTES + count * dtype.itemsize
    if size != expected:
        rule = f"its header counts {count:,} tokens, which makes {expected:,} bytes, and it has {size:,}"
        raise DataError(Problem(str(path), rule, "copy or download it again"))
    tokens = map_file(path, dtype, LLM_C_HEADER_BYTES, count)
    return TokenFile(path, tokens, LLM_C_HEADER_BYTES, begin_token=begin_token)


def _open_megatron(path: Path) -> TokenFile:
    path, index = path.with_suffix(".bin"), path.with_suffix(".idx")
    size, index_size = _size(path), _size(index)
    head = _head(index, _MEGATRON_HEADER.size)
    if len(head) < _MEGATRON_HEADER.size or not head.startswith(MEGATRON_MAGIC):
        raise DataError(Problem(str(index), "it does not begin with MMIDIDX, so it is no index of Megatron"))
    _, version, code, sequences, borders = _MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in MEGATRON_TYPES:
        rule = f"it has version {version} and type {code} where Megatron writes version 1 and a type from 1 to 8"
        raise DataError(Problem(str(index), rule))
    dtype = np.dtype(MEGATRON_TYPES[code])
    if dtype.kind == "f":
        raise DataError(Problem(str(index), f"its values are {dtype.name}, which are no token ids"))
    expected = len(head) + 12 * sequences + 8 * borders
    if index_size == expected + sequences and sequences:
        raise DataError(Problem(str(index), "it has a mode for each sequence, so it is multimodal data and not text alone"))
    if index_size != expected:
        rule = f"{sequences:,} sequences and {borders:,} document borders make {expected:,} bytes, and it has {index_size:,}"
        raise DataError(Problem(str(index), rule, "copy it again"))
    lengths = map_file(index, np.dtype("<i4"), len(head), sequences)
    pointers = map_file(index, np.dtype("<i8"), len(head) + 4 * sequences, sequences)
    documents = map_file(index, np.dtype("<i8"), len(head) + 12 * sequences, borders)
    _check_megatron(path, index, lengths, pointers, documents, size, dtype.itemsize)
    count = size // dtype.itemsize

    def read_borders() -> NDArray[np.int64]:
        return np.append(pointers // dtype.itemsize, count).astype(np.int64)[documents]

    return TokenFile(path, map_file(path, dtype, 0, count), 0, index, read_borders)


def _check_megatron(
    path: Path, index: Path, lengths: NDArray[Any], pointers: NDArray[Any], documents: NDArray[Any], size: int, width: int
) -> None:
    """Sequences lie one after another and fill the file, and the borders go from the first to the last of them."""
    total = 0
    for start in range(0, len(lengths), BLOCK_TOKENS):
        block = lengths[start : start + BLOCK_TOKENS].astype(np.int64)
        begins = total + np.cumsum(block) - block
        wrong = np.flatnonzero((block < 0) | (pointers[start : start + BLOCK_TOKENS] != begins * width))
        if wrong.size:
            place = start + int(wrong[0])
            rule = (
                f"sequence {place} has length {lengths[place]} and byte offset {pointers[place]}; the one before ends elsewhere"
            )
            raise DataError(Problem(str(index), rule, "copy it again"))
        total += int(block.sum())
    if total * width != size:
        rule = f"{index.name} counts {total:,} tokens of {width} bytes, which makes {total * width:,}, and it has {size:,}"
        raise DataError(Problem(str(path), rule, "copy both files again"))
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise DataError(Problem(str(index), f"its document borders do not go from 0 up to its {len(lengths):,} sequences"))


def _open_datatrove(path: Path) -> TokenFile:
    size, index, metadata = _size(path), Path(f"{path}.index"), Path(f"{path}.metadata")
    ends = _datatrove_ends(index) if index.is_file() else None
    if metadata.is_file():
        made_with, width = _datatrove_metadata(metadata, size)
    elif ends is not None and len(ends) and ends[-1]:
        made_with, width = "", size // int(ends[-1])
    else:
        rule = f"{metadata.name} is not there, and nothing else says how many bytes an id has"
        raise DataError(Problem(str(path), rule, "data.format=raw and data.dtype=uint16 or uint32"))
    count = int(ends[-1]) if ends is not None and len(ends) else size // width
    if width not in (2, 4) or size != count * width:
        rule = f"{count:,} tokens by {index.name} and ids of {width} bytes make {count * width:,} bytes, and it has {size:,}"
        raise DataError(Problem(str(path), rule, "copy all files of it again"))
    tokens = map_file(path, np.dtype(f"<u{width}"), 0, count)
    if ends is None:
        return TokenFile(path, tokens, 0, made_with=made_with)
    borders = np.append(np.zeros(1, np.int64), ends)
    return TokenFile(path, tokens, 0, index, lambda: borders, made_with=made_with)


def _datatrove_ends(index: Path) -> NDArray[np.int64]:
    size = _size(index)
    if size % 8:
        raise DataError(Problem(str(index), f"it has {size:,} bytes, which is not a multiple of 8", "copy it again"))
    ends = map_file(index, np.dtype("<u8"), 0, size // 8).astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any():
        raise DataError(Problem(str(index), "a document ends before it begins", "copy it again"))
    return ends


def _datatrove_metadata(metadata: Path, size: int) -> tuple[str, int]:
    """Tokenizer and bytes of an id."""
    try:
        first, count, *_ = metadata.read_text(encoding="utf-8").splitlines()
        # Before it knew of 4 bytes datatrove wrote the tokenizer alone.
        made_with, _, width = first.rpartition("|") if "|" in first else (first, "", "2")
        tokens, id_bytes = int(count), int(width)
    except OSError as error:
        raise unreadable(metadata, error) from error
    except ValueError as error:
        raise DataError(
            Problem(str(metadata), "it does not say `tokenizer|bytes of an id` and the number of tokens")
        ) from error
    if tokens * id_bytes != size:
        rule = f"{tokens:,} tokens of {id_bytes} bytes make {tokens * id_bytes:,} bytes, and {metadata.stem} has {size:,}"
        raise DataError(Problem(str(metadata), rule, "copy all files of it again"))
    return made_with, id_bytes


def _head(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise unreadable(path, error) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
