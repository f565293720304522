"""Which process wrote something, and whether it still lives: the mark in a lock and in the name of a staging folder.

A process number alone is used again by others, so the moment the process started and the boot of its host go with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

_NO_BOOT_ID = "00000000"
_DEAD_STATES = "ZXx"


class Life(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"
    """It ran on another host; nothing here can tell."""


@dataclass(frozen=True)
class Owner:
    """A process of some host."""

    host: str
    boot_id: str
    pid: int
    start_ticks: int
    """Clock ticks from boot to the start of the process; 0 where the system does not tell."""

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        return cls(socket.gethostname(), _boot_id(), pid, _start_ticks(pid) or 0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Owner:
        return cls(str(values["host"]), str(values["boot_id"]), int(values["pid"]), int(values["start_ticks"]))

    def to_dict(self) -> dict[str, str | int]:
        return asdict(self)

    @property
    def token(self) -> str:
        """Short mark for a file name; compare with `token_is_alive`."""
        return f"{self.boot_id[:8]}-{self.pid}-{self.start_ticks}"

    def life(self) -> Life:
        if self.host != socket.gethostname():
            return Life.UNKNOWN
        if self.boot_id != _boot_id():
            return Life.DEAD
        return Life.ALIVE if _is_running(self.pid, self.start_ticks) else Life.DEAD

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def token_is_alive(token: str) -> bool:
    """Whether the process of an `Owner.token` runs on this host; False for other hosts and earlier boots."""
    boot, pid, start_ticks = token.split("-")
    return boot == _boot_id()[:8] and _is_running(int(pid), int(start_ticks))


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else _NO_BOOT_ID


def _is_running(pid: int, start_ticks: int) -> bool:
    if not Path("/proc/self/stat").exists():
        return _answers(pid)
    return _start_ticks(pid) == start_ticks


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_ticks(pid: int) -> int | None:
    """Start of a process from /proc; None when there is none, or only its remains that nobody has collected."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return None
    # Fields of proc(5) after the parenthesised name, which may itself hold spaces: state is the 1st, starttime the 20th.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in _DEAD_STATES else int(fields[19])
