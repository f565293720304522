"""A shard: the tokens of one unit of text, as files of their own.

    train-00007.tokens       token ids, little-endian unsigned 16 bit up to 65,536 ids, else 32 bit
    train-00007.offsets      int64: where in the shard's tokens each document that begins in it begins
    shard-00007.json         counts, checksums, what was no document; written last
    quarantine-00007.jsonl   copies of what was no document, for data.on_bad=quarantine

The same for validation; a file that would be empty is left out. Every file is written under a name of its own, flushed to the disk and
renamed, and its content follows from the text and the settings alone: a kill leaves whole shards or none, and two processes that make
the same one do not disturb each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed_data import OnBad
from llmtrain.data.framing import Framing
from llmtrain.data.record_places import PlaceTeller
from llmtrain.data.records import BadRecord
from llmtrain.data.tokenizer import Tokenizer
from llmtrain.data.units import SPLITS, Block, WorkUnit, block_bytes

FORMAT_VERSION = 3
GROUP_CHARACTERS = 1 << 20
"""Text handed to the tokenizer at once, so that one with threads can use them."""
SHOWN_PLACES = 3
KEPT_PLACES = 5
"""Places told for each reason why records were no documents."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")

Report = Callable[[int, int], None]
"""Gets the bytes of text and the tokens that a unit has come to."""


@dataclass(frozen=True)
class ShardSettings:
    """What all shards of a preparation have in common."""

    folder: Path
    key: str
    """Of everything the tokens depend on."""
    tokenizer: Tokenizer
    framing: Framing
    on_bad: OnBad


@dataclass
class BadRecords:
    """What was no document: how often for each reason, and the first places."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, count: int, places: list[str]) -> None:
        """Note records, in the order of the text."""
        self.counts[reason] = self.counts.get(reason, 0) + count
        kept = self.places.setdefault(reason, [])
        kept += places[: KEPT_PLACES - len(kept)]

    def to_dict(self) -> dict[str, Any]:
        return {reason: {"count": count, "places": self.places[reason]} for reason, count in sorted(self.counts.items())}

    def merge(self, stored: Mapping[str, Any]) -> None:
        """Add what `to_dict` gave for later text."""
        for reason, facts in stored.items():
            self.add(reason, facts["count"], facts["places"])


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id of a vocabulary, little-endian."""
    assert 0 < vocab_size <= 2**32
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def make_shard(settings: ShardSettings, index: int, unit: WorkUnit, report: Report) -> dict[str, Any]:
    """Tokenize a unit, unless its shard is there already, and give the shard's description.

    Raises:
        DataError: a file or record at fault.
        OSError: the shard cannot be written.
    """
    found = _finished(settings, index)
    if found is not None:
        return found
    folder = settings.folder
    writers = {split: SplitWriter(folder, split, index, settings.tokenizer.vocab_size) for split in SPLITS}
    bad, copies = BadRecords(), FileWriter(folder / bad_file(index))
    with ExitStack() as files:
        for writer in (*writers.values(), copies):
            files.callback(writer.close)
        for group in _groups(_documents(unit, settings, bad, copies)):
            _encode(group, settings, writers)
            report(sum(w.source_bytes for w in writers.values()), sum(w.num_tokens for w in writers.values()))
        description: dict[str, Any] = {"format_version": FORMAT_VERSION, "key": settings.key, "index": index}
        description |= {split: facts for split, writer in writers.items() if (facts := writer.finish())}
        description |= {"bad": bad.to_dict(), "bad_sha256": copies.finish()}
    write_json(folder / description_file(index), description)
    return description


def describe_bad(bad: Mapping[str, Mapping[str, Any]]) -> str:
    """For example `3 bad records (1 not JSON, 2 null instead of a text)`; empty where there are none."""
    total = sum(facts["count"] for facts in bad.values())
    if not total:
        return ""
    reasons = ", ".join(f"{facts['count']:,} {reason}" for reason, facts in bad.items())
    return f"{total:,} bad {'record' if total == 1 else 'records'} ({reasons})"


def first_places(bad: Mapping[str, Mapping[str, Any]]) -> str:
    """Where some of them are, for example `a.jsonl:31, a.jsonl:55`."""
    return ", ".join([place for facts in bad.values() for place in facts["places"]][:SHOWN_PLACES])


def description_file(index: int) -> str:
    return f"shard-{index:05}.json"


def bad_file(index: int) -> str:
    return f"quarantine-{index:05}.jsonl"


def token_file(split: str, index: int) -> str:
    return f"{split}-{index:05}.tokens"


def offsets_file(split: str, index: int) -> str:
    return f"{split}-{index:05}.offsets"


class FileWriter:
    """A file that appears under its name when it is complete and on the disk, and not at all if it would be empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        if len(data):
            if self._file is None:
                self._file = self._temporary.open("wb")
            self._file.write(data)
            self._digest.update(data)

    def finish(self) -> str:
        """Publish the file; its SHA-256, or an empty text where there is none."""
        if self._file is None:
            return ""
        _sync(self._file)
        self._file.close()
        os.replace(self._temporary, self._path)
        return self._digest.hexdigest()

    def close(self) -> None:
        """Remove what was not finished."""
        if self._file is not None:
            # On a full disk the last bytes cannot be written; the file has to go all the same.
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


class SplitWriter:
    """Writes a shard's tokens of one split as they come; nothing is kept in memory but where documents begin."""

    def __init__(self, folder: Path, split: str, index: int, vocab_size: int) -> None:
        self._split = split
        self._tokens = FileWriter(folder / token_file(split, index))
        self._offsets = FileWriter(folder / offsets_file(split, index))
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._starts = array("q")
        self._byte_counts = np.zeros(256, dtype=np.int64)
        self.num_tokens = 0
        self.source_bytes = 0

    def begin_document(self) -> None:
        """The next token belongs to another document."""
        self._starts.append(self.num_tokens)

    def add(self, ids: NDArray[np.int64], text: str) -> None:
        """Append tokens to the current document, and the text they stand for to the counts.

        Raises:
            DataError: an id that the vocabulary does not have; a cast would have turned it into another token.
        """
        bad = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if bad.size:
            place = self.num_tokens + int(bad[0])
            raise DataError(
                Problem(
                    f"token {place} of {self._split} has id {int(ids[bad[0]])}",
                    f"the tokenizer's vocabulary has {self._vocab_size} ids (document {len(self._starts)} of the shard)",
                )
            )
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self.num_tokens += len(ids)
        data = np.frombuffer(text.encode(), dtype=np.uint8)
        self._byte_counts += np.bincount(data, minlength=256)
        self.source_bytes += len(data)

    def finish(self) -> dict[str, Any]:
        """Publish the files and describe them; empty where there was nothing."""
        if not self.num_tokens and not self._starts:
            return {}
        self._offsets.write(np.asarray(self._starts).astype("<i8", copy=False).data)
        return {
            "tokens": self.num_tokens,
            "documents": len(self._starts),
            "source_bytes": self.source_bytes,
            "byte_counts": self._byte_counts.tolist(),
            "tokens_sha256": self._tokens.finish(),
            "offsets_sha256": self._offsets.finish(),
        }

    def close(self) -> None:
        """Remove what was not finished."""
        self._tokens.close()
        self._offsets.close()


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Write a description with a checksum of itself, whole or not at all."""
    writer = FileWriter(path)
    try:
        writer.write(json.dumps({"sha256": _canonical_hash(body), **body}).encode())
        writer.finish()
    finally:
        writer.close()


def read_json(path: Path) -> dict[str, Any]:
    """A description without its checksum.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what was written.
    """
    body = json.loads(path.read_bytes())
    if not isinstance(body, dict) or body.pop("sha256", None) != _canonical_hash(body):
        raise ValueError("its checksum is wrong")
    return body


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content; an empty text for one that is not there.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def _finished(settings: ShardSettings, index: int) -> dict[str, Any] | None:
    """The description of a shard that an earlier process finished, if all of it is as it was written and as it is wanted."""
    folder = settings.folder
    try:
        found = read_json(folder / description_file(index))
        expected = (FORMAT_VERSION, settings.key, index)
        if (found["format_version"], found["key"], found["index"]) != expected:
            return None
        files = {bad_file(index): found["bad_sha256"]}
        for split in SPLITS:
            facts = found.get(split, {"tokens_sha256": "", "offsets_sha256": ""})
            files |= {token_file(split, index): facts["tokens_sha256"], offsets_file(split, index): facts["offsets_sha256"]}
        if any(file_sha256(folder / name) != digest for name, digest in files.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # What was found while bad records were skipped will not do where they are an error, or where copies are wanted.
    is_missing = settings.on_bad is OnBad.ERROR or (settings.on_bad is OnBad.QUARANTINE and not found["bad_sha256"])
    return None if found["bad"] and is_missing else found


def _documents(unit: WorkUnit, settings: ShardSettings, bad: BadRecords, copies: FileWriter) -> Iterator[Block]:
    """The blocks of a unit's documents; what is no document is dealt with as `data.on_bad` says."""
    for block in unit.blocks(block_bytes(settings.tokenizer.cuts_at_words)):
        if isinstance(block, Block):
            yield block
            continue
        if settings.on_bad is OnBad.ERROR:
            raise _bad_record(block)
        bad.add(block.reason.value, 1, [block.place])
        if settings.on_bad is OnBad.QUARANTINE:
            raw = block.raw.decode("utf-8", errors="backslashreplace")
            copies.write((json.dumps({"place": block.place, "reason": block.reason.value, "raw": raw}) + "\n").encode())


def _bad_record(record: BadRecord) -> DataError:
    cure = "mend it, or data.on_bad=skip (quarantine keeps copies); what is tokenized already is kept"
    return DataError(Problem(PlaceTeller().tell(record.place), f"no document: {record.reason.value}", cure))


def _groups(blocks: Iterator[Block]) -> Iterator[list[Block]]:
    group: list[Block] = []
    size = 0
    for block in blocks:
        group.append(block)
        size += len(block.text)
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(group: list[Block], settings: ShardSettings, writers: Mapping[str, SplitWriter]) -> None:
    for block, ids in zip(group, settings.tokenizer.encode_many([block.text for block in group])):
        writer = writers[block.split]
        if block.begins:
            writer.begin_document()
        writer.add(settings.framing.add(ids, begins=block.begins, ends=block.ends), block.text)


def _canonical_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
