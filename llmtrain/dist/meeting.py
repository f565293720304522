"""Points at which all ranks meet and exchange small values: start-up, votes, saves.

Values travel as JSON through the rendezvous store. Every meeting has a number, the same on all ranks, and a name that is
compared: ranks that have taken different paths are told so instead of taking each other's values. Waiting is polling: the main
thread is not long inside torch, signals are noticed, and so is the failure of another rank. How long a wait may last is for the
watch to judge, which sees whether anything still moves anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from llmtrain.config.errors import ConfigError, ExitCode, PeerError, Problem, exit_code_of
from llmtrain.dist.failure import FAILURE_KEY, Failure, describe_ranks, is_peer_trouble, reason
from llmtrain.dist.position import Position

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.05
"""Longest pause between two looks at the store."""

MAX_VALUE_BYTES = 8 * 2**20
"""Largest value that torch's store takes (TCPStoreLibUvBackend.cpp); for a larger one it cuts the connection."""

_FIRST_PAUSE = 0.001
_ERROR_KEY = "meeting/error"
_MAX_DIFFERENCES = 20
_MAX_VALUE_CHARACTERS = 60
_MAX_GROUPS = 4
"""Groups of ranks that are alike of which the details are told where ranks differ."""
_MAX_ITEMS = 1000
"""Items of one rank that are told at once."""
_MAX_DETAIL_CHARACTERS = 400_000
"""Of the values of these; JSON within JSON within JSON makes them four times as long at most."""
_DIGEST_BYTES = 16


class Meeting(Protocol):
    """One rank's way to meet the others. All ranks call the same methods with the same names in the same order.

    Every method raises PeerError when another rank has failed, in this meeting or anywhere else.
    """

    rank: int
    size: int

    def share(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` returned on rank 0, the only one that calls it: something JSON can hold. If it raises, all ranks fail."""

    def share_once(self, what: str, make: Callable[[], Any]) -> Any:
        """As `share`, made once a job: when torchrun starts the ranks again they get what the first attempt made."""

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, something JSON can hold, by rank and on every rank."""
        ...

    def together(self, phase: str) -> AbstractContextManager[None]:
        """Context in which this rank is in `phase`; left when all ranks are done with it.

        A rank that fails inside raises its own error at once, the others PeerError with the same exit code.
        """
        ...


class LocalMeeting:
    """The meeting of a run with one rank. Values still pass through JSON, to be the same as with more ranks."""

    def __init__(self, position: Position) -> None:
        self.rank = 0
        self.size = 1
        self._position = position

    def share(self, what: str, make: Callable[[], Any]) -> Any:
        return json.loads(_encoded(make()))

    def share_once(self, what: str, make: Callable[[], Any]) -> Any:
        return self.share(what, make)

    def gather(self, what: str, value: Any) -> list[Any]:
        return [json.loads(_encoded(value))]

    @contextmanager
    def together(self, phase: str) -> Iterator[None]:
        self._position.enter(phase)
        yield


class StoreMeeting:
    """A meeting over a store that all ranks are connected to.

    Each rank leaves an entry; rank 0 waits for all, puts them together for the others and takes the entries away: a meeting
    costs the others a few calls whatever their number, and the store does not grow. Equal entries of neighbouring ranks are put
    together as one, so that what all ranks say alike costs each of them the same however many they are.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        position: Position,
        *,
        run_store: Store | None = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`run_store` holds what `share_once` keeps; without it that lives no longer than `store`."""
        self.rank = rank
        self.size = size
        self._store = store
        self._run_store = store if run_store is None else run_store
        self._position = position
        self._poll_seconds = poll_seconds
        self._number = 0

    def share(self, what: str, make: Callable[[], Any]) -> Any:
        return self._meet(f"share {what}", make if self.rank == 0 else _nothing)[0]

    def share_once(self, what: str, make: Callable[[], Any]) -> Any:
        return self.share(what, lambda: self._kept(f"once/{what}", make))

    def gather(self, what: str, value: Any) -> list[Any]:
        return self._meet(f"gather {what}", lambda: value)

    @contextmanager
    def together(self, phase: str) -> Iterator[None]:
        self._position.enter(phase)
        with self._telling():
            yield
        self._meet(f"together {phase}", _nothing)

    def _kept(self, key: str, make: Callable[[], Any]) -> Any:
        if not self._run_store.check([key]):
            self._run_store.set(key, _encoded(make()))
        return json.loads(self._run_store.get(key))

    def _meet(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """What the ranks made, by rank."""
        with self._telling():
            entry = json.dumps([what, _encoded(make())])
            _refuse_too_large(what, len(entry))
        # Not before: a rank that hangs in `make` is behind those who wait for it.
        self._position.issued()
        entries = self._exchange(what, entry)
        for rank, (other, _) in enumerate(entries):
            if other != what:
                mine = f"rank {self.rank} in `{what}`"
                raise AssertionError(f"the ranks are in different meetings: {mine}, rank {rank} in `{other}`")
        return [json.loads(text) for _, text in entries]

    def _exchange(self, what: str, entry: str) -> list[list[str]]:
        number, self._number = self._number, self._number + 1
        everyone = f"meeting/{number}"
        if self.rank > 0:
            self._store.set(f"{everyone}/{self.rank}", entry)
            self._wait_for([everyone])
            return _entries(self._store.get(everyone))
        keys = [f"{everyone}/{rank}" for rank in range(1, self.size)]
        self._wait_for(keys)
        joined = _joined([entry.encode(), *self._store.multi_get(keys)])
        with self._telling():
            _refuse_too_large(what, len(joined))
        self._store.set(everyone, joined)
        # Who has left an entry here has read what the meeting before came to.
        for key in [*keys, f"meeting/{number - 1}"]:
            self._store.delete_key(key)
        return _entries(joined)

    def _wait_for(self, keys: list[str]) -> None:
        pause = _FIRST_PAUSE
        while not self._store.check(keys):
            self._refuse_failed()
            time.sleep(pause)
            pause = min(1.5 * pause, self._poll_seconds)

    def _refuse_failed(self) -> None:
        if self._store.check([_ERROR_KEY]):
            rank, code, said = json.loads(self._store.get(_ERROR_KEY))
            raise PeerError(rank, ExitCode(code), said)
        if self._store.check([FAILURE_KEY]):
            failure = Failure.from_dict(json.loads(self._store.get(FAILURE_KEY)))
            raise PeerError(failure.rank, ExitCode(failure.code), reason(failure))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Context whose errors the other ranks are told of, wherever they wait or will wait."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            # What another rank's end has caused here is no cause: that rank, or who misses it, tells.
            if not is_peer_trouble(error):
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        reason = (str(error) or type(error).__name__).partition("\n")[0].removeprefix("error: ")
        told = json.dumps([self.rank, int(exit_code_of(error)), reason])
        # The store may be gone with the rank that served it; the error at hand matters more.
        with suppress(RuntimeError):
            self._store.compare_set(_ERROR_KEY, "", told)


def compare(meeting: Meeting, what: str, mine: Mapping[str, Any]) -> None:
    """Require `mine`, a flat mapping from dotted keys to values that JSON can hold, to be the same on all ranks.

    Raises:
        ConfigError: on rank 0, with every key that differs and which rank has what.
        PeerError: on the others, with the same exit code.
    """
    room = _MAX_DETAIL_CHARACTERS // min(_MAX_ITEMS, max(1, len(mine)))
    by_rank = told_where_differing(meeting, what, {key: _bounded(_encoded(value), room) for key, value in mine.items()})
    if by_rank is None:
        return
    if meeting.rank > 0:
        raise PeerError(0, ExitCode.CONFIG, f"the ranks differ in {what}")
    everyone = {rank: values for rank, values in enumerate(by_rank) if values is not None}
    keys = sorted(set().union(*everyone.values()))
    differing = [key for key in keys if len({values.get(key) for values in everyone.values()}) > 1]
    rule = f"{what} has to be the same on all ranks"
    cure = "start every rank with the same words, files, environment and version of llmtrain"
    problems = [Problem(f"{key}: {_who_has_what(everyone, key)}", rule, cure) for key in differing[:_MAX_DIFFERENCES]]
    if len(differing) > _MAX_DIFFERENCES:
        problems.append(Problem(f"{len(differing) - _MAX_DIFFERENCES} further keys differ", rule))
    if len(everyone) < len(by_rank):
        others = [rank for rank in range(len(by_rank)) if rank not in everyone]
        problems.append(Problem(f"{describe_ranks(others)} differ from these as well", rule))
    raise ConfigError(*problems)


def told_where_differing(meeting: Meeting, what: str, mine: Mapping[str, Any]) -> list[dict[str, Any] | None] | None:
    """What each rank has, by rank, if not all have the same; None if they have, which a digest tells.

    Where ranks differ only one rank of a group that is alike tells its values, and only the largest groups are heard: what
    is told does not grow with the number of ranks. A rank outside these groups has None.
    """
    text = json.dumps(sorted(mine.items()))
    digests = meeting.gather(f"to compare: {what}", hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest())
    groups = Counter(digests)
    if len(groups) == 1:
        return None
    speakers = {digest: digests.index(digest) for digest, _ in groups.most_common(_MAX_GROUPS)}
    items = list(mine.items()) if meeting.rank in speakers.values() else []
    heard: dict[int, dict[str, Any]] = {rank: {} for rank in speakers.values()}
    is_more = True
    while is_more:
        part, items = dict(items[:_MAX_ITEMS]), items[_MAX_ITEMS:]
        told = meeting.gather(f"what differs: {what}", part)
        for rank, values in heard.items():
            values.update(told[rank])
        is_more = any(told)
    return [heard[speakers[digest]] if digest in speakers else None for digest in digests]


def _who_has_what(everyone: Mapping[int, Mapping[str, str]], key: str) -> str:
    """As `rank 0: 0.1; ranks 1-3: 0.2`."""
    ranks: dict[str, list[int]] = {}
    for rank, values in everyone.items():
        ranks.setdefault(values.get(key, "not set"), []).append(rank)
    alike = len(os.path.commonprefix(list(ranks)))
    return "; ".join(f"{describe_ranks(those)}: {_shortened(value, alike)}" for value, those in ranks.items())


def _shortened(text: str, num_alike: int) -> str:
    """At most about a line of `text`, with the place where it begins to differ from the others'."""
    start = max(0, num_alike - _MAX_VALUE_CHARACTERS // 2) if len(text) > _MAX_VALUE_CHARACTERS else 0
    end = start + _MAX_VALUE_CHARACTERS
    return ("… " if start else "") + text[start:end] + (" …" if end < len(text) else "")


def _bounded(text: str, num_characters: int) -> str:
    """The beginning of a long text, and a digest of the whole."""
    if len(text) <= num_characters:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{text[:num_characters]} … (digest {digest})"


def _encoded(value: Any) -> str:
    """JSON of `value`; a number that is not finite keeps its name.

    Raises:
        TypeError: JSON cannot hold it, or would hold another key than the one given.
    """
    _require_text_keys(value)
    return json.dumps(value)


def _require_text_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        others = [key for key in value if not isinstance(key, str)]
        if others:
            raise TypeError(f"key {others[0]!r} would come back as text")
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        _require_text_keys(item)


def _refuse_too_large(what: str, num_bytes: int) -> None:
    """Raise ValueError for a value that the store would not take; the connection would break and this look like a lost rank."""
    if num_bytes > MAX_VALUE_BYTES:
        raise ValueError(f"the ranks say {num_bytes:,} bytes in `{what}`, the store takes {MAX_VALUE_BYTES:,} at once")


def _joined(entries: Sequence[bytes]) -> bytes:
    """Entries by rank as pairs: an entry and how many neighbours in a row have it."""
    return b"[%s]" % b",".join(b"[%s,%d]" % (entry, len(list(alike))) for entry, alike in groupby(entries))


def _entries(joined: bytes) -> list[list[str]]:
    return [entry for entry, count in json.loads(joined) for _ in range(count)]


def _nothing() -> None:
    """What a rank brings that has nothing to say."""
