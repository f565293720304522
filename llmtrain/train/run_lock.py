"""One writer per run folder: a record of who it is, and an operating-system lock where the file system has them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from llmtrain.checkpoint.files import Files, storage_error, write_atomic
from llmtrain.checkpoint.owner import Life, Owner
from llmtrain.config.errors import Problem, StorageError

RECORD = "lock.json"
_LOCK_FILE = ".lock"
_FORMAT_VERSION = 1
_BUSY = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """Context in which this process is the only writer of a run folder.

    `lock.json` names the holder. A holder that lives on this host is believed. One that is gone, or on another host, is believed only
    if the system lock on `.lock` is taken too: the system drops it when its process dies, also over NFS. Where there are no system
    locks, a holder on another host has to be removed by hand. The system lock is not inherited by child processes.
    """

    def __init__(self, folder: Path, files: Files = Files()) -> None:
        self._folder = folder
        self._files = files
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        """
        Raises:
            StorageError: another process holds the lock (and which), or the lock cannot be written.
        """
        # First, and without touching the lock file: closing any descriptor of it would drop a system lock of this same process.
        holder = self._holder()
        if holder is not None and holder.life() is Life.ALIVE:
            raise self._refusal(str(holder), "wait for it to end, or stop it")
        try:
            self._descriptor = os.open(self._folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise storage_error(self._files, error, "lock", self._folder) from error
        try:
            self._take(holder)
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._descriptor is not None
        # A record that cannot be removed (the disk or the folder may be gone) is harmless: its process will soon be.
        with suppress(OSError):
            (self._folder / RECORD).unlink()
        os.close(self._descriptor)

    def _take(self, holder: Owner | None) -> None:
        assert self._descriptor is not None
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                raise self._refusal(str(holder or "another process"), "wait for it to end, or stop it") from error
            if error.errno not in _NO_LOCKS_HERE:
                raise storage_error(self._files, error, "lock", self._folder) from error
            if holder is not None and holder.life() is Life.UNKNOWN:
                cure = f"see that it is gone, then remove {self._folder / RECORD}"
                raise self._refusal(f"{holder}, which cannot be asked from here", cure) from error
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        record = {"format_version": _FORMAT_VERSION, **Owner.this_process().to_dict(), "since": since}
        write_atomic(self._files, self._folder / RECORD, json.dumps(record, indent=1).encode())

    def _holder(self) -> Owner | None:
        """Who the record names; None without a record, or with one that a full disk or an editor spoilt."""
        try:
            return Owner.from_dict(json.loads((self._folder / RECORD).read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return None
        except OSError as error:
            raise storage_error(self._files, error, "read the lock of", self._folder) from error

    def _refusal(self, holder: str, cure: str) -> StorageError:
        return StorageError(Problem(f"{self._folder} is in use", f"one writer at a time; held by {holder}", cure))
