"""Why the ranks of a run ended: from how each did and what it left behind to one exit code and one cause. Needs no torch.

The folder of reports is the launcher's. Ranks leave there:

    rank<k>.json       a failure that rank k noticed     rank<k>.position   where it was, kept up to date
    rank<k>.out        what it printed before it had a log; not of rank 0, which prints on the user's terminal
    run.json           rank 0's, once it is the one that writes into the run folder: {"folder": …, "resume": …}
"""

from __future__ import annotations

import json
import math
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from llmtrain.config.errors import ExitCode
from llmtrain.dist.failure import Failure, signal_name
from llmtrain.dist.position import Snapshot, read_position

AGREED = (ExitCode.DONE, ExitCode.REQUEUE)
"""Ends that all ranks come to together."""
LAUNCHER = -1
"""The reporter of what no rank has told."""
TAIL_LINES = 20
TAIL_BYTES = 2**16
CONSEQUENCE_SECONDS = 2.0
"""A rank that is killed so long after another one has told an error is not the first cause."""
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
"""Before every line that the log itself has written."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, as its launcher saw it."""

    rank: int
    pid: int
    code: int | None
    """Exit code, minus the number of the signal that ended it; None where not even SIGKILL did in time."""
    ended_at: float
    """Seconds since the epoch."""
    passed_on: tuple[int, ...]
    """Stop signals that the launcher has passed on to it, and the one that ended it."""
    is_killed: bool
    """By the launcher, for the sake of another rank."""

    @property
    def is_interrupted(self) -> bool:
        """Ended at once by Ctrl-C, as asked for."""
        return self.code == ExitCode.INTERRUPTED or (self.code == -signal.SIGINT and signal.SIGINT in self.passed_on)

    @property
    def is_stopped(self) -> bool:
        """Ended by a signal of the user's that came before the rank could catch it: there was nothing to save."""
        return self.is_interrupted or (self.code is not None and -self.code in self.passed_on)

    @property
    def has_failed(self) -> bool:
        """Ended by itself, and neither well nor as it was told to."""
        is_done_away = self.is_killed and self.code == -signal.SIGKILL
        return not (self.code is None or is_done_away or self.is_stopped or self.code in (*AGREED, ExitCode.READER_GONE))


@dataclass(frozen=True)
class Verdict:
    """What a run on several ranks came to."""

    code: ExitCode
    """Rank 0's where all ended well, else that of the first cause."""
    failure: Failure | None
    """The first cause; None where nothing failed."""
    message: str
    """What is to be said where nothing failed and rank 0 did not say it; may be empty."""


@dataclass(frozen=True)
class RunPlace:
    """What rank 0 has told about the run folder."""

    folder: Path
    resume: str | None
    """The command that goes on with the run."""

    def log(self, rank: int) -> Path:
        return self.folder / "logs" / f"rank{rank}.log"


class Weight(IntEnum):
    """How surely a failure is a cause and not a consequence, the surest first; among equals the earliest counts."""

    SIGNAL = 0
    """Ended by a signal that nobody here has sent and no error told before explains."""
    OWN_ERROR = 1
    MUTE = 2
    """Ended without a word, or by a signal that follows on the end of another rank, as a library's SIGABRT does."""
    HANG = 3
    LOST = 4
    """Told by another rank that has lost it."""
    FOLLOWED = 5
    """Ended without a word, with the exit code of ranks that have lost another one."""


@dataclass(frozen=True, order=True)
class _Cause:
    """A failure that may have been the first."""

    weight: Weight
    time: float
    rank: int
    failure: Failure | None


def reach_verdict(ends: Sequence[RankEnd], reports: Path) -> Verdict:
    """Find the first cause.

    Args:
        ends: by rank.
        reports: the folder the ranks have left their words in.
    """
    records = read_failures(reports)
    cause = min([*_told_causes(records, ends, reports), *_seen_causes(records, ends, reports)], default=None)
    interrupted_at = min([end.ended_at for end in ends if end.is_interrupted], default=math.inf)
    interrupted_at = min([interrupted_at, *(time for time, record in records if record.code == ExitCode.INTERRUPTED)])
    if interrupted_at < math.inf and not (cause and cause.weight <= Weight.OWN_ERROR and cause.time < interrupted_at):
        return Verdict(ExitCode.INTERRUPTED, None, "interrupted")
    if cause is not None and cause.failure is not None:
        return Verdict(_exit_code(cause.failure.code), cause.failure, "")
    if stopped := [end.code for end in ends if end.is_stopped and end.code is not None]:
        return Verdict(ExitCode.REQUEUE, None, f"stopped by {signal_name(-stopped[0])}")
    if ends[0].code == ExitCode.READER_GONE:
        return Verdict(ExitCode.READER_GONE, None, "")
    if any(end.code == ExitCode.REQUEUE for end in ends):
        told = next((record.text for _, record in records if record.code == ExitCode.REQUEUE), "")
        return Verdict(ExitCode.REQUEUE, None, told)
    return Verdict(ExitCode.DONE, None, "")


def _told_causes(records: Sequence[tuple[float, Failure]], ends: Sequence[RankEnd], reports: Path) -> Iterator[_Cause]:
    """What the ranks say themselves, but for a stop."""
    weights = {"hang": Weight.HANG, "lost": Weight.LOST}
    for time, record in records:
        record = _precise(record, ends, reports)
        is_excused = record.kind == "lost" and record.rank in _excused(ends)
        if not (record.is_stop or is_excused):
            yield _Cause(weights.get(record.kind, Weight.OWN_ERROR), time, record.rank, record)


def _precise(record: Failure, ends: Sequence[RankEnd], reports: Path) -> Failure:
    """What others tell of a rank, with the place it was at last: they know only where it was when they last heard of it."""
    if record.rank == record.reporter:
        return record
    known = replace(record, host=socket.gethostname(), pid=ends[record.rank].pid)
    place = read_position(position_file(reports, record.rank))
    return known if place is None else known.at(place)


def _seen_causes(records: Sequence[tuple[float, Failure]], ends: Sequence[RankEnd], reports: Path) -> Iterator[_Cause]:
    """What the ends show by themselves, of ranks that did not say why."""
    told = {record.rank for _, record in records if record.kind in ("error", "crash")}
    for end in ends:
        if end.code is None or not end.has_failed:
            continue
        if end.code < 0:
            weight = Weight.MUTE if _is_consequence(end, -end.code, records) else Weight.SIGNAL
        elif end.rank in told or (end.code == ExitCode.LOST and _excused(ends)):
            continue
        else:
            weight = Weight.FOLLOWED if end.code == ExitCode.LOST else Weight.MUTE
        yield _Cause(weight, end.ended_at, end.rank, without_word(end, end.code, reports))


def _is_consequence(end: RankEnd, number: int, records: Sequence[tuple[float, Failure]]) -> bool:
    """Whether the signal that ended a rank came of the end of another one, or of an error of its own.

    An exception may be what the end of the killed rank has caused on another one, if it was told at about the same time; a message
    of ours may not, and faults in native code follow on it.
    """
    if number == signal.SIGABRT:
        return True
    for time, record in records:
        if record.kind not in ("error", "crash") or record.is_stop:
            continue
        is_surely_before = record.rank == end.rank or (record.kind == "error" and number in _FAULTS)
        if end.ended_at - time > (0.0 if is_surely_before else CONSEQUENCE_SECONDS):
            return True
    return False


def _excused(ends: Sequence[RankEnd]) -> set[int]:
    """Ranks that have left the others alone, and whose loss is no failure."""
    return {end.rank for end in ends if end.is_stopped or end.code == ExitCode.READER_GONE}


def without_word(end: RankEnd, code: int, reports: Path) -> Failure:
    """What can be told of a rank that told nothing."""
    place = read_position(position_file(reports, end.rank)) or Snapshot("start", 0, 0, 0, 0)
    tail = _tail(reports, end.rank)
    lines = [] if code < 0 else [f"ended with exit code {code} and left no word"]
    lines += ["the last that it printed:", *tail] if tail else []
    return Failure(
        rank=end.rank,
        host=socket.gethostname(),
        pid=end.pid,
        phase=place.phase,
        step=place.step,
        microbatch=place.microbatch,
        kind="lost" if code < 0 else "error",
        code=int(ExitCode.LOST if code < 0 else _exit_code(code)),
        text="\n".join(lines),
        reporter=LAUNCHER,
        signal=-code if code < 0 else None,
    )


def hang_of(end: RankEnd, place: Snapshot, text: str) -> Failure:
    """The failure of a rank that stands still, seen by its launcher alone."""
    return Failure(
        rank=end.rank,
        host=socket.gethostname(),
        pid=end.pid,
        phase=place.phase,
        step=place.step,
        microbatch=place.microbatch,
        kind="hang",
        code=int(ExitCode.LOST),
        text=text,
        reporter=end.rank,
    )


def output_file(reports: Path, rank: int) -> Path:
    """Where a rank other than 0 prints until it has a log in the run folder."""
    return reports / f"rank{rank}.out"


def position_file(reports: Path, rank: int) -> Path:
    return reports / f"rank{rank}.position"


def run_file(reports: Path) -> Path:
    return reports / "run.json"


def read_run(reports: Path) -> RunPlace | None:
    """The content of `run.json`; None where rank 0 did not come so far."""
    try:
        document = json.loads(run_file(reports).read_bytes())
        return RunPlace(Path(document["folder"]), document.get("resume"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_failures(reports: Path) -> list[tuple[float, Failure]]:
    """What the ranks left with its time (seconds since the epoch), the earliest first; a record that is not whole is left out."""
    found = []
    for file in reports.glob("rank[0-9]*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append((file.stat().st_mtime, Failure.from_dict(json.loads(file.read_bytes()))))
    return sorted(found, key=lambda report: report[0])


def _exit_code(code: int) -> ExitCode:
    """A code of ours that names a failure; any other is that of a fault, 1 too, with which Python itself ends."""
    return ExitCode(code) if code in list(ExitCode) and code not in (*AGREED, ExitCode.FAILED_CLAIM) else ExitCode.FAULT


def _tail(reports: Path, rank: int) -> list[str]:
    """The last lines a rank printed, before it had a log and into it; rank 0 prints where the user looks."""
    if rank == 0:
        return []
    lines, run = _last_lines(output_file(reports, rank)), read_run(reports)
    if run is not None:
        logged = _last_lines(run.log(rank))
        # The log keeps earlier starts too, each below a line of its own.
        heads = [index for index, line in enumerate(logged) if "=== rank " in line]
        # What has a time is the course of the run and belongs into the log; what has none was printed by something that broke.
        lines += [line for line in logged[heads[-1] + 1 if heads else 0 :] if not _TIME.match(line)]
    return lines[-TAIL_LINES:]


def _last_lines(file: Path) -> list[str]:
    """Lines of the end of a file; none where it cannot be read."""
    with suppress(OSError), file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return stream.read().decode("utf-8", "replace").splitlines()
    return []
