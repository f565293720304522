"""Every system call that a save, a load or a write into the run folder makes, and how their failures are told.

One small class so that a test can record the calls, slow them down, or make the n-th of them fail.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llmtrain.config.errors import Problem, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Files:
    """The operating system. Stateless; every method raises OSError and does nothing but its one call."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Open a file that must not exist yet; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Bytes taken, which may be fewer than offered."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def fsync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network and FUSE file systems cannot do this and say so with EINVAL; there is nothing more to be had there.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def free_bytes(self, path: Path) -> int | None:
        """Bytes an ordinary user can still write there; None where the file system does not tell."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


class ToldFiles(Files):
    """The operating system, and somebody who is told after each call that moves many bytes: a save of minutes is at work and no hang."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def write(self, descriptor: int, data: memoryview) -> int:
        taken = super().write(descriptor, data)
        self._tell()
        return taken

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        self._tell()

    def read(self, path: Path) -> bytes:
        data = super().read(path)
        self._tell()
        return data


def write_file(files: Files, path: Path, data: bytes) -> None:
    """Create `path` with `data` and return once the bytes are on the medium (the name is not, before the folder is synced).

    Raises:
        OSError: with `filename` set.
    """
    try:
        descriptor = files.create(path)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[files.write(descriptor, rest) :]
            files.fsync(descriptor)
        finally:
            files.close(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise


def write_atomic(files: Files, path: Path, data: bytes) -> None:
    """Replace `path` by `data` such that every reader, also one after a power cut, sees the old bytes or the new ones.

    Needs one writer at a time: the temporary file has a fixed name, so that one left by a kill is used up by the next write.

    Raises:
        StorageError: naming the path, the cause and the free space.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with suppress(FileNotFoundError):
            files.remove_file(temporary)
        write_file(files, temporary, data)
        files.rename(temporary, path)
        files.fsync_folder(path.parent)
    except OSError as error:
        raise storage_error(files, error, "write", path, needed=len(data)) from error


def remove_tree(files: Files, path: Path) -> None:
    """Remove a file, a link (not what it points to) or a folder with all it holds."""
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            remove_tree(files, child)
        files.remove_folder(path)
    else:
        files.remove_file(path)


def storage_error(files: Files, error: OSError, doing: str, path: Path, *, needed: int | None = None) -> StorageError:
    """The failure of an operating system call as a user error: path, cause, bytes needed and free."""
    where = error.filename or str(path)
    room = "" if needed is None else f"; needs {needed:,} bytes, {_free_text(files, path)}"
    return StorageError(Problem(f"cannot {doing} {path}", f"{where}: {error.strerror or error}{room}", _cure(error.errno)))


def no_space(path: Path, needed: int, free: int) -> StorageError:
    """A write that is refused beforehand because it cannot fit."""
    rule = f"needs {needed:,} bytes, {free:,} are free"
    return StorageError(Problem(f"cannot save into {path}", rule, _cure(errno.ENOSPC)))


def _free_text(files: Files, path: Path) -> str:
    existing = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    try:
        free = files.free_bytes(existing)
    except OSError:
        free = None
    return "free space unknown" if free is None else f"{free:,} are free"


def _cure(number: int | None) -> str:
    if number in _FULL:
        return "free some space there, keep fewer checkpoints (checkpoint.keep), or put runs elsewhere (run.dir)"
    if number in _NOT_ALLOWED:
        return "make the folder writable for this user, or put runs elsewhere (run.dir)"
    return "see that the disk is there and healthy, or put runs elsewhere (run.dir)"
