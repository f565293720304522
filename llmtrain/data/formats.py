"""Prepared tokens on disk: one folder with a token file and an offsets file per split, and a description that is written last.

    train.tokens, validation.tokens      token ids, little-endian unsigned 16 bit up to 65,536 ids, else 32 bit
    train.offsets, validation.offsets    int64, documents + 1: where each document begins, then the number of tokens
    metadata.json                        tokenizer, dtype, counts, SHA-256 of each file and of itself

Everything is checked when a folder is opened; after that the files are memory maps and cost no memory until read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.data.packing import TokenStream
from llmtrain.data.tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 1
SPLITS = ("train", "validation")
METADATA = "metadata.json"
_CHECK_TOKENS = 1 << 22
"""Tokens checked at a time."""


class DamagedTokens(DataError):
    """Prepared tokens are not what was written."""


@dataclass(frozen=True)
class PreparedSplit:
    """One split, opened."""

    stream: TokenStream
    source_bytes: int
    """Bytes of UTF-8 text the tokens stand for."""
    byte_counts: tuple[int, ...]
    """How often each of the 256 byte values occurs in that text."""
    sha256: str
    """Of tokens and document borders."""


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared tokens, opened and checked."""

    tokenizer: Tokenizer
    train: PreparedSplit
    validation: PreparedSplit


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id of a vocabulary, little-endian."""
    assert 0 < vocab_size <= 2**32
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class SplitWriter:
    """Writes the tokens of one split as they come; nothing is kept in memory but the document borders."""

    def __init__(self, file: BinaryIO, split: str, vocab_size: int) -> None:
        self._file, self._split = file, split
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._digest = hashlib.sha256()
        self._num_tokens = 0
        self._offsets = [0]

    def add(self, ids: NDArray[np.int64]) -> None:
        """Append tokens to the current document.

        Raises:
            DataError: an id that the vocabulary does not have; a cast would have turned it into another token.
        """
        bad = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if bad.size:
            place = self._num_tokens + int(bad[0])
            raise DataError(
                Problem(
                    f"token {place} of {self._split} has id {int(ids[bad[0]])}",
                    f"the tokenizer's vocabulary has {self._vocab_size} ids (document {len(self._offsets) - 1})",
                )
            )
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._num_tokens += len(ids)

    def end_document(self) -> None:
        """The next token belongs to another document."""
        self._offsets.append(self._num_tokens)

    def finish(self, offsets_path: Path) -> dict[str, Any]:
        """Flush the tokens to the disk, write the document borders, and describe both."""
        _sync(self._file)
        offsets = np.array(self._offsets, dtype="<i8").tobytes()
        with offsets_path.open("wb") as file:
            file.write(offsets)
            _sync(file)
        return {
            "tokens": self._num_tokens,
            "documents": len(self._offsets) - 1,
            "tokens_sha256": self._digest.hexdigest(),
            "offsets_sha256": hashlib.sha256(offsets).hexdigest(),
        }


def write_metadata(folder: Path, key: str, tokenizer: Tokenizer, splits: Mapping[str, Mapping[str, Any]]) -> None:
    """Describe a folder; a folder without this file is unfinished."""
    body = {
        "format": "llmtrain-tokens",
        "format_version": FORMAT_VERSION,
        "key": key,
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "tokenizer": tokenizer.to_json(),
        "splits": {name: dict(split) for name, split in splits.items()},
    }
    with (folder / METADATA).open("w", encoding="utf-8") as file:
        json.dump({"sha256": _canonical_hash(body), **body}, file)
        _sync(file)


def open_prepared(folder: Path, key: str, status: Callable[[str], None]) -> Prepared:
    """Open a folder and check every size, border, id and checksum in it.

    Raises:
        DamagedTokens: something in it is not as it was written; names the file, and the byte where that is known.
    """
    path = folder / METADATA
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        stated = body.pop("sha256")
        intact = stated == _canonical_hash(body) and body["key"] == key and body["format_version"] == FORMAT_VERSION
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, f"it cannot be read ({type(error).__name__})") from error
    if not intact:
        raise _damaged(path, "its checksum or key is wrong")
    tokenizer = load_tokenizer(body["tokenizer"])
    dtype = token_dtype(tokenizer.vocab_size)
    if dtype != np.dtype(body["dtype"]):
        raise _damaged(path, f"tokens are stored as {body['dtype']} where {tokenizer.vocab_size} ids need {dtype.str}")
    status(f"checking prepared tokens in {folder}")
    train, validation = (_open_split(folder, split, body["splits"][split], dtype, tokenizer.vocab_size) for split in SPLITS)
    return Prepared(tokenizer, train, validation)


def _open_split(folder: Path, split: str, stated: Mapping[str, Any], dtype: np.dtype[Any], vocab_size: int) -> PreparedSplit:
    tokens = _map(folder / f"{split}.tokens", dtype, stated["tokens"])
    offsets = _map(folder / f"{split}.offsets", np.dtype("<i8"), stated["documents"] + 1)
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _CHECK_TOKENS):
        part = tokens[start : start + _CHECK_TOKENS]
        if int(part.max()) >= vocab_size:
            place = start + int(np.argmax(part >= vocab_size))
            rule = f"id {int(tokens[place])} at byte {place * dtype.itemsize} is outside the vocabulary of {vocab_size}"
            raise _damaged(folder / f"{split}.tokens", rule)
        digest.update(part.data)
    if digest.hexdigest() != stated["tokens_sha256"]:
        raise _damaged(folder / f"{split}.tokens", "its checksum is wrong")
    if hashlib.sha256(offsets.data).hexdigest() != stated["offsets_sha256"]:
        raise _damaged(folder / f"{split}.offsets", "its checksum is wrong")
    both = hashlib.sha256(f"{stated['tokens_sha256']}/{stated['offsets_sha256']}".encode()).hexdigest()
    return PreparedSplit(TokenStream(tokens, offsets), stated["source_bytes"], tuple(stated["byte_counts"]), both)


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise _damaged(path, f"it has {size} bytes where {count * dtype.itemsize} were written")
        return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if size else np.empty(0, dtype)
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror})") from error


def _damaged(path: Path, rule: str) -> DamagedTokens:
    return DamagedTokens(Problem(str(path), rule))


def _canonical_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
