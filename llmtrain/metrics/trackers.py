"""Sends what `metrics.jsonl` holds to trackers as well; whatever a tracker does, the training goes on.

The first failure of a tracker is told once and switches that tracker off, the others go on. Nothing here raises, except
KeyboardInterrupt and SystemExit, which are no failures of a tracker. Importing this needs no torch.
"""

from __future__ import annotations

import importlib.util
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmtrain.config.typed import TrackerConfig
from llmtrain.metrics.sinks import each_record
from llmtrain.plan.plan import Availability

if TYPE_CHECKING:
    from llmtrain.metrics.meters import StepRecord

OPEN_SECONDS = 120.0
FINISH_SECONDS = 60.0
"""How long a tracker may take to open, and to bring home what it still holds; then it is left behind."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about the run when it opens."""

    folder: Path
    """The run folder; a tracker writes nowhere else."""
    name: str
    wire: Mapping[str, Any]
    """The resolved config, plain values in nested sections."""
    resumed_step: int
    """Updates made before this start; steps that follow may have been logged by a start that was killed. 0 = a fresh run."""

    def history(self, after: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and numbers of each record that earlier starts have left in metrics.jsonl, from the one after step `after` on.

        What a tracker lacks of them, since it was switched on later or went down with its machine, is there. A record that this start
        has yet to complete is not: it comes by `log`.

        Raises:
            StorageError: the file cannot be read.
        """
        for values in each_record(self.folder / "metrics.jsonl"):
            if after < values["step"] <= self.resumed_step and not values.get("unscored"):
                yield values["step"], flat_values(values)


class Tracker(ABC):
    """One place records are sent to. Any method may raise; that ends the tracker, not the training."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the record of an update: names and numbers of metrics.jsonl. Called in the training loop, so it must not wait.

        What was logged must survive a SIGKILL of this process: a checkpoint that follows counts on it.
        """

    @abstractmethod
    def finish(self) -> None:
        """Bring home what is still held; may take `FINISH_SECONDS`. Called once, in another thread."""

    def abandon(self) -> None:
        """Stop at once after a failure, or while `finish` takes too long."""
        return None

    def notes(self) -> list[str]:
        """Commands to type after the run."""
        return []


TrackerMaker = Callable[[TrackedRun], Tracker]


class Trackers:
    """The trackers of a run; make them with `open_trackers`. With none of them every call does nothing."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._opened: dict[str, Tracker] = {}
        self._on: list[str] = []

    def open(self, name: str, make: Callable[[], Tracker]) -> None:
        """Add a tracker; one that cannot be opened is told and left out."""
        try:
            self._opened[name] = _within(OPEN_SECONDS, make)
        except Exception as error:
            self._warn(_told(name, error))
        else:
            self._on.append(name)

    def log(self, record: StepRecord) -> None:
        """Send the record of an update."""
        if not self._on:
            return
        values = flat_values(record.to_dict())
        for name in tuple(self._on):
            try:
                self._opened[name].log(record.step, values)
            except Exception as error:
                self._switch_off(name, error)

    def finish(self) -> None:
        """End all trackers; after it `log` does nothing. A second call does nothing."""
        for name in tuple(self._on):
            try:
                _within(FINISH_SECONDS, self._opened[name].finish)
            except Exception as error:
                self._switch_off(name, error)
            else:
                self._on.remove(name)

    def notes(self) -> list[str]:
        """What to type after a run for its trackers, e.g. to send it later."""
        lines = []
        for tracker in self._opened.values():
            with suppress(Exception):
                lines += tracker.notes()
        return lines

    def _switch_off(self, name: str, error: Exception) -> None:
        self._on.remove(name)
        self._warn(_told(name, error))
        with suppress(Exception):
            _within(FINISH_SECONDS, self._opened[name].abandon)


def open_trackers(
    config: TrackerConfig,
    *,
    folder: Path,
    run_name: str,
    wire: Mapping[str, Any],
    resumed_step: int,
    warn: Callable[[str], None],
    others: Mapping[str, TrackerMaker] | None = None,
) -> Trackers:
    """Open the trackers that the config names.

    Args:
        folder: the run folder, locked by this process.
        wire: the resolved config, to be shown beside the curves; it holds no secrets.
        resumed_step: updates made before this start.
        warn: told once for each tracker that fails, now or later.
        others: trackers that plugins bring, by name.
    """
    run = TrackedRun(folder, run_name, wire, resumed_step)
    trackers = Trackers(warn)
    if (wandb := config.wandb) is not None:
        from llmtrain.metrics.tracker_wandb import open_wandb

        trackers.open("wandb", lambda: open_wandb(wandb, run))
    if config.tensorboard:
        from llmtrain.metrics.tracker_tensorboard import open_tensorboard

        trackers.open("tensorboard", lambda: open_tensorboard(run))
    for name, make in (others or {}).items():
        trackers.open(name, lambda make=make: make(run))
    return trackers


def availability() -> dict[str, Availability]:
    """Which trackers can be used here, by the options of the group `tracker`. A package is looked for, not imported."""
    return {name: _installed(name) for name in ("wandb", "tensorboard")}


def flat_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of metrics.jsonl by name, without the step; names of nested values are joined, as `memory/params`."""
    values: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            values |= {f"{key}/{name}": number for name, number in value.items()}
        elif key != "step":
            values[key] = value
    return values


def _installed(package: str) -> Availability:
    spec = importlib.util.find_spec(package)
    # A folder of that name in the working directory, as wandb leaves them, has no origin.
    found = spec is not None and spec.origin is not None
    return Availability(found, "" if found else f"the package {package} is not installed (pip install {package})")


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """What a call returns or raises, in a thread that is left behind when it takes too long.

    Raises:
        TimeoutError: it did.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, name="tracker", daemon=True)
    thread.start()
    thread.join(seconds)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def _told(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"tracker {name} is off: {reason}; the run goes on without it, metrics.jsonl has every record"
