"""Text becomes tokens once: a cache of prepared folders, keyed by the text and every setting that changes the ids.

A folder is written under a staging name, flushed to the disk and then renamed, so a half-written one is never seen and two
processes that prepare the same text both succeed: the second finds the first one's folder and uses it. A folder that fails its
checks is moved aside and prepared again, with a message.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import Problem, StorageError
from llmtrain.config.paths import user_path
from llmtrain.config.typed import DataConfig, TokenizerConfig
from llmtrain.data.formats import FORMAT_VERSION, SPLITS, DamagedTokens, Prepared, SplitWriter, open_prepared, write_metadata
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.sources import Document, Scan, check_unchanged, read_blocks
from llmtrain.data.tokenizer import Tokenizer, train_tokenizer

GROUP_CHARACTERS = 1 << 22
"""Text handed to the tokenizer at once, so that one with threads can use them."""
MAX_ATTEMPTS = 5
"""A second attempt opens what the first one made; more are needed only if other processes damage or move the same folder."""
_STAGING = ".staging-"


@dataclass(frozen=True)
class Framing:
    """Which special tokens stand around a document."""

    bos: bool
    eos: bool


def prepare(scan: Scan, data: DataConfig, tokenizer: TokenizerConfig, cache_dir: Path, beat: Heartbeat) -> Prepared:
    """The prepared tokens of a scanned source, from the cache or made now.

    Raises:
        DataError: text or tokenizer at fault.
        StorageError: the cache folder cannot be written.
    """
    key = cache_key(scan, data, tokenizer)
    try:
        return _open_or_build(scan, tokenizer, Framing(data.bos, data.eos), cache_dir / key[:32], key, beat)
    except OSError as error:
        raise StorageError(
            Problem(f"prepared tokens in {cache_dir}", f"{error.strerror or error}", "data.cache_dir=FOLDER with room to write")
        ) from error


def cache_key(scan: Scan, data: DataConfig, tokenizer: TokenizerConfig) -> str:
    """SHA-256 over everything the ids depend on: text, split, tokenizer, special tokens and the format; not over file names."""
    settings = {
        "format_version": FORMAT_VERSION,
        "train": [(d.file.sha256, d.start, d.stop) for d in scan.train],
        "validation": [(d.file.sha256, d.start, d.stop) for d in scan.validation],
        "tokenizer": asdict(tokenizer),
        "bos": data.bos,
        "eos": data.eos,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def cache_folder(cache_dir: str | None) -> Path:
    """Where prepared tokens are kept: `data.cache_dir`, else `llmtrain` under the user's cache folder (XDG Base Directory rules).

    Raises:
        ConfigError: it lies in a home folder that is not there.
    """
    if cache_dir is not None:
        return user_path(cache_dir, f"data.cache_dir={cache_dir}")
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "llmtrain"
    return user_path("~/.cache/llmtrain", "no data.cache_dir", "data.cache_dir=FOLDER")


def _open_or_build(scan: Scan, config: TokenizerConfig, framing: Framing, folder: Path, key: str, beat: Heartbeat) -> Prepared:
    for _ in range(MAX_ATTEMPTS):
        if folder.exists():
            try:
                return open_prepared(folder, key, beat.status)
            except DamagedTokens as damage:
                found = damage.problems[0]
                beat.say(f"prepared tokens are damaged and will be made again: {found.what}: {found.rule}")
                _set_aside(folder)
        _remove_abandoned(folder)
        with _staging(folder) as staging:
            _build(scan, config, framing, staging, key, beat)
            _publish(staging, folder)
    raise StorageError(
        Problem(str(folder), f"another process moved or damaged it {MAX_ATTEMPTS} times", "data.cache_dir=FOLDER")
    )


def _build(scan: Scan, config: TokenizerConfig, framing: Framing, staging: Path, key: str, beat: Heartbeat) -> None:
    beat.say(f"preparing tokens of {scan.name} (once; kept in {staging.parent})")
    tokenizer = train_tokenizer(config, lambda: _texts(scan.train, "learning the vocabulary", beat))
    splits = {}
    for split, documents in zip(SPLITS, (scan.train, scan.validation)):
        splits[split] = write_split(staging, split, documents, tokenizer, framing, beat)
    check_unchanged(scan.files)
    write_metadata(staging, key, tokenizer, splits)
    _sync_folder(staging)


def write_split(
    folder: Path, split: str, documents: Sequence[Document], tokenizer: Tokenizer, framing: Framing, beat: Heartbeat
) -> dict[str, Any]:
    """Encode documents into one token file; returns its description for the metadata.

    Every document becomes [BOS?] text [EOS?], each exactly once: also an empty one and one that is read in several blocks.
    """
    byte_counts = np.zeros(256, dtype=np.int64)
    total = sum(document.stop - document.start for document in documents)
    with (folder / f"{split}.tokens").open("wb") as file:
        writer = SplitWriter(file, split, tokenizer.vocab_size)
        for group in _groups(_blocks(documents)):
            for block, ids in zip(group, tokenizer.encode_many([block.text for block in group])):
                byte_counts += np.bincount(np.frombuffer(block.text.encode(), dtype=np.uint8), minlength=256)
                writer.add(_framed(ids, block, tokenizer, framing))
                if block.ends:
                    writer.end_document()
            beat.status(f"tokenizing {split} text: {int(byte_counts.sum()) / max(1, total):.0%}")
        description = writer.finish(folder / f"{split}.offsets")
    return {**description, "source_bytes": int(byte_counts.sum()), "byte_counts": byte_counts.tolist()}


@dataclass(frozen=True)
class _Block:
    text: str
    begins: bool
    """Whether a document begins here."""
    ends: bool


def _blocks(documents: Iterable[Document]) -> Iterator[_Block]:
    for document in documents:
        texts = read_blocks(document)
        text, begins = next(texts, ""), True
        for following in texts:
            yield _Block(text, begins, ends=False)
            text, begins = following, False
        yield _Block(text, begins, ends=True)


def _groups(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    group: list[_Block] = []
    size = 0
    for block in blocks:
        group.append(block)
        size += len(block.text)
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _framed(ids: NDArray[np.int64], block: _Block, tokenizer: Tokenizer, framing: Framing) -> NDArray[np.int64]:
    """The ids with the special tokens that belong to this block of a document."""
    before = [tokenizer.bos_id] if framing.bos and block.begins else []
    after = [tokenizer.eos_id] if framing.eos and block.ends else []
    return np.concatenate([np.array(before, dtype=np.int64), ids, np.array(after, dtype=np.int64)])


def _texts(documents: tuple[Document, ...], doing: str, beat: Heartbeat) -> Iterator[str]:
    total, done = sum(document.stop - document.start for document in documents), 0
    for document in documents:
        yield from read_blocks(document)
        done += document.stop - document.start
        beat.status(f"{doing}: {done / total:.0%} of the text read")


def _publish(staging: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another process was faster."""
    try:
        os.rename(staging, folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    _sync_folder(folder.parent)


def _set_aside(folder: Path) -> None:
    """Take a damaged folder out of the way; another process may have done so already."""
    with _staging(folder) as aside:
        try:
            os.rename(folder, aside / "damaged")
        except FileNotFoundError:
            return


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, locked while it is in use and gone afterwards unless it was renamed."""
    staging, handle = _locked_folder(folder)
    try:
        yield staging
    finally:
        os.close(handle)
        shutil.rmtree(staging, ignore_errors=True)


def _locked_folder(folder: Path) -> tuple[Path, int]:
    while True:
        staging = folder.with_name(f"{_STAGING}{folder.name}-{uuid.uuid4().hex}")
        staging.mkdir(parents=True)
        try:
            handle = os.open(staging, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # no locks on this file system: then nobody removes abandoned folders either
            fcntl.flock(handle, fcntl.LOCK_EX)
        # Between its making and the lock another process may have taken the folder for an abandoned one.
        if staging.exists():
            return staging, handle
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Remove staging folders for the same tokens whose process was killed: nobody holds their lock."""
    for staging in folder.parent.glob(f"{_STAGING}{folder.name}-*"):
        try:
            handle = os.open(staging, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(staging, ignore_errors=True)
        except OSError:
            continue  # in use, or a file system that cannot tell
        finally:
            os.close(handle)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network and FUSE file systems cannot do this and say so with EINVAL; there is nothing more to be had there.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)
