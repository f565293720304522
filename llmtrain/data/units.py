"""Text as work: everything a source holds, cut into units that processes tokenize on their own.

Units in order, and the documents of each in order, are the text; how it is cut changes no token. A unit is small enough to send to
another process, which then reads it from the files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmtrain.config.typed_data import RecordData, StdlibData, TextData, TextSource
from llmtrain.data import records, sources
from llmtrain.data.records import BadRecord, Unit, find_units, read_unit
from llmtrain.data.sources import BLOCK_BYTES, VALIDATION_PATH, Document, cut_document, last_cut, read_blocks, scan_source

SPLITS = ("train", "validation")
SMALLEST_UNIT_BYTES = 4 << 20
"""Below this a unit costs more to hand out and to flush than to tokenize, unless `prepare.shard_bytes` asks for less."""
UNITS_OF_A_TEXT = 64
"""Text too small to give each of many processes a full shard is cut into this many."""
_WHOLE = 1 << 62
"""A block size that cuts nothing."""


@dataclass(frozen=True)
class Block:
    """A stretch of a document that the tokenizer gets as one string."""

    split: str
    text: str
    begins: bool
    """Whether a document begins here."""
    ends: bool


class WorkUnit(Protocol):
    """A stretch of the text."""

    @property
    def split(self) -> str | None:
        """The split of all its documents; None where they decide it themselves."""
        ...

    @property
    def source_bytes(self) -> int:
        """Bytes on disk, as a measure of work."""
        ...

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        ...

    def blocks(self, block_bytes: int) -> Iterator[Block | BadRecord]:
        """Its documents in blocks of at most `block_bytes`, and what is no document.

        Raises:
            DataError: a file cannot be read, or changed since it was found.
        """
        ...


@dataclass(frozen=True)
class TextUnit:
    """Stretches of text files, all of one split."""

    split: str
    pieces: tuple[tuple[Document, bool, bool], ...]
    """Each with whether a document begins and whether one ends with it."""

    @property
    def source_bytes(self) -> int:
        return sum(piece.stop - piece.start for piece, _, _ in self.pieces)

    @property
    def place(self) -> str:
        first, last = self.pieces[0][0], self.pieces[-1][0]
        return f"{first.file.path} from byte {first.start} on" if first.file == last.file else f"{first.file.path} and others"

    def blocks(self, block_bytes: int) -> Iterator[Block | BadRecord]:
        for piece, begins, ends in self.pieces:
            texts = read_blocks(piece, block_bytes)
            text = next(texts, "")
            for following in texts:
                yield Block(self.split, text, begins, ends=False)
                text, begins = following, False
            yield Block(self.split, text, begins, ends)


@dataclass(frozen=True)
class RecordUnit:
    """A stretch of a file of records."""

    unit: Unit
    source: RecordData
    split: str | None
    """None = each document is held out or not by the hash of its text."""

    @property
    def source_bytes(self) -> int:
        return self.unit.source_bytes

    @property
    def place(self) -> str:
        return self.unit.where

    def blocks(self, block_bytes: int) -> Iterator[Block | BadRecord]:
        for record in read_unit(self.unit, self.source):
            if isinstance(record, BadRecord):
                yield record
                continue
            data = record.text.encode()
            split = self.split or SPLITS[is_held_out(data, self.source.validation_fraction)]
            start = 0
            while len(data) - start > block_bytes:
                stop = start + last_cut(data[start : start + block_bytes])
                yield Block(split, data[start:stop].decode(), start == 0, ends=False)
                start = stop
            yield Block(split, data[start:].decode() if start else record.text, start == 0, ends=True)


def is_held_out(text: bytes, fraction: float) -> bool:
    """Whether a document belongs to validation: its SHA-256 as a fraction, so it stays there whatever else comes and goes."""
    return int.from_bytes(hashlib.sha256(text).digest(), "big") < fraction * 2**256


@dataclass(frozen=True)
class Text:
    """What a source holds, found but not yet tokenized."""

    name: str
    held_out: str
    """How validation was chosen, in words."""
    skipped: Counter[str]
    """Reason -> files left out."""
    identity: dict[str, Any]
    """Everything that decides which documents there are and how they are cut into units, as JSON; no absolute paths."""
    source_bytes: int
    check_unchanged: Callable[[], None]
    """Raises DataError if a file is not what it was when it was found."""
    units: Callable[[bool], list[WorkUnit]]
    """The units; the argument says whether a document may be cut between words."""

    def training_text(self) -> Iterator[str]:
        """The training split block by block, to learn a vocabulary from; what is no document is left out here and counted later."""
        for unit in (unit for unit in self.units(True) if unit.split != SPLITS[1]):
            for block in unit.blocks(BLOCK_BYTES):
                if isinstance(block, Block) and block.split == SPLITS[0]:
                    yield block.text


def find_text(source: TextSource, shard_bytes: int) -> Text:
    """Look for the text of a source and cut it into units of at most `shard_bytes`.

    Raises:
        ConfigError: a path names a home folder that is not there.
        DataError: no text, or files that cannot be read.
    """
    return _find_records(source, shard_bytes) if isinstance(source, RecordData) else _find_files(source, shard_bytes)


def block_bytes(cuts_at_words: bool) -> int:
    """How much of a document a tokenizer gets at a time: all of it, unless cutting between words changes nothing."""
    return BLOCK_BYTES if cuts_at_words else _WHOLE


def unit_bytes(source_bytes: int, shard_bytes: int) -> int:
    """The size of a unit: of the text and the setting alone, so that any number of processes makes the same shards."""
    return max(8, min(shard_bytes, max(SMALLEST_UNIT_BYTES, source_bytes // UNITS_OF_A_TEXT)))


def _find_files(source: StdlibData | TextData, shard_bytes: int) -> Text:
    scan = scan_source(source)
    splits = dict(zip(SPLITS, (scan.train, scan.validation)))
    total = sum(document.stop - document.start for documents in splits.values() for document in documents)
    size = unit_bytes(total, shard_bytes)

    def units(may_cut: bool) -> list[WorkUnit]:
        return [unit for split, documents in splits.items() for unit in _group(split, documents, size, may_cut)]

    identity = {split: [(d.file.sha256, d.start, d.stop) for d in documents] for split, documents in splits.items()}
    return Text(
        name=scan.name,
        held_out=scan.held_out,
        skipped=scan.skipped,
        identity={**identity, "unit_bytes": size},
        source_bytes=total,
        check_unchanged=lambda: sources.check_unchanged(scan.files),
        units=units,
    )


def _group(split: str, documents: tuple[Document, ...], size: int, may_cut: bool) -> Iterator[TextUnit]:
    """Documents in order, together until there are `size` bytes; longer ones in pieces where they may be cut."""
    pieces: list[tuple[Document, bool, bool]] = []
    held = 0
    for document in documents:
        for piece in cut_document(document, size) if may_cut else [document]:
            length = piece.stop - piece.start
            if pieces and held + length > size:
                yield TextUnit(split, tuple(pieces))
                pieces, held = [], 0
            pieces.append((piece, piece.start == document.start, piece.stop == document.stop))
            held += length
    if pieces:
        yield TextUnit(split, tuple(pieces))


def _find_records(source: RecordData, shard_bytes: int) -> Text:
    sides: list[tuple[str | None, str, str]] = [(None, "path", source.path)]
    if source.validation_path is not None:
        sides = [(SPLITS[0], "path", source.path), (SPLITS[1], "validation_path", source.validation_path)]

    def find(size: int) -> list[RecordUnit]:
        found = [(split, find_units(path, f"data.{key}={path}", source, size)) for split, key, path in sides]
        return [RecordUnit(unit, source, split) for split, units in found for unit in units]

    units = find(shard_bytes)
    total = sum(unit.source_bytes for unit in units)
    size = unit_bytes(total, shard_bytes)
    units = find(size) if size < shard_bytes else units
    stamps = dict.fromkeys((unit.split, file) for unit in units for file in unit.unit.files)
    identity = {
        "files": [[split, file.name, file.size, file.modified_ns, file.ends_sha256] for split, file in stamps],
        "reading": [source.kind, source.text_field, source.max_document_bytes],
        "validation_fraction": None if source.validation_path else source.validation_fraction,
        "unit_bytes": size,
    }
    return Text(
        name=Path(source.path).name or source.path,
        held_out=VALIDATION_PATH if source.validation_path else "whole documents held out",
        skipped=Counter(),
        identity=identity,
        source_bytes=total,
        check_unchanged=lambda: records.check_unchanged(dict.fromkeys(file for _, file in stamps)),
        units=lambda may_cut: list(units),
    )
