"""Folders that appear whole: work is done under a staging name that a later process finds again, then renamed.

A lock beside the staging folder keeps a second process waiting until the first has finished, and lets it take over where that one died:
the system drops the lock with its holder. On a file system without locks both work, on files of equal content.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmtrain.config.paths import user_path

STAGING = ".staging-"
WAIT_SECONDS = 0.2
ABANDONED_SECONDS = 14 * 24 * 3600
"""Unfinished work that nobody touched for so long is removed."""
_BUSY = (errno.EACCES, errno.EAGAIN)


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
def locked(staging: Path, status: Callable[[str], None]) -> Iterator[None]:
    """A context in which no other process works on a staging folder; waits for one that does.

    Raises:
        OSError: the lock file cannot be made.
    """
    path = staging.with_name(f"{staging.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _take(path, status)
    try:
        yield
    finally:
        # Removed while it is held, so that nobody takes a lock on a file that others cannot see.
        with suppress(OSError):
            path.unlink()
        os.close(handle)


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


def set_aside(folder: Path) -> None:
    """Take a damaged folder away; another process may have done so already."""
    aside = folder.with_name(f"{STAGING}{folder.name}-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def remove_abandoned(parent: Path, keep: Path) -> None:
    """Remove staging folders that nobody has touched for long, but for `keep`."""
    for found in parent.glob(f"{STAGING}*"):
        with suppress(OSError):
            if (
                found not in (keep, keep.with_name(f"{keep.name}.lock"))
                and time.time() - found.stat().st_mtime > ABANDONED_SECONDS
            ):
                shutil.rmtree(found) if found.is_dir() else found.unlink()


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


def _take(path: Path, status: Callable[[str], None]) -> int:
    """A descriptor of the lock file at `path`, locked."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(handle, path, status)
            # Whoever held it before has removed the file; a lock is one only on the file that others will open.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path, status: Callable[[str], None]) -> None:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:
                return  # no locks on this file system
        else:
            return
        status(f"waiting for another process that prepares the same text ({time.monotonic() - began:.0f} s; {path})")
        time.sleep(WAIT_SECONDS)
