"""Operating systems for checkpoint tests: one that keeps a record of its calls, one that fails, one that is slow."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.files import Files

CHANGING_CALLS = (
    "make_folder",
    "create",
    "write",
    "fsync",
    "close",
    "fsync_folder",
    "rename",
    "remove_file",
    "remove_folder",
)


class UnsyncedFiles(Files):
    """Waits for no disk: for tests of what is decided, not of what survives."""

    def fsync(self, descriptor: int) -> None:
        pass

    def fsync_folder(self, path: Path) -> None:
        pass


class RecordingFiles(Files):
    """Does everything, a few bytes at a time, and notes each call that changes or syncs something as `(operation, path, argument)`."""

    WRITE_BYTES = 100

    def __init__(self) -> None:
        self.calls: list[tuple[str, Path, Any]] = []
        self._open: dict[int, Path] = {}

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.calls.append(("make_folder", path, None))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._open[descriptor] = path
        self.calls.append(("create", path, None))
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        count = super().write(descriptor, data[: self.WRITE_BYTES])
        self.calls.append(("write", self._open[descriptor], bytes(data[:count])))
        return count

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        self.calls.append(("fsync", self._open[descriptor], None))

    def fsync_folder(self, path: Path) -> None:
        super().fsync_folder(path)
        self.calls.append(("fsync_folder", path, None))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.calls.append(("rename", old, new))

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self.calls.append(("remove", path, None))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.calls.append(("remove", path, None))


class FailingFiles(Files):
    """Raises `number` in the n-th changing call (1, 2, …), or in every call from there on; counts the calls."""

    def __init__(self, number: int, fail_at: int, *, for_ever: bool = False) -> None:
        self.count = 0
        self._number, self._fail_at, self._for_ever = number, fail_at, for_ever

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        return self._guarded(method) if name in CHANGING_CALLS else method

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.count += 1
            if self.count == self._fail_at or (self._for_ever and self.count > self._fail_at):
                raise OSError(self._number, os.strerror(self._number))
            return method(*arguments)

        return call


class SlowFiles(Files):
    """Writes little at a time and waits between calls, so that a kill can hit any of them."""

    def __init__(self, pause_seconds: float, write_bytes: int) -> None:
        self._pause, self._write_bytes = pause_seconds, write_bytes

    def __getattribute__(self, name: str) -> Any:
        if name in CHANGING_CALLS:
            time.sleep(self._pause)
        return super().__getattribute__(name)

    def write(self, descriptor: int, data: memoryview) -> int:
        return super().write(descriptor, data[: self._write_bytes])


class FullDisk(Files):
    """Says how much is free; `None` when it cannot tell. Writes work all the same."""

    def __init__(self, free: int | None) -> None:
        self.free = free

    def free_bytes(self, path: Path) -> int | None:
        return self.free


class NoSystemLocks:
    """Stands in for `fcntl.lockf` on a file system without locks."""

    def __call__(self, descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
