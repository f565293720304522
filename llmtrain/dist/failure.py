"""Why a run with several ranks ends: one failure with one cause, told once, whoever noticed it.

When a rank fails the others fail too, a moment later, because it no longer takes part. The first failure that is a cause is kept in
the store for all ranks, in the report folder for the launcher that started them, and in the file that torchrun reads.
"""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from llmtrain.dist.position import Snapshot

if TYPE_CHECKING:
    from torch.distributed import Store

Kind = Literal["error", "crash", "lost", "hang"]
Result = TypeVar("Result")

FAILURE_KEY = "failure"
"""Key of the store with the first failure as JSON; where it appears, every rank has to end."""
_FIRST_FILE = "first.json"
_POLL_SECONDS = 0.05
_STORE_SECONDS = 5.0
"""Longest wait for a store whose server no longer answers; its own calls can wait for ever."""

_WIDTH = 120
_INNERMOST_CALLS = 3
_MICROBATCH_PHASES = ("batch", "forward", "backward")
_SIGNAL_HINTS: Mapping[int, str] = {
    signal.SIGKILL: "SIGKILL comes from outside. When memory is short the kernel kills the largest process (`dmesg` tells, as does "
    "the accounting of the job); batch systems kill at a limit of time or memory.",
    signal.SIGBUS: "SIGBUS mostly means that a mapped file or shared memory could not grow: look at `df /dev/shm`.",
    signal.SIGSEGV: "SIGSEGV is a fault in native code, not in Python: look into the log for a stack.",
    signal.SIGABRT: "SIGABRT is native code giving up: its last words are in the log.",
}

# Texts of gloo about a rank that has gone or does not come, as its TCP transport raises them in torch 2.13.
_GLOO_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Read error",
    "Socket closed",
    "Timed out waiting",
    "Connect timeout",
    "Read timeout",
    "Write timeout",
)
# The same without gloo's source path in front of it.
_BARE_PEER = ("Application timeout caused pair closure", "Gloo connectFullMesh failed")
# What NCCL says when this process itself used it wrongly or its own device failed.
_NCCL_OWN = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError", "Duplicate GPU", "out of memory")


@dataclass(frozen=True)
class Failure:
    """The cause that ends a run: which rank, where it was, and what is known about it."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    microbatch: int
    kind: Kind
    """`error`: a message of ours; `crash`: an exception nobody wrote one for; `lost`: the rank vanished; `hang`: nothing moves."""
    code: int
    """Exit code of the run because of it."""
    text: str
    """Message, traceback or who stands where; several lines."""
    reporter: int
    """Rank that noticed it: the failed one itself but for `lost` and `hang`; -1 for the launcher."""
    stacks: Mapping[int, str] = field(default_factory=dict)
    """For `hang`: stack of the main thread by rank, as far as they answered."""
    signal: int | None = None
    """For `lost`: number of the signal that ended the process, where that is known."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"stacks": {str(rank): stack for rank, stack in self.stacks.items()}}

    def at(self, place: Snapshot) -> Failure:
        """The same failure at another place."""
        return replace(self, phase=place.phase, step=place.step, microbatch=place.microbatch)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Failure:
        if values["kind"] not in get_args(Kind):
            raise ValueError(f"no kind of failure: {values['kind']!r}")
        return cls(**{**values, "stacks": {int(rank): stack for rank, stack in values["stacks"].items()}})


def is_peer_trouble(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is torch.distributed's report that another rank is gone or does not come.

    gloo has no exception of its own: it raises RuntimeError, told apart by its texts. NCCL's own type also covers wrong use and a
    broken device of this process, which are no trouble of a peer.
    """
    from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = str(current)
        if isinstance(current, DistNetworkError | DistStoreError):
            return True
        if isinstance(current, DistBackendError):
            return not any(words in text for words in _NCCL_OWN)
        if isinstance(current, RuntimeError) and _is_gloo_peer(text):
            return True
        current = current.__cause__
    return False


def _is_gloo_peer(text: str) -> bool:
    from_gloo = "gloo/transport" in text and any(words in text for words in _GLOO_PEER)
    return from_gloo or any(words in text for words in _BARE_PEER)


class FailureBoard:
    """Where failures are told: the store for the other ranks, files for whoever started this process.

    Only causes belong here; what `is_peer_trouble` knows is no cause. Nothing raises or waits for long because the store or a folder
    is gone: the board is used when things break.
    """

    def __init__(self, store: Store | None, report_folder: Path | None = None, error_file: Path | None = None) -> None:
        """`report_folder` is our launcher's, `error_file` torchrun's; None where nobody reads one."""
        self._store = store
        self._report_folder = report_folder
        self._error_file = error_file

    def post(self, failure: Failure) -> bool:
        """Tell everybody of a cause; the first one over all ranks stays. Gives whether this is it.

        Where the store is gone the report folder decides; without one each rank takes its own for the first.
        """
        is_first = self.report(failure)
        store = self._store
        if store is None:
            return is_first
        text = json.dumps(failure.to_dict())
        kept = _bounded(lambda: store.compare_set(FAILURE_KEY, "", text), _STORE_SECONDS)
        return is_first if kept is None else kept == text.encode()

    def report(self, failure: Failure) -> bool:
        """Write the files only: for a store that is known not to answer. Gives whether the report folder had none before."""
        if self._error_file is not None and not self._error_file.exists():
            _write_json(self._error_file, _torchelastic_error(failure))
        if self._report_folder is None:
            return True
        file = self._report_folder / f"rank{failure.reporter}.json"
        if not file.exists():
            _write_json(file, failure.to_dict())
        try:
            os.link(file, self._report_folder / _FIRST_FILE)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def first(self, wait_seconds: float = 0.0) -> Failure | None:
        """The first failure that any rank told; None when there is none within the time.

        Where the store is gone, with rank 0 that served it, the report folder still knows.
        """
        deadline = time.monotonic() + wait_seconds
        store, folder = self._store, self._report_folder
        if folder is None:
            return None if store is None else _bounded(lambda: _poll_store(store, deadline), wait_seconds + _STORE_SECONDS)
        # All ranks and the launcher write there, and it cannot be gone.
        while (found := _read_failure(folder / _FIRST_FILE)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found


def read_reports(folder: Path) -> list[tuple[float, Failure]]:
    """Failures that ranks left in `folder`, with the times of their files in seconds since 1970; what is not whole is left out."""
    reports = [(_changed_at(file), _read_failure(file)) for file in sorted(folder.glob("rank*.json"))]
    return [(changed_at, failure) for changed_at, failure in reports if failure is not None]


def _changed_at(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _read_failure(file: Path) -> Failure | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Failure.from_dict(json.loads(file.read_text(encoding="utf-8")))
    return None


def _poll_store(store: Store, deadline: float) -> Failure | None:
    while True:
        if store.check([FAILURE_KEY]):
            return Failure.from_dict(json.loads(store.get(FAILURE_KEY)))
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


def _bounded(call: Callable[[], Result], seconds: float) -> Result | None:
    """Result of `call`; None when the store is gone or does not answer within `seconds`."""
    results: list[Result] = []

    def run() -> None:
        with suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, name="failure-board", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write at once or not at all; a reader never sees half of it."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    with suppress(OSError):
        part.write_text(json.dumps(values), encoding="utf-8")
        part.replace(file)


def _torchelastic_error(failure: Failure) -> dict[str, Any]:
    """What torchrun shows of a failed rank (torch/distributed/elastic/multiprocessing/errors).

    It takes the earliest whole second for the root cause, and gives a rank without such a file the time at which it looked: one
    second less keeps the cause ahead of its victims.
    """
    own = failure.rank == failure.reporter
    extra = {"py_callstack": failure.text, "timestamp": str(int(time.time()) - int(own))}
    return {"message": {"message": headline(failure), "extraInfo": extra}}


def headline(failure: Failure) -> str:
    """One line: which rank did what, and where: `rank 1 (host a, pid 7) stands still in phase backward of step 7`."""
    return f"rank {failure.rank} (host {failure.host}, pid {failure.pid}) {_what(failure)} {_where(failure)}"


def reason(failure: Failure) -> str:
    """In one line what happened to the rank, where it was, and what it said: `failed in phase data, before step 1: no such file`."""
    lines = [line for line in failure.text.splitlines() if line.strip()]
    said = {"error": lines[:1], "crash": lines[-1:]}.get(failure.kind, [])
    return ": ".join([f"{_what(failure)} {_where(failure)}", *(line.removeprefix("error: ") for line in said)])


def failure_screen(failure: Failure, *, num_ranks: int, seconds: float, log: Path | None, resume: str | None) -> str:
    """What is printed once when a run with several ranks ends by a failure; our own words are at most 120 wide.

    Args:
        num_ranks: ranks of the run.
        seconds: age of the run when it failed.
        log: file with everything the failed rank said, where there is one.
        resume: command that goes on from what was saved, None when nothing was.
    """
    place = f"rank {failure.rank} of {num_ranks} (host {failure.host}, pid {failure.pid})"
    # With spaces that do not break, so that a number keeps its unit.
    age = f"{_duration(seconds)} after the start".replace(" ", "\xa0")
    first = textwrap.fill(f"{place} {_what(failure)} {_where(failure)}, {age}", _WIDTH, subsequent_indent="  ")
    parts = [first.replace("\xa0", " "), failure.text.rstrip()]
    hint = _SIGNAL_HINTS.get(failure.signal or 0)
    if hint:
        parts.append(textwrap.fill(hint, _WIDTH, initial_indent="hint   ", subsequent_indent="       "))
    parts += _stack_parts(failure)
    ends = [f"log    {log}"] if log is not None else []
    if resume:
        ends.append(f"go on  {resume}")
    return "\n\n".join(part for part in (*parts, "\n".join(ends)) if part)


def _what(failure: Failure) -> str:
    if failure.kind == "lost":
        return f"was killed by {_signal_name(failure.signal)}" if failure.signal else "vanished"
    return {"error": "failed", "crash": "raised an exception", "hang": "stands still"}[failure.kind]


def _where(failure: Failure) -> str:
    if failure.step < 1:
        return f"in phase {failure.phase}, before step 1"
    within = f", micro-batch {failure.microbatch}" if failure.phase in _MICROBATCH_PHASES else ""
    return f"in phase {failure.phase} of step {failure.step}{within}"


def _signal_name(number: int) -> str:
    known = {item.value for item in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"


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


def describe_ranks(ranks: Sequence[int]) -> str:
    """Rising ranks in words: `rank 3`, `ranks 0, 2-5, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
