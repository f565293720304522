"""Where text comes from: files become documents, and documents are held out for validation by what they contain.

A file is one document. With at least MIN_DOCUMENTS_TO_SPLIT of them whole documents are held out: those whose SHA-256, read as
a fraction, is below `validation_fraction`, so that a document stays on its side when others come and go, and copies of it go
with it. With fewer the tail of every file is held out, from a line break near the wanted place; head and tail are then
documents of their own. Where validation has a path of its own, nothing is held out.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.paths import user_path
from llmtrain.config.typed_data import StdlibData, TextData
from llmtrain.data.paths import changed, leave_to_validation, unreadable, walk
from llmtrain.data.text_cuts import BLOCK_BYTES, Read, piece_end

MIN_DOCUMENTS_TO_SPLIT = 20
IS_VALIDATION = "validation"
"""Why files of `data.path` are not trained on where `data.validation_path` names them too."""
VALIDATION_PATH = "all of data.validation_path"
"""How validation was chosen where it has a path of its own."""
LINE_BREAK_SEARCH_BYTES = 1 << 20
STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class SourceFile:
    """A file that holds text, as it was when it was scanned."""

    path: Path
    size: int
    """Bytes."""
    modified_ns: int
    sha256: str


@dataclass(frozen=True)
class Document:
    """Bytes [start, stop) of a file; both ends lie between characters."""

    file: SourceFile
    start: int
    stop: int


@dataclass(frozen=True)
class Scan:
    """What was found, and how it is split."""

    name: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    held_out: str
    """How validation was chosen, in words."""
    skipped: Counter[str]
    """Reason -> files left out."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(dict.fromkeys(document.file for document in (*self.train, *self.validation)))


def scan_source(source: StdlibData | TextData) -> Scan:
    """Read every file once: which are text, what they contain, how they are split.

    Raises:
        ConfigError: a path names a home folder that is not there.
        DataError: nothing there, a file that cannot be read, a single file that is not UTF-8 or empty, or a split without text.
    """
    skipped: Counter[str] = Counter()
    if isinstance(source, StdlibData):
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in walk(root, skipped, STDLIB_SKIPPED_FOLDERS) if _is_library_module(path)]
        files = _scan_files(root, paths, "data=stdlib", skipped)
        # What is left out of the standard library is ours to choose; what is left out of somebody's folder is worth a word.
        return _split("Python's own library", files, "data=stdlib", source.validation_fraction, "whole modules", Counter())
    setting = f"data.path={source.path}"
    root = user_path(source.path, setting)
    paths = _text_paths(root, setting, skipped)
    name = root.name or str(root)
    if source.validation_path is None:
        files = _scan_files(root, paths, setting, skipped)
        return _split(name, files, setting, source.validation_fraction, "whole files", skipped)
    held_out_setting = f"data.validation_path={source.validation_path}"
    held_out_root = user_path(source.validation_path, held_out_setting)
    # Named the same on purpose: a text that is scored whole is read twice, and what is left out of it is counted once.
    same = source.path == source.validation_path
    held_out = paths if same else _text_paths(held_out_root, held_out_setting, skipped)
    train = paths if same else leave_to_validation(paths, held_out, setting)
    skipped[IS_VALIDATION] += len(paths) - len(train)
    validation_files = _scan_files(held_out_root, held_out, held_out_setting, skipped)
    train_files = validation_files if same else _scan_files(root, train, setting, skipped)
    sides = (tuple(Document(file, 0, file.size) for file in side) for side in (train_files, validation_files))
    return Scan(name, *sides, VALIDATION_PATH, skipped)


def _scan_files(root: Path, paths: list[Path], setting: str, skipped: Counter[str]) -> list[SourceFile]:
    files = [file for path in paths if (file := _scan_file(path, skipped, alone=path == root)) is not None]
    if not files:
        cure = f"{setting.partition('=')[0]}=FILE_OR_FOLDER with UTF-8 text"
        raise DataError(Problem(setting, f"no text in {root}{_because(skipped)}", cure))
    return files


def _split(name: str, files: list[SourceFile], setting: str, fraction: float, unit: str, skipped: Counter[str]) -> Scan:
    """Hold documents out, or tails where there are few."""
    if len(files) >= MIN_DOCUMENTS_TO_SPLIT:
        train, validation = _split_by_content(files, fraction)
        held_out = f"{unit} held out"
    else:
        train, validation = _split_tails(files, fraction)
        held_out = "the tail of each file held out" if len(files) > 1 else "the tail of the file held out"
    for split, documents, cure in (("training", train, "lower"), ("validation", validation, "raise")):
        if not documents:
            rule = f"nothing is left for {split} ({len(files)} files, validation_fraction={fraction:g})"
            raise DataError(Problem(setting, rule, f"{cure} data.validation_fraction, or give more text"))
    return Scan(name, tuple(train), tuple(validation), held_out, skipped)


def read_blocks(document: Document, block_bytes: int = BLOCK_BYTES) -> Iterator[str]:
    """The text of a document in pieces of about `block_bytes` bytes that give it back when joined; see `text_cuts`."""
    try:
        with _open(document.file) as read:
            for start, stop in _pieces(read, document, block_bytes):
                yield read(start, stop).decode("utf-8")
    except UnicodeDecodeError as error:
        raise changed(document.file.path) from error


def cut_document(document: Document, piece_bytes: int) -> list[Document]:
    """A document as pieces of about `piece_bytes` bytes, cut at such places as `read_blocks` cuts at."""
    with _open(document.file) as read:
        return [Document(document.file, start, stop) for start, stop in _pieces(read, document, piece_bytes)]


def _pieces(read: Read, document: Document, piece_bytes: int) -> Iterator[tuple[int, int]]:
    start = document.start
    while start < document.stop:
        stop = piece_end(read, start, document.stop, piece_bytes)
        yield start, stop
        start = stop


@contextmanager
def _open(file: SourceFile) -> Iterator[Read]:
    """Reads stretches of a file; DataError where it cannot be read or ends before one does."""
    try:
        with file.path.open("rb") as stream:

            def read(start: int, stop: int) -> bytes:
                stream.seek(start)
                data = stream.read(stop - start)
                if len(data) < stop - start:
                    raise changed(file.path)
                return data

            yield read
    except OSError as error:
        raise unreadable(file.path, error) from error


def _because(skipped: Counter[str]) -> str:
    return f": {describe_skipped(skipped)}" if skipped.total() else ""


def describe_skipped(skipped: Counter[str]) -> str:
    """For example `1 file is validation, 3 files skipped (2 not UTF-8, 1 empty)`."""
    held_out, left_out = (
        skipped[IS_VALIDATION],
        {reason: n for reason, n in sorted(skipped.items()) if n and reason != IS_VALIDATION},
    )
    parts = [f"{held_out} {'file is' if held_out == 1 else 'files are'} {IS_VALIDATION}"] if held_out else []
    if left_out:
        total, reasons = sum(left_out.values()), ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        parts.append(f"{total} {'file' if total == 1 else 'files'} skipped ({reasons})")
    return ", ".join(parts)


def _text_paths(root: Path, setting: str, skipped: Counter[str]) -> list[Path]:
    cure = f"{setting.partition('=')[0]}=FILE_OR_FOLDER with UTF-8 text"
    try:
        if root.is_dir():
            return walk(root, skipped)
        if root.is_file():
            return [root]
        rule = f"{root} is {'neither a regular file nor a folder' if root.exists() else 'not there'}"
    except OSError as error:
        raise unreadable(Path(error.filename or root), error) from error
    raise DataError(Problem(setting, rule, cure))


def _is_library_module(path: Path) -> bool:
    # `_sysconfigdata_…` is written when Python is built and holds its paths: one library would differ between machines.
    return path.suffix == ".py" and not path.name.startswith("_sysconfigdata")


def _scan_file(path: Path, skipped: Counter[str], *, alone: bool) -> SourceFile | None:
    """Hash a file and make sure it is UTF-8; None for one that is left out and counted."""
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    read = 0
    try:
        with path.open("rb") as stream:
            before = os.fstat(stream.fileno())
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
                decoder.decode(block)
                read += len(block)
            decoder.decode(b"", final=True)
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (near byte {read + error.start})"
        if alone:
            raise DataError(Problem(str(path), f"it is {reason}", "convert it to UTF-8, for example with iconv")) from error
        skipped["not UTF-8"] += 1
        return None
    if not read:
        if alone:
            raise DataError(Problem(str(path), "it is empty", "data.path=FILE_OR_FOLDER with UTF-8 text"))
        skipped["empty"] += 1
        return None
    return SourceFile(path, read, before.st_mtime_ns, digest.hexdigest())


def _split_by_content(files: list[SourceFile], fraction: float) -> tuple[list[Document], list[Document]]:
    """Files below the fraction go to validation; each side gets at least one if contents differ at all."""
    hashes = sorted({file.sha256 for file in files})
    num_held_out = sum(int(digest, 16) / 2**256 < fraction for digest in hashes)
    held_out = frozenset(hashes[: max(1, min(num_held_out, len(hashes) - 1))])
    whole = [Document(file, 0, file.size) for file in files]
    return (
        [document for document in whole if document.file.sha256 not in held_out],
        [document for document in whole if document.file.sha256 in held_out],
    )


def _split_tails(files: list[SourceFile], fraction: float) -> tuple[list[Document], list[Document]]:
    cuts = [(file, _tail_start(file, fraction)) for file in files]
    return (
        [Document(file, 0, cut) for file, cut in cuts if cut > 0],
        [Document(file, cut, file.size) for file, cut in cuts if cut < file.size],
    )


def _tail_start(file: SourceFile, fraction: float) -> int:
    """Byte at which the last `fraction` of a file begins: after a line break if one is near, else between two characters."""
    if file.size < 2:
        return file.size
    tail = min(max(1, round(file.size * fraction)), file.size - 1)
    wanted = file.size - tail
    reach = min(LINE_BREAK_SEARCH_BYTES, tail, wanted)
    low = max(0, wanted - max(reach, 4))  # four bytes hold any character
    try:
        with file.path.open("rb") as stream:
            stream.seek(low)
            window = stream.read(wanted - low + max(reach, 4))
    except OSError as error:
        raise unreadable(file.path, error) from error
    middle = wanted - low
    for place in (window.rfind(b"\n", 0, middle), window.find(b"\n", middle)):
        if place >= 0 and low + place + 1 < file.size:
            return low + place + 1
    near = range(max(0, middle - 4), min(len(window), middle + 5))
    begins = [place for place in near if window[place] & 0xC0 != 0x80 and low + place > 0]
    return low + min(begins, key=lambda place: abs(place - middle)) if begins else file.size
