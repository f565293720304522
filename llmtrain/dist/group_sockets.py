"""The connections that gloo has opened to the other ranks, and how to end them at once.

A rank that has failed and still has to stay a while, as the one that serves the store, must not leave the others in a collective for so
long. torch 2.13 has no call for it: with gloo `ProcessGroup.abort` and `shutdown` do nothing, and `destroy_process_group` closes the
connections with the last reference to the group, which the model and the frames of the traceback hold. Shut down here, they look to
both sides as if the process had ended. Where the system does not list the descriptors of a process nothing is found or done.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"


def open_sockets() -> frozenset[str]:
    """Names of the sockets of this process; one is never given to another socket while the first is open."""
    names = set()
    for descriptor in _descriptors():
        with suppress(OSError):
            names.add(os.readlink(f"{_DESCRIPTORS}/{descriptor}"))
    return frozenset(name for name in names if name.startswith("socket:"))


def hang_up(names: Collection[str], store_port: int) -> None:
    """End the connections among some sockets, whose threads and peers notice at once; those from or to the store stay.

    Args:
        names: of `open_sockets`.
        store_port: where the store listens: torch opens further connections to it as it makes a group.
    """
    for descriptor in _descriptors():
        with suppress(OSError):
            # A copy cannot become something else while it is looked at.
            copy = os.dup(descriptor)
            try:
                if os.readlink(f"{_DESCRIPTORS}/{copy}") in names:
                    _shut_down(copy, store_port)
            finally:
                os.close(copy)


def _shut_down(descriptor: int, store_port: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        # A socket that listens has no peer and raises: gloo would not survive its end.
        ports = (connection.getsockname()[1], connection.getpeername()[1])
        if connection.family in (socket.AF_INET, socket.AF_INET6) and store_port not in ports:
            connection.shutdown(socket.SHUT_RDWR)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except FileNotFoundError:
        return []
