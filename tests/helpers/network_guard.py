"""Refuses and writes down every step towards a network other than this host, in a process and in all Python processes it starts.

`environment(folder)` gives the variables for such a process: Python imports `sitecustomize` at its start, before anything else runs.
Processes that are not Python are not seen; for those there are `unshare` and `strace` (tests/faults/test_no_network.py).
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOG = "NETWORK_GUARD_LOG"
"""Environment variable with the file that attempts are written to; the guard is armed where it is set."""
ADDRESSED = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")
"""Audit events with a socket and an address."""
LOOKED_UP = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
"""Audit events that begin with a host: asking a name server is a step outside too."""


def environment(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of a guarded process; its attempts are found with `attempts`."""
    folder.mkdir()
    shutil.copy(__file__, folder / "sitecustomize.py")
    path = os.pathsep.join(filter(None, (str(folder), environ.get("PYTHONPATH"))))
    return {**environ, "PYTHONPATH": path, LOG: str(folder / "attempts")}


def attempts(folder: Path) -> list[str]:
    """What was tried, one line each; the first is that of the process that was started."""
    log = folder / "attempts"
    return log.read_text().splitlines() if log.exists() else []


def is_here(host: Any) -> bool:
    """Whether a host is this one by its loopback address; a wildcard is not, since others reach it."""
    if isinstance(host, bytes):
        host = host.decode()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def leaves(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event is a step outside."""
    if event in LOOKED_UP:
        # Without a host it asks for the addresses of this one.
        return arguments[0] is not None and not is_here(arguments[0])
    if event == "urllib.Request":
        return not is_here(arguments[0].partition("://")[2].partition("/")[0].partition(":")[0])
    if event not in ADDRESSED or arguments[0].family not in (socket.AF_INET, socket.AF_INET6):
        return False
    # A connected socket sends without an address; its connect was seen.
    return arguments[1] is not None and not is_here(arguments[1][0])


def arm(log: str) -> None:
    """Watch this process from now on; there is no way back."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if (event.startswith("socket.") or event == "urllib.Request") and leaves(event, arguments):
            told = f"{os.getpid()} {event} {arguments[1:] if event in ADDRESSED else arguments[0]}\n"
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(descriptor, told.encode())
            os.close(descriptor)
            raise PermissionError(f"no network in this test: {told.strip()}")

    sys.addaudithook(watch)


if __name__ == "sitecustomize" and LOG in os.environ:
    arm(os.environ[LOG])
