"""The exceptions a user can cause, each with the exit code that scripts rely on.

Everything raised because of what somebody typed, stored or ran out of derives from `LlmtrainError`; the command line prints its
text and leaves with `exit_code`. A bug of ours is an ordinary exception or a failed `assert`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every verb; `status.json` in the run folder repeats the one of the run."""

    DONE = 0
    FAILED_CLAIM = 1
    CONFIG = 2
    DATA = 65
    FAULT = 70
    """An exception nobody wrote a message for: a fault of llmtrain, not of the config."""
    LOST = 71
    """A rank died or made no progress any more; what was saved is intact and the same command goes on from there."""
    STORAGE = 74
    REQUEUE = 75
    NUMERICS = 77
    OUT_OF_MEMORY = 78
    INTERRUPTED = 130
    """Ctrl-C where there was nothing to save; after a save it is REQUEUE."""
    READER_GONE = 141
    """Standard output was closed by its reader, as in `llmtrain --help | head`."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what was set, the rule it breaks, the nearest legal choice and where it was set."""

    what: str
    rule: str
    cure: str = ""
    origin: str = ""

    def __str__(self) -> str:
        lines = [f"error: {self.what}", f"  rule  {self.rule}"]
        if self.cure:
            lines.append(f"  try   {self.cure}")
        if self.origin:
            lines.append(f"  set   {self.origin}")
        return "\n".join(lines)


class LlmtrainError(Exception):
    """A failure whose cure is in the user's hands."""

    exit_code = ExitCode.CONFIG

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p, "") for p in problems)
        super().__init__("\n".join(_text(p) for p in self.problems))


def _text(problem: Problem) -> str:
    return str(problem) if problem.rule else f"error: {problem.what}"


class ConfigError(LlmtrainError):
    """The configuration cannot be honoured; carries every problem found, not only the first."""


class PlanError(LlmtrainError):
    """The configuration is legal by itself but not on this machine or with this batch arithmetic."""


class DataError(LlmtrainError):
    """Text, tokens or tokenizer are missing, damaged or do not fit the model."""

    exit_code = ExitCode.DATA


class StorageError(LlmtrainError):
    """A run folder or checkpoint cannot be written, read or locked."""

    exit_code = ExitCode.STORAGE


class StoppedError(LlmtrainError):
    """A signal came; what is finished is kept and the same command goes on."""

    exit_code = ExitCode.REQUEUE


class RankLostError(LlmtrainError):
    """A rank died, was killed or makes no progress."""

    exit_code = ExitCode.LOST


class PeerError(LlmtrainError):
    """Another rank failed, and it is told there: this one ends with the same exit code and says nothing."""

    def __init__(self, rank: int, code: ExitCode, reason: str = "") -> None:
        super().__init__(f"rank {rank}: {reason or 'failed'}")
        self.rank = rank
        self.exit_code = code


class NumericsError(LlmtrainError):
    """Too many updates in a row had non-finite gradients."""

    exit_code = ExitCode.NUMERICS


class OutOfMemoryError(LlmtrainError):
    """The device or host refused an allocation."""

    exit_code = ExitCode.OUT_OF_MEMORY


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code a process ends with because of `error`."""
    if isinstance(error, LlmtrainError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode.READER_GONE if isinstance(error, BrokenPipeError) else ExitCode.FAULT
