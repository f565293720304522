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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.paths import user_path
from llmtrain.config.typed_data import StdlibData, TextData

MIN_DOCUMENTS_TO_SPLIT = 20
BLOCK_BYTES = 1 << 18
"""Text is read and encoded this much at a time, so that a document of any size takes little memory."""
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
        paths = [path for path in _walk(root, STDLIB_SKIPPED_FOLDERS, skipped) if _is_library_module(path)]
        files = _scan_files(root, paths, "data=stdlib", skipped)
        # What is left out of the standard library is ours to choose; what is left out of somebody's folder is worth a word.
        return _split("Python's own library", files, "data=stdlib", source.validation_fraction, "whole modules", Counter())
    setting = f"data.path={source.path}"
    root, files = _scan_path(source.path, setting, skipped)
    name = root.name or str(root)
    if source.validation_path is None:
        return _split(name, files, setting, source.validation_fraction, "whole files", skipped)
    _, held_out = _scan_path(source.validation_path, f"data.validation_path={source.validation_path}", skipped)
    train, validation = (tuple(Document(file, 0, file.size) for file in side) for side in (files, held_out))
    return Scan(name, train, validation, VALIDATION_PATH, skipped)


def _scan_path(path: str, setting: str, skipped: Counter[str]) -> tuple[Path, list[SourceFile]]:
    root = user_path(path, setting)
    return root, _scan_files(root, _text_paths(root, setting, skipped), setting, skipped)


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
    """The text of a document in pieces of at most `block_bytes` bytes that give it back when joined.

    Cuts lie where an ASCII letter or digit is followed by white space: tokenizers that say so (`cuts_at_words`) never join
    across such a place, so encoding the pieces gives the ids of the whole. Only a word longer than a block is cut inside
    (between two characters).
    """
    assert block_bytes >= 8
    left = document.stop - document.start
    rest = b""
    try:
        with document.file.path.open("rb") as stream:
            stream.seek(document.start)
            while left:
                data = stream.read(min(block_bytes - len(rest), left))
                if not data:
                    raise _changed(document.file)
                left -= len(data)
                block = rest + data
                cut = last_cut(block) if left else len(block)
                rest = block[cut:]
                yield block[:cut].decode("utf-8")
    except OSError as error:
        raise _unreadable(document.file.path, error) from error
    except UnicodeDecodeError as error:
        raise _changed(document.file) from error


def cut_document(document: Document, piece_bytes: int) -> list[Document]:
    """A document as pieces of at most `piece_bytes` bytes, cut at such places as `read_blocks` cuts at."""
    assert piece_bytes >= 8
    pieces, start = [], document.start
    try:
        with document.file.path.open("rb") as stream:
            while document.stop - start > piece_bytes:
                low = max(start, start + piece_bytes - BLOCK_BYTES)
                stream.seek(low)
                window = stream.read(start + piece_bytes - low)
                if len(window) < start + piece_bytes - low:
                    raise _changed(document.file)
                stop = low + last_cut(window)
                pieces.append(Document(document.file, start, stop))
                start = stop
    except OSError as error:
        raise _unreadable(document.file.path, error) from error
    return [*pieces, Document(document.file, start, document.stop)]


def check_unchanged(files: Iterable[SourceFile]) -> None:
    """Raise DataError if a file is not what it was when it was found."""
    for file in files:
        try:
            now = file.path.stat()
        except OSError as error:
            raise _unreadable(file.path, error) from error
        if (now.st_size, now.st_mtime_ns) != (file.size, file.modified_ns):
            raise _changed(file)


def _changed(file: SourceFile) -> DataError:
    return DataError(Problem(str(file.path), "it changed while it was being read", "start again when nothing writes to it"))


def _because(skipped: Counter[str]) -> str:
    return f": {describe_skipped(skipped)}" if skipped.total() else ""


def describe_skipped(skipped: Counter[str]) -> str:
    """For example `3 files skipped (2 not UTF-8, 1 empty)`."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()) if count)
    return f"{skipped.total()} {'file' if skipped.total() == 1 else 'files'} skipped ({reasons})"


def _text_paths(root: Path, setting: str, skipped: Counter[str]) -> list[Path]:
    cure = f"{setting.partition('=')[0]}=FILE_OR_FOLDER with UTF-8 text"
    try:
        if root.is_dir():
            return _walk(root, frozenset(), skipped)
        if root.is_file():
            return [root]
        rule = f"{root} is {'neither a regular file nor a folder' if root.exists() else 'not there'}"
    except OSError as error:
        raise _unreadable(Path(error.filename or root), error) from error
    raise DataError(Problem(setting, rule, cure))


def _walk(root: Path, skipped_folders: frozenset[str], skipped: Counter[str]) -> list[Path]:
    """Regular files below a folder, in order of their relative paths; hidden ones and links to folders are left out."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error)

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        skipped["hidden"] += sum(name.startswith(".") for name in folders)
        folders[:] = [name for name in folders if name not in skipped_folders and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.startswith("."):
                skipped["hidden"] += 1
            elif path.is_file():
                found.append(path)
            else:
                skipped["not a regular file"] += 1
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_library_module(path: Path) -> bool:
    # `_sysconfigdata_…` is written when Python is built and holds its paths: one library would differ between machines.
    return path.suffix == ".py" and not path.name.startswith("_sysconfigdata")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(Problem(str(path), f"it cannot be read: {error.strerror}", "make it readable, or move it away"))


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
        raise _unreadable(path, error) from error
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
        raise _unreadable(file.path, error) from error
    middle = wanted - low
    for place in (window.rfind(b"\n", 0, middle), window.find(b"\n", middle)):
        if place >= 0 and low + place + 1 < file.size:
            return low + place + 1
    near = range(max(0, middle - 4), min(len(window), middle + 5))
    begins = [place for place in near if window[place] & 0xC0 != 0x80 and low + place > 0]
    return low + min(begins, key=lambda place: abs(place - middle)) if begins else file.size


def last_cut(block: bytes) -> int:
    """Largest place at which UTF-8 may be cut: after an ASCII letter or digit and before white space, else before its last
    character."""
    values = np.frombuffer(block, dtype=np.uint8)
    letter = values | 0x20
    word = ((letter >= 0x61) & (letter <= 0x7A)) | ((values >= 0x30) & (values <= 0x39))
    space = (values == 0x20) | ((values >= 0x09) & (values <= 0x0D))
    cuts = np.flatnonzero(word[:-1] & space[1:])
    if cuts.size:
        return int(cuts[-1]) + 1
    return int(np.flatnonzero(values & 0xC0 != 0x80)[-1])
