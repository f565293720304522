"""Folders that appear whole: work is done under a staging name that a later process finds again, then renamed.

A lock beside the staging folder keeps a second process waiting until the first has finished, and lets it take over where that one died:
the system drops the lock with its holder. On a file system without locks both work, on files of equal content.

Only what this program made is ever removed: a staging folder has a name of 32 hexadecimal digits and holds a file that marks it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmtrain.config.paths import user_path

STAGING = ".staging-"
MARKER = ".made-by-llmtrain"
"""Lies in every staging folder, and in nothing else."""
WAIT_SECONDS = 0.2
ABANDONED_SECONDS = 14 * 24 * 3600
"""Unfinished work that nobody touched for so long is removed."""
_BUSY = (errno.EACCES, errno.EAGAIN)
_NAME = re.compile(re.escape(STAGING) + "[0-9a-f]{32}")
_LOCK = ".lock"


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


@contextmanager
def locked(staging: Path, status: Callable[[str], None]) -> Iterator[bool]:
    """A context in which no other process works on a staging folder; waits for one that does.

    Gives whether that is sure: False on a file system without locks.

    Raises:
        OSError: the lock file cannot be made.
    """
    path = staging.with_name(f"{staging.name}{_LOCK}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, is_sure = _take(path, status)
    try:
        yield is_sure
    finally:
        # Removed while it is held, so that nobody takes a lock on a file that others cannot see.
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def is_staging(path: Path) -> bool:
    """Whether a path has the name of a staging folder."""
    return _NAME.fullmatch(path.name) is not None


def begin(staging: Path) -> None:
    """Make a staging folder, or go on in one.

    Raises:
        OSError: it cannot be made.
    """
    staging.mkdir(parents=True, exist_ok=True)
    (staging / MARKER).touch()


def publish(staging: Path, folder: Path) -> None:
    """Give a finished folder its name, unless another process was faster.

    Raises:
        OSError: it cannot be renamed.
    """
    sync_folder(staging)
    try:
        os.rename(staging, folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(staging, ignore_errors=True)
    sync_folder(folder.parent)


def move_up(staging: Path, folder: Path, last: str) -> None:
    """Move the files of a finished staging folder into the folder that it lies in; the one that says it is finished comes last.

    Another call goes on where a process was killed in this one.

    Raises:
        OSError: a file cannot be moved.
    """
    sync_folder(staging)
    for path in sorted(staging.iterdir()):
        if path.name != last:
            os.rename(path, folder / path.name)
    sync_folder(folder)
    os.rename(staging / last, folder / last)
    sync_folder(folder)
    shutil.rmtree(staging, ignore_errors=True)


def set_aside(folder: Path) -> None:
    """Take a damaged folder away; another process may have done so already."""
    aside = folder.with_name(f"{STAGING}{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        os.rename(folder, aside)
        with suppress(OSError):
            (aside / MARKER).touch()
        shutil.rmtree(aside, ignore_errors=True)


def remove_abandoned(cache: Path, keep: Path) -> None:
    """Remove staging folders of this program that nobody has touched for long from a cache folder, but for `keep`."""
    for found in cache.glob(f"{STAGING}*"):
        with suppress(OSError):
            if found == keep or time.time() - found.lstat().st_mtime <= ABANDONED_SECONDS:
                continue
            if is_staging(found) and not found.is_symlink() and (found / MARKER).is_file():
                shutil.rmtree(found)
            elif found.suffix == _LOCK and is_staging(found.with_suffix("")) and found.is_file() and not found.stat().st_size:
                _remove_free(found)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        OSError: they could not be.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network and FUSE file systems cannot do this and say so with EINVAL; there is nothing more to be had there.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def _remove_free(lock: Path) -> None:
    """Remove a lock file that nobody holds."""
    handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.unlink()
    finally:
        os.close(handle)


def _take(path: Path, status: Callable[[str], None]) -> tuple[int, bool]:
    """A descriptor of the lock file at `path`, and whether it is locked."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            is_sure = _lock(handle, path, status)
            # Whoever held it before has removed the file; a lock is one only on the file that others will open.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle, is_sure
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path, status: Callable[[str], None]) -> bool:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:
                return False  # no locks on this file system
        else:
            return True
        status(f"waiting for another process that prepares the same text ({time.monotonic() - began:.0f} s; {path})")
        time.sleep(WAIT_SECONDS)
