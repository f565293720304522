"""What is printed, once, when a run with several ranks ends by a failure. Needs no torch."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Mapping
from pathlib import Path

from llmtrain.config.errors import ExitCode
from llmtrain.dist.failure import FAULT_LINE, Failure, describe_ranks, what_happened, where_it_was

_WIDTH = 120
_REFUSALS = (ExitCode.CONFIG, ExitCode.DATA)
_NOT_MENDED_BY_A_RESTART = (*_REFUSALS, ExitCode.NUMERICS)
"""Ends to which the same command comes again."""
_INNERMOST_CALLS = 3
_SIGNAL_HINTS: Mapping[int, str] = {
    signal.SIGKILL: "SIGKILL comes from outside. When memory is short the kernel kills the largest process (`dmesg` tells, as does "
    "the accounting of the job); batch systems kill at a limit of time or memory.",
    signal.SIGBUS: "SIGBUS mostly means that a mapped file or shared memory could not grow: look at `df /dev/shm`.",
    signal.SIGSEGV: "SIGSEGV is a fault in native code, not in Python: look above and into the log for a stack.",
    signal.SIGABRT: "SIGABRT is native code giving up: its last words are above or in the log.",
}


def failure_screen(
    failure: Failure, *, num_ranks: int, seconds: float, log: Path | None, resume: str | None, num_hosts: int = 1
) -> str:
    """What is printed once when a run with several ranks ends by a failure; our own words are at most 120 wide.

    Args:
        num_ranks: ranks of the run.
        seconds: age of the run when it failed.
        log: file with everything the failed rank said, where there is one.
        resume: command that goes on from what was saved, None when nothing was.
    """
    if failure.kind == "error" and failure.code in _REFUSALS and failure.step < 1 and num_hosts == 1:
        # What any rank of this host would have said: which one it was helps nobody, nor does the command that was refused.
        return failure.text.rstrip()
    place = f"rank {failure.rank} of {num_ranks} (host {failure.host}, pid {failure.pid})"
    # With spaces that do not break, so that a number keeps its unit.
    age = f"{_duration(seconds)} after the start".replace(" ", "\xa0")
    first = textwrap.fill(f"{place} {what_happened(failure)} {where_it_was(failure)}, {age}", _WIDTH, subsequent_indent="  ")
    parts = [first.replace("\xa0", " "), failure.text.rstrip()]
    if failure.kind == "crash" and failure.code == ExitCode.FAULT:
        parts.append(FAULT_LINE)
    # A rank that vanished was killed in most cases, though only its launcher could tell by what.
    vanished = signal.SIGKILL if failure.kind == "lost" else 0
    hint = _SIGNAL_HINTS.get(failure.signal or vanished)
    if hint:
        parts.append(textwrap.fill(hint, _WIDTH, initial_indent="hint   ", subsequent_indent="       "))
    parts += _stack_parts(failure)
    ends = [f"log    {log}"] if log is not None else []
    if resume and failure.code not in _NOT_MENDED_BY_A_RESTART:
        ends.append(f"go on  {resume}")
    return "\n\n".join(part for part in (*parts, "\n".join(ends)) if part)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _stack_parts(failure: Failure) -> list[str]:
    """The stack of the rank that is behind, then the innermost calls of the others, told once for all that stand alike."""
    parts = []
    if own := failure.stacks.get(failure.rank):
        parts.append(f"stack of rank {failure.rank}\n{own.rstrip()}")
    alike: dict[str, list[int]] = {}
    for rank, stack in sorted(failure.stacks.items()):
        if rank != failure.rank:
            alike.setdefault(_innermost(stack), []).append(rank)
    for stack, ranks in alike.items():
        parts.append(f"{describe_ranks(ranks)}, innermost calls\n{stack}")
    return parts


def _innermost(stack: str) -> str:
    frames = re.split(r"^(?=  File )", stack.rstrip(), flags=re.MULTILINE)
    return "".join(frames[-_INNERMOST_CALLS:])
