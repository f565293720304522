"""Why a run with several ranks ends: one failure with one cause, told once, whoever noticed it.

When a rank fails the others fail too, a moment later, because it no longer takes part. The first failure that is a cause is kept in
the store for all ranks, in the report folder for the launcher that started them, and in the file that torchrun reads.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from llmtrain.config.errors import ExitCode, LlmtrainError, exit_code_of
from llmtrain.dist.position import Snapshot

if TYPE_CHECKING:
    from torch.distributed import Store

Kind = Literal["error", "crash", "lost", "hang"]
Result = TypeVar("Result")

FAULT_LINE = "this is a fault of llmtrain, not of your config: please report the lines above"
FAILURE_KEY = "failure"
"""Key of the store with the first failure as JSON; where it appears, every rank has to end."""
_FIRST_FILE = "first.json"
_POLL_SECONDS = 0.05
_STORE_SECONDS = 5.0
"""Longest wait for a store whose server no longer answers; its own calls can wait for ever."""

_MICROBATCH_PHASES = ("batch", "forward", "backward")
_TRACEBACK = "Traceback (most recent call last):"

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

    @classmethod
    def of(cls, error: BaseException, rank: int, place: Snapshot) -> Failure:
        """What ends this process, which is `rank` and was at `place`."""
        is_ours = isinstance(error, LlmtrainError | KeyboardInterrupt)
        message = str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=place.phase,
            step=place.step,
            microbatch=place.microbatch,
            kind="error" if is_ours else "crash",
            code=int(exit_code_of(error)),
            text=message if is_ours else "".join(traceback.format_exception(error)).rstrip(),
            reporter=rank,
        )

    @property
    def is_stop(self) -> bool:
        """Whether somebody has asked for it: nothing went wrong."""
        return self.code in (ExitCode.REQUEUE, ExitCode.INTERRUPTED)

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
        self._found: Failure | None = None

    def post(self, failure: Failure) -> bool:
        """Tell everybody of a cause; the first one over all ranks stays. Gives whether this is it.

        Where the store is gone the report folder decides; without one each rank takes its own for the first.
        """
        is_first = self.report(failure)
        store = self._store
        if store is None:
            return is_first
        text = json.dumps(failure.to_dict())
        kept = answered_within(lambda: store.compare_set(FAILURE_KEY, "", text), _STORE_SECONDS)
        return is_first if kept is None else kept == text.encode()

    def report(self, failure: Failure) -> bool:
        """Write the files only: for a store that is known not to answer. Gives whether the report folder had none before."""
        if self._error_file is not None and not self._error_file.exists():
            write_json(self._error_file, _torchelastic_error(failure))
        if self._report_folder is None:
            return True
        file = failure_file(self._report_folder, failure.reporter)
        if not file.exists():
            write_json(file, failure.to_dict())
        return _is_made(self._report_folder / _FIRST_FILE, file)

    def first(self, wait_seconds: float = 0.0) -> Failure | None:
        """The first failure that any rank told; None when there is none within the time. Once found it is remembered.

        Where the store is gone, with rank 0 that served it, the report folder still knows.
        """
        if self._found is None:
            self._found = self._look(wait_seconds)
        return self._found

    def _look(self, wait_seconds: float) -> Failure | None:
        deadline = time.monotonic() + wait_seconds
        store, folder = self._store, self._report_folder
        if folder is None:
            return (
                None if store is None else answered_within(lambda: _poll_store(store, deadline), wait_seconds + _STORE_SECONDS)
            )
        # All ranks and the launcher write there, and it cannot be gone.
        while (found := _read_failure(folder / _FIRST_FILE)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found


def mark_told(error: BaseException) -> None:
    """Note on an exception that the user has read of it: nobody is to print it once more."""
    error.is_told = True  # type: ignore[attr-defined]


def is_told(error: BaseException) -> bool:
    """Whether `mark_told` was called with it."""
    return getattr(error, "is_told", False)


def failure_file(reports: Path, reporter: int) -> Path:
    """Where a rank leaves a failure that it has noticed for its launcher, in the folder of reports."""
    return reports / f"rank{reporter}.json"


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


def answered_within(call: Callable[[], Result], seconds: float) -> Result | None:
    """Result of a call into torch's store; None when it fails, or has not returned in time and is left behind in its thread.

    Whatever time limit a store was given, a call to a server that listens and says nothing never returns.
    """
    results: list[Result] = []

    def run() -> None:
        with suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, name="store-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write at once, or not at all where that cannot be; a reader never sees half of it."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    with suppress(OSError):
        part.write_text(json.dumps(values), encoding="utf-8")
        part.replace(file)


def _is_made(file: Path, content: Path) -> bool:
    """Make a file with the content of another one unless there is one already, which gives False; True also where nothing can be made."""
    try:
        os.link(content, file)
    except FileExistsError:
        return False
    except OSError:
        # A file system without links: a reader may come before all of it is written, and looks again.
        try:
            with file.open("xb") as stream:
                stream.write(content.read_bytes())
        except FileExistsError:
            return False
        except OSError:
            return True
    return True


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
    return f"rank {failure.rank} (host {failure.host}, pid {failure.pid}) {what_happened(failure)} {where_it_was(failure)}"


def reason(failure: Failure) -> str:
    """In one line what happened to the rank, where it was, and what it said: `failed in phase data, before step 1: no such file`."""
    said = _said(failure)
    if failure.is_stop:
        return said
    return ": ".join([f"{what_happened(failure)} {where_it_was(failure)}", *([said] if said else [])])


def reason_of_run(failure: Failure) -> str:
    """Why the run ended, in one line that names the rank: what `status.json` keeps."""
    return f"rank {failure.rank}: {reason(failure)}"


def _said(failure: Failure) -> str:
    """The first line of a message, the exception of a traceback; nothing of what others say of a rank."""
    if failure.kind in ("lost", "hang"):
        return ""
    lines = [line for line in failure.text.splitlines() if line.strip()]
    if _TRACEBACK in lines:
        # Frames and their source are indented, the exception is not; that of the last traceback is the one that was raised.
        below = lines[len(lines) - lines[::-1].index(_TRACEBACK) :]
        lines = [line for line in below if not line.startswith(" ")] or lines
    return next(iter(lines), "").removeprefix("error: ")


def what_happened(failure: Failure) -> str:
    """Predicate of a sentence about the rank: `failed`, `was killed by SIGKILL`."""
    if failure.kind == "lost":
        return f"was killed by {signal_name(failure.signal)}" if failure.signal else "vanished"
    if failure.is_stop:
        return "was stopped"
    return {"error": "failed", "crash": "raised an exception", "hang": "stands still"}[failure.kind]


def where_it_was(failure: Failure) -> str:
    """Such as `in phase backward of step 7, micro-batch 2`."""
    if failure.step < 1:
        return f"in phase {failure.phase}, before step 1"
    within = f", micro-batch {failure.microbatch}" if failure.phase in _MICROBATCH_PHASES else ""
    return f"in phase {failure.phase} of step {failure.step}{within}"


def signal_name(number: int) -> str:
    """`SIGTERM`, or `signal 40` for one without a name."""
    known = {item.value for item in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"


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
