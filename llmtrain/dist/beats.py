"""What the ranks of a run tell each other about themselves all the time: a record each in the store, with a beat that rises.

Ages are by the reader's own clock, from the moment it first saw a beat: clocks of hosts need not agree. They end with its last look
at the record, not now: what it has not looked at, because there are many or the store is slow, is not silent.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed import DistError, Store

from llmtrain.dist.position import Position, Snapshot

SILENT_SECONDS = 3.0
"""A rank whose beat stands still for longer does not answer."""
_STALL_SECONDS = 2.0
_NOWHERE = Snapshot("start", 0, 0, 0, 0)
Result = TypeVar("Result")


class Clock:
    """Seconds in which this process ran: a time in which it was stopped, or could not run its threads, makes nobody else late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = time.monotonic()
        self._stalled = 0.0

    def now(self) -> float:
        """Some thread calls it several times a second; a longer gap is time in which nobody could."""
        with self._lock:
            now = time.monotonic()
            if now - self._seen > _STALL_SECONDS:
                self._stalled += now - self._seen
            self._seen = now
            return now - self._stalled


class StoreLine:
    """The store, with the time for which it has not answered: a call to a server that is stopped never returns.

    Raises:
        DistError: by each call, when the store is gone.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._silent_since: float | None = None
        self.is_gone = False

    @property
    def silent_seconds(self) -> float:
        """How long the call under way has waited, or how long the store has been gone; 0 between two calls."""
        since = self._silent_since
        return 0.0 if since is None else self._clock.now() - since

    def give_up(self) -> None:
        """Nobody calls any more: from now on it counts as a store that does not answer."""
        self._silent_since = self._clock.now()

    def check(self, *keys: str) -> bool:
        """Whether all of them are there."""
        return bool(self._call(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """Value of a key that is there."""
        return bytes(self._call(lambda: self._store.get(key)))

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys that are there, in one call."""
        return self._call(lambda: [bytes(value) for value in self._store.multi_get(list(keys))]) if keys else []

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def keep_first(self, key: str, value: str) -> bytes:
        """Set a key unless somebody has; gives what it is."""
        return bytes(self._call(lambda: self._store.compare_set(key, "", value)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call(lambda: self._store.add(key, amount)))

    def _call(self, call: Callable[[], Result]) -> Result:
        self._silent_since = self._clock.now()
        try:
            result = call()
        except DistError:
            self.is_gone = True
            raise
        self._silent_since = None
        return result


@dataclass
class Record:
    """What this rank knows of another one."""

    beat: int
    at: Snapshot
    host: str
    pid: int
    has_left: bool
    """It has stopped its watch: it ends, and is not lost."""
    still_seconds: float
    """How long its position had not changed, by its own clock, at the beat."""
    after: float
    """When this rank last looked and the beat had not yet come, by its own clock: the beat is later. -inf for the first that it saw."""
    seen: float
    """When it first saw the beat."""
    read: float
    """When it last looked."""


class Beats:
    """The records of all ranks, as far as this one has read them, and its own."""

    def __init__(self, line: StoreLine, clock: Clock, *, rank: int, size: int, host: str, position: Position) -> None:
        self.known: dict[int, Snapshot] = {}
        """Last known positions of other ranks."""
        self.line = line
        self.rank = rank
        self.size = size
        self._clock = clock
        self._host = host
        self._position = position
        self._records: dict[int, Record] = {}
        self._missed: dict[int, tuple[float, float]] = {}
        self._beat = 0
        self._moved_at = clock.now()
        self._last_place = position.snapshot()

    def look_at_self(self) -> None:
        """Note whether this rank has moved."""
        place = self._position.snapshot()
        if place != self._last_place:
            self._last_place, self._moved_at = place, self._clock.now()

    def publish(self, *, has_left: bool = False) -> None:
        """Tell the others where this rank is, with one more beat."""
        self._beat += 1
        values = {"beat": self._beat, "host": self._host, "pid": os.getpid(), "has_left": has_left}
        values |= {"at": self._position.snapshot().to_dict(), "still_seconds": self.still_seconds(self.rank)}
        self.line.set(_key(self.rank), json.dumps(values))

    def read(self, ranks: Iterable[int]) -> None:
        """Read the records of others, all in one call; those that have left and those that have not come are passed over."""
        wanted = [rank for rank in ranks if rank != self.rank and not self.has_left(rank)]
        began = self._clock.now()
        for rank in wanted:
            self._missed[rank] = self._missed.get(rank, (began, began))[0], began
        missing = set(self._missing([rank for rank in wanted if rank not in self._records]))
        come = [rank for rank in wanted if rank not in missing]
        began = self._clock.now()
        for rank, value in zip(come, self.line.get_many([_key(rank) for rank in come]), strict=True):
            self._take(rank, json.loads(value), began)

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Those that have never published, asked one by one only while there are any."""
        if not ranks or self.line.check(*map(_key, ranks)):
            return []
        return [rank for rank in ranks if not self.line.check(_key(rank))]

    def _take(self, rank: int, values: dict[str, Any], began: float) -> None:
        """Keep what a look that began at `began` has found."""
        old = self._records.get(rank)
        if old is not None and old.beat == values["beat"]:
            old.read = began
            return
        place = Snapshot.from_dict(values.pop("at"))
        after = -math.inf if old is None else old.read
        self._records[rank] = Record(at=place, after=after, seen=self._clock.now(), read=began, **values)
        self.known[rank] = place

    def has_left(self, rank: int) -> bool:
        return rank in self._records and self._records[rank].has_left

    def here(self) -> list[int]:
        """Ranks that have not left."""
        return [rank for rank in range(self.size) if not self.has_left(rank)]

    def silent_seconds(self, rank: int) -> float:
        """Time between the first look that found the last beat and the last look; for one that has not come, since the first look."""
        if (record := self._records.get(rank)) is not None:
            return max(0.0, record.read - record.seen)
        first, last = self._missed.get(rank, (0.0, 0.0))
        return last - first

    def unseen_since(self, moment: float) -> list[int]:
        """Others that have not left, and of which no beat is surely later than `moment` of this rank's clock."""
        others = (rank for rank in self.here() if rank != self.rank)
        return [rank for rank in others if rank not in self._records or self._records[rank].after < moment]

    def is_silent(self, rank: int) -> bool:
        """Whether a rank that is not known to have left does not answer."""
        return rank != self.rank and not self.has_left(rank) and self.silent_seconds(rank) > SILENT_SECONDS

    def still_seconds(self, rank: int) -> float:
        """How long the position of a rank has not changed."""
        if rank == self.rank:
            return self._clock.now() - self._moved_at
        told = self._records[rank].still_seconds if rank in self._records else 0.0
        return told + self.silent_seconds(rank)

    def place(self, rank: int) -> Snapshot:
        """Last known position of a rank; where it starts, for one that has not come."""
        return self._position.snapshot() if rank == self.rank else self.known.get(rank, _NOWHERE)

    def process(self, rank: int) -> tuple[str, int]:
        """Host and process id of a rank; `("?", 0)` where it has not come."""
        if rank == self.rank:
            return self._host, os.getpid()
        record = self._records.get(rank)
        return (record.host, record.pid) if record else ("?", 0)


def _key(rank: int) -> str:
    return f"watch/{rank}"
