"""How many files and connections this process may have open. Needs no torch."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_handle_limit() -> int:
    """Let this process open as many as the system allows it; gives how many (RLIM_INFINITY = no limit)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
