"""Text as work: everything a source holds, cut into units that processes tokenize on their own.

Units in order, and the documents of each in order, are the text; how it is cut changes no token. A unit is small enough to send to
another process, which then reads it from the files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llmtrain.config.typed_data import RecordData, StdlibData, TextData, TextSource
from llmtrain.data.paths import FoundFiles, check_unchanged, leave_to_validation
from llmtrain.data.record_units import SourceStamp, stamp
from llmtrain.data.records import BadRecord, Unit, cut_units, find_records, read_unit
from llmtrain.data.sources import IS_VALIDATION, VALIDATION_PATH, Document, cut_document, read_blocks, scan_source
from llmtrain.data.text_cuts import BLOCK_BYTES, CUTS_VERSION, piece_end

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
        """Its documents in blocks of about `block_bytes`, and what is no document.

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
    """Stretches of files of records: one of a large file, or several small files."""

    units: tuple[Unit, ...]
    source: RecordData
    split: str | None
    """None = each document is held out or not by the hash of its text."""

    @property
    def source_bytes(self) -> int:
        return sum(unit.source_bytes for unit in self.units)

    @property
    def place(self) -> str:
        return f"{self.units[0].where}{' and others' if len(self.units) > 1 else ''}"

    def blocks(self, block_bytes: int) -> Iterator[Block | BadRecord]:
        for record in chain.from_iterable(read_unit(unit, self.source) for unit in self.units):
            if isinstance(record, BadRecord):
                yield record
                continue
            data = record.text.encode()
            split = self.split or SPLITS[is_held_out(data, self.source.validation_fraction)]
            start, stop = 0, piece_end(lambda low, high: data[low:high], 0, len(data), block_bytes)
            while stop < len(data):
                yield Block(split, data[start:stop].decode(), start == 0, ends=False)
                start, stop = stop, piece_end(lambda low, high: data[low:high], stop, len(data), block_bytes)
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
        identity={**identity, "unit_bytes": size, "cuts": CUTS_VERSION},
        source_bytes=total,
        check_unchanged=lambda: check_unchanged(scan.files),
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
    sides, num_left_out = _record_files(source)

    def cut(size: int) -> list[list[Unit]]:
        return [cut_units(files, f"data.{key}={path}", source, size) for _, key, path, files in sides]

    found = cut(shard_bytes)
    total = sum(unit.source_bytes for units in found for unit in units)
    size = unit_bytes(total, shard_bytes)
    found = cut(size) if size < shard_bytes else found
    units = [unit for side, units in zip(sides, found) for unit in _group_records(side.split, units, size, source)]
    identity = {
        "files": [[side.split, file.name, file.size, file.sample_sha256] for side in sides for file in side.files],
        "reading": [source.kind, source.text_field, source.max_document_bytes],
        "validation_fraction": None if source.validation_path else source.validation_fraction,
        "unit_bytes": size,
        "cuts": CUTS_VERSION,
    }
    return Text(
        name=Path(source.path).name or source.path,
        held_out=VALIDATION_PATH if source.validation_path else "whole documents held out",
        skipped=Counter({IS_VALIDATION: num_left_out}),
        identity=identity,
        source_bytes=total,
        check_unchanged=lambda: check_unchanged(dict.fromkeys(file for side in sides for file in side.files)),
        units=lambda may_cut: list(units),
    )


class _Side(NamedTuple):
    """Files of records for one split."""

    split: str | None
    """None = documents of both."""
    key: str
    path: str
    files: list[SourceStamp]


def _record_files(source: RecordData) -> tuple[list[_Side], int]:
    """The files of each split, and how many of `data.path` are left out since `data.validation_path` names them too."""
    setting = f"data.path={source.path}"
    found = find_records(source.path, setting, source)
    if source.validation_path is None:
        return [_Side(None, "path", source.path, _stamped(found, found.paths))], 0
    if source.validation_path == source.path:
        # The same on purpose: a text that is scored whole.
        files = _stamped(found, found.paths)
        return [_Side(SPLITS[0], "path", source.path, files), _Side(SPLITS[1], "path", source.path, files)], 0
    held_out = find_records(source.validation_path, f"data.validation_path={source.validation_path}", source)
    paths = leave_to_validation(found.paths, held_out.paths, setting)
    sides = [
        _Side(SPLITS[0], "path", source.path, _stamped(found, paths)),
        _Side(SPLITS[1], "validation_path", source.validation_path, _stamped(held_out, held_out.paths)),
    ]
    return sides, len(found.paths) - len(paths)


def _stamped(found: FoundFiles, paths: Sequence[Path]) -> list[SourceStamp]:
    return [stamp(path, found.name(path)) for path in paths]


def _group_records(split: str | None, units: Sequence[Unit], size: int, source: RecordData) -> Iterator[RecordUnit]:
    """Units in order, small ones together until there are `size` bytes."""
    held: list[Unit] = []
    held_bytes = 0
    for unit in units:
        if held and held_bytes + unit.source_bytes > size:
            yield RecordUnit(tuple(held), source, split)
            held, held_bytes = [], 0
        held.append(unit)
        held_bytes += unit.source_bytes
    yield RecordUnit(tuple(held), source, split)
