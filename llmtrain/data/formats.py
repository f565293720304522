"""A folder of prepared tokens: shards (see `shards.py`) and a description that is written last.

    metadata.json    tokenizer, type of ids, special tokens, counts and SHA-256 of every shard, SHA-256 of the content of each split,
                     what was no document, SHA-256 of itself
    quarantine.jsonl copies of what was no document, for data.on_bad=quarantine
    .checked.json    sizes and times of the files when they were last read through; only in folders above FULL_CHECK_BYTES

A split is its shards one after another; nothing is merged. When a folder is opened, description, sizes and document borders are always
checked. All tokens are too, checksums and ids, in a folder up to FULL_CHECK_BYTES; a larger one is read through once, and again when
size or time of one of its files has changed. Afterwards the files are memory maps and cost no memory until read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.data.shards import FORMAT_VERSION, offsets_file, read_json, token_dtype, token_file, write_json
from llmtrain.data.token_array import TokenArray, map_file
from llmtrain.data.tokenizer import Tokenizer, load_tokenizer
from llmtrain.data.units import SPLITS

METADATA = "metadata.json"
BAD_RECORDS = "quarantine.jsonl"
CHECKED = ".checked.json"
FORMAT = "llmtrain-tokens"
FULL_CHECK_BYTES = 4 << 30
"""Up to this size a folder is read through at every start: a few seconds."""
_BLOCK_TOKENS = 1 << 22
"""Tokens checked at a time."""
_OFFSET_DTYPE = np.dtype("<i8")


class DamagedTokens(DataError):
    """Prepared tokens are not what was written."""


@dataclass(frozen=True)
class PreparedSplit:
    """One split, opened."""

    parts: tuple[NDArray[Any], ...]
    """Token ids of each shard."""
    offsets: Callable[[], NDArray[np.int64]]
    """Reads the document borders: [documents + 1], from 0 to the number of tokens."""
    documents: int
    source_bytes: int
    """Bytes of UTF-8 text the tokens stand for."""
    byte_counts: tuple[int, ...]
    """How often each of the 256 byte values occurs in that text."""
    sha256: str
    """Of tokens and document borders, however they are cut into shards."""

    @property
    def tokens(self) -> TokenArray:
        """All tokens."""
        return TokenArray(self.parts)


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared tokens, opened and checked."""

    folder: Path
    name: str
    """Of the text."""
    held_out: str
    """How validation was chosen, in words."""
    tokenizer: Tokenizer
    dtype: str
    train: PreparedSplit
    validation: PreparedSplit
    bad: Mapping[str, Mapping[str, Any]]
    """Reason -> count and first places of what was no document."""
    is_new: bool = False
    """Whether it was made just now."""


def write_metadata(
    folder: Path,
    key: str,
    tokenizer: Tokenizer,
    facts: Mapping[str, Any],
    shards: Sequence[Mapping[str, Any]],
    status: Callable[[str], None],
) -> None:
    """Describe a folder, whose tokens are read through for it; one without this file is unfinished.

    Args:
        key: of everything the content follows from.
        facts: `name`, `held_out`, `bos_id`, `eos_id` and `bad`.
        shards: the descriptions that `make_shard` gave, in order.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    splits = {split: _split_facts([shard.get(split) for shard in shards]) for split in SPLITS}
    for split, described in splits.items():
        status(f"hashing the {split} tokens")
        described["sha256"] = _content_hash(folder, split, described["shards"], dtype)
    body = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "key": key,
        "dtype": dtype.str,
        **facts,
        "splits": splits,
        "tokenizer": tokenizer.to_json(),
    }
    write_json(folder / METADATA, body)


def is_prepared(folder: Path) -> bool:
    """Whether a folder says that it holds tokens prepared by this program, of whatever version."""
    try:
        body = json.loads((folder / METADATA).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(body, dict) and body.get("format") == FORMAT


def is_complete(folder: Path, key: str) -> bool:
    """Whether a folder has its description, which comes last."""
    try:
        return bool(read_json(folder / METADATA)["key"] == key)
    except (OSError, ValueError, KeyError):
        return False


def expected_files(folder: Path) -> set[str]:
    """Names of the files that belong to a described folder."""
    body = read_json(folder / METADATA)
    names = {METADATA, *([BAD_RECORDS] if body["bad_sha256"] else [])}
    for split, facts in body["splits"].items():
        for shard in facts["shards"]:
            names |= {token_file(split, shard["index"])} if shard["tokens"] else set()
            names |= {offsets_file(split, shard["index"])} if shard["documents"] else set()
    return names


def open_prepared(folder: Path, key: str | None, status: Callable[[str], None]) -> Prepared:
    """Open a folder and check what is in it.

    Args:
        key: what the content has to follow from; None = whatever it holds.

    Raises:
        DamagedTokens: something in it is not as it was written; names the file, and the byte where that is known.
        DataError: it was written by a newer version, or its tokenizer needs a package that is missing.
    """
    path = folder / METADATA
    body = _read_metadata(path, key)
    tokenizer = load_tokenizer(body["tokenizer"])
    dtype = token_dtype(tokenizer.vocab_size)
    if dtype != np.dtype(body["dtype"]):
        raise _damaged(path, f"tokens are stored as {body['dtype']} where {tokenizer.vocab_size} ids need {dtype.str}")
    status(f"checking prepared tokens in {folder}")
    opener = _Opener(folder, dtype, tokenizer.vocab_size, status)
    shards = {split: body["splits"][split]["shards"] for split in SPLITS}
    opener.check_files(shards)
    train, validation = (opener.open_split(split, body["splits"][split]) for split in SPLITS)
    return Prepared(
        folder=folder,
        name=body["name"],
        held_out=body["held_out"],
        tokenizer=tokenizer,
        dtype=dtype.name,
        train=train,
        validation=validation,
        bad=body["bad"],
    )


def mark_checked(folder: Path) -> None:
    """Note that the files of a large folder are as they were written, so that opening it need not read them all.

    Raises:
        FileNotFoundError: some are not there.
    """
    body = read_json(folder / METADATA)
    sizes = [shard["tokens"] for facts in body["splits"].values() for shard in facts["shards"]]
    if sum(sizes) * np.dtype(body["dtype"]).itemsize > FULL_CHECK_BYTES:
        _write_marker(folder, _stamps(folder, {split: facts["shards"] for split, facts in body["splits"].items()}))


def _read_metadata(path: Path, key: str | None) -> dict[str, Any]:
    try:
        body = read_json(path)
        version = body["format_version"]
        intact = body["format"] == FORMAT and key in (None, body["key"])
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(path, f"it cannot be read ({error})") from error
    if version != FORMAT_VERSION:
        rule = f"it has format version {version}; this version of llmtrain reads {FORMAT_VERSION}"
        raise DataError(Problem(str(path), rule, "prepare the text again, or use the version of llmtrain that wrote it"))
    if not intact:
        raise _damaged(path, "it describes other tokens")
    return body


def _split_facts(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Totals of a split, and its shards without what is only needed in total."""
    filled = [(index, part) for index, part in enumerate(parts) if part is not None]
    kept = ("tokens", "documents", "tokens_sha256", "offsets_sha256")
    totals = {name: sum(part[name] for _, part in filled) for name in ("tokens", "documents", "source_bytes")}
    counts = np.sum([np.zeros(256, np.int64), *(np.array(part["byte_counts"], np.int64) for _, part in filled)], axis=0)
    shards = [{"index": index, **{name: part[name] for name in kept}} for index, part in filled]
    return {**totals, "byte_counts": counts.tolist(), "shards": shards}


def _content_hash(folder: Path, split: str, shards: Sequence[Mapping[str, Any]], dtype: np.dtype[Any]) -> str:
    """SHA-256 of the tokens of a split one after another, and of where in the split documents begin."""
    tokens, borders, base = hashlib.sha256(), hashlib.sha256(), 0
    for shard in shards:
        for block in _blocks(folder / token_file(split, shard["index"]), dtype, shard["tokens"]):
            tokens.update(block.data)
        for starts in _blocks(folder / offsets_file(split, shard["index"]), _OFFSET_DTYPE, shard["documents"]):
            borders.update((starts + base).data)
        base += shard["tokens"]
    return hashlib.sha256(f"{tokens.hexdigest()}/{borders.hexdigest()}".encode()).hexdigest()


def _blocks(path: Path, dtype: np.dtype[Any], count: int) -> Iterator[NDArray[Any]]:
    """The `count` values of a file, which is not there if there are none."""
    if count:
        with path.open("rb") as file:
            for start in range(0, count, _BLOCK_TOKENS):
                yield np.fromfile(file, dtype, min(_BLOCK_TOKENS, count - start))


class _Opener:
    """Checks and opens the shards of a folder."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], vocab_size: int, status: Callable[[str], None]) -> None:
        self._folder = folder
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._status = status

    def check_files(self, shards: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Sizes and borders always; the tokens themselves if the folder is small or not known to be as it was written."""
        total = 0
        for split, shard in _each(shards):
            self._check_size(token_file(split, shard["index"]), shard["tokens"] * self._dtype.itemsize)
            self._check_size(offsets_file(split, shard["index"]), shard["documents"] * _OFFSET_DTYPE.itemsize)
            total += shard["tokens"] * self._dtype.itemsize
        for split, shard in _each(shards):
            self._check_offsets(split, shard)
        if total > FULL_CHECK_BYTES and _read_marker(self._folder) == _stamps(self._folder, shards):
            return
        done = 0
        for split, shard in _each(shards):
            self._status(f"checking prepared tokens in {self._folder}: {done / max(1, total):.0%}")
            self._check_tokens(split, shard)
            done += shard["tokens"] * self._dtype.itemsize
        if total > FULL_CHECK_BYTES:
            # A folder that may only be read is read through each time.
            with suppress(OSError):
                _write_marker(self._folder, _stamps(self._folder, shards))

    def open_split(self, split: str, facts: Mapping[str, Any]) -> PreparedSplit:
        """One split as memory maps."""
        shards = facts["shards"]
        return PreparedSplit(
            parts=tuple(self._map(token_file(split, shard["index"]), self._dtype, shard["tokens"]) for shard in shards),
            offsets=lambda: self._read_offsets(split, shards),
            documents=facts["documents"],
            source_bytes=facts["source_bytes"],
            byte_counts=tuple(facts["byte_counts"]),
            sha256=facts["sha256"],
        )

    def _read_offsets(self, split: str, shards: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
        borders = np.empty(sum(shard["documents"] for shard in shards) + 1, np.int64)
        filled, base = 0, 0
        for shard in shards:
            part = borders[filled : filled + shard["documents"]]
            np.add(self._map(offsets_file(split, shard["index"]), _OFFSET_DTYPE, shard["documents"]), base, out=part)
            filled, base = filled + shard["documents"], base + shard["tokens"]
        borders[-1] = base
        return borders

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        return map_file(self._folder / name, dtype, 0, count)

    def _check_size(self, name: str, expected: int) -> None:
        path = self._folder / name
        try:
            size = path.stat().st_size if expected else 0
        except OSError as error:
            raise _damaged(path, f"it cannot be read ({error.strerror})") from error
        if size != expected:
            raise _damaged(path, f"it has {size} bytes where {expected} were written")

    def _check_offsets(self, split: str, shard: Mapping[str, Any]) -> None:
        name = offsets_file(split, shard["index"])
        starts = self._map(name, _OFFSET_DTYPE, shard["documents"])
        if len(starts) and hashlib.sha256(starts.data).hexdigest() != shard["offsets_sha256"]:
            raise _damaged(self._folder / name, "its checksum is wrong")

    def _check_tokens(self, split: str, shard: Mapping[str, Any]) -> None:
        path = self._folder / token_file(split, shard["index"])
        tokens = self._map(path.name, self._dtype, shard["tokens"])
        digest = hashlib.sha256()
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            part = tokens[start : start + _BLOCK_TOKENS]
            if int(part.max()) >= self._vocab_size:
                place = start + int(np.argmax(part >= self._vocab_size))
                byte = place * self._dtype.itemsize
                raise _damaged(path, f"id {int(tokens[place])} at byte {byte} is outside the vocabulary of {self._vocab_size}")
            digest.update(part.data)
        if len(tokens) and digest.hexdigest() != shard["tokens_sha256"]:
            raise _damaged(path, "its checksum is wrong")


def _each(shards: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((split, shard) for split, parts in shards.items() for shard in parts)


def _stamps(folder: Path, shards: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[int]]:
    """Size and time of every token file."""
    stamps = {}
    for split, shard in _each(shards):
        if shard["tokens"]:
            name = token_file(split, shard["index"])
            facts = (folder / name).stat()
            stamps[name] = [facts.st_size, facts.st_mtime_ns]
    return stamps


def _read_marker(folder: Path) -> Any:
    try:
        return read_json(folder / CHECKED)["files"]
    except (OSError, ValueError, KeyError):
        return None


def _write_marker(folder: Path, stamps: Mapping[str, list[int]]) -> None:
    write_json(folder / CHECKED, {"files": stamps})


def _damaged(path: Path, rule: str) -> DamagedTokens:
    return DamagedTokens(Problem(str(path), rule, "prepare the text again"))
