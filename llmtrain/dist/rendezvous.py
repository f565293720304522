"""Where the ranks of a run find each other: a key-value store in one process that all others connect to.

torchrun keeps one store for all attempts of a job, where what an old attempt left would send ranks to processes that are gone.
Its counts of restarts do not tell attempts apart: with a rendezvous that lets nodes come and go they differ between nodes. So
every attempt gets a number from rank 0, and keys of its own. A connection is opened in a thread of its own, as torch can wait
in C++ without limit for a server that does not answer, and signals would go unnoticed.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from llmtrain.config.errors import ConfigError, Problem, RankLostError
from llmtrain.dist.failure import answered_within, describe_ranks
from llmtrain.dist.handles import raise_handle_limit
from llmtrain.dist.world import LOOPBACK, LaunchFacts

Result = TypeVar("Result")

_ALL_INTERFACES = "0.0.0.0"
_BACKLOG = 4096
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
# Open files: every rank has two connections with the server of the store, and one with every other rank in gloo's mesh.
_STORE_HANDLES, _MESH_HANDLES, _OWN_HANDLES = 2, 1, 64
_OUT_OF_HANDLES = (errno.EMFILE, errno.ENFILE)
_MORE_HANDLES = "`ulimit -n` before the start, LimitNOFILE of the service, or limits.conf of the host"


def open_store(facts: LaunchFacts, timeout_seconds: float) -> PrefixStore:
    """Connect with all other ranks, and return when every rank of this attempt is there.

    Rank 0 serves the store unless torchrun does. The server lives as long as rank 0 keeps what is returned here; see
    `leave_store`.

    Args:
        facts: place of this process, world_size > 1.
        timeout_seconds: longest wait for the other ranks, and the store's own for a key that does not come.

    Returns:
        The store under a prefix of this attempt; see `run_store` for what outlives one.

    Raises:
        ConfigError: rank 0 cannot listen where it has to, as its port is in use; a rank may not open as many files as it needs.
        RankLostError: rank 0 is not reached or other ranks do not come in time.
    """
    deadline = time.monotonic() + timeout_seconds
    patience = timedelta(seconds=timeout_seconds)
    is_server = facts.rank == 0 and not facts.served
    _require_handles(facts, is_server)
    server = _serve(facts, patience) if is_server else _connect(facts, patience, deadline)
    run = PrefixStore(f"llmtrain/{facts.run_id}", server)
    attempt = agree_on_attempt(run, facts.rank, facts.world_size, deadline)
    return PrefixStore(str(attempt), run)


def another_connection(store: PrefixStore) -> PrefixStore:
    """The same keys over a connection of its own, for another thread: a call that waits holds up others on its connection."""
    return store.clone()


def run_store(store: PrefixStore) -> Store:
    """The keys that all attempts of the job share. torchrun's server outlives attempts, that of a rank 0 does not."""
    return store.underlying_store


def leave_store(store: PrefixStore, facts: LaunchFacts, wait_seconds: float) -> None:
    """Say that this rank needs the store no more. Rank 0 that serves it waits until all have said so, at most `wait_seconds`.

    Without it the end of rank 0 would take away what the others have not yet read, as why it ended.
    """
    deadline = time.monotonic() + wait_seconds
    if facts.rank > 0:
        answered_within(lambda: store.set(f"left/{facts.rank}", ""), _left(deadline))
    elif not facts.served:
        with suppress(RuntimeError):
            _poll(deadline, lambda: store.check([f"left/{rank}" for rank in range(1, facts.world_size)]))


def agree_on_attempt(run: Store, rank: int, size: int, deadline: float) -> int:
    """Number of this attempt, counted by rank 0 and the same on all ranks that are there now.

    Every other rank leaves a word that nobody has used before, and takes the number that is written under it: what a previous
    attempt has left in the store is never taken for an answer.

    Args:
        deadline: reading of time.monotonic() until which all have to be there.

    Raises:
        RankLostError: not all have come.
    """
    if rank == 0:
        attempt = int(run.add("join/attempts", 1)) - 1
        missing = set(range(1, size))
        answered: set[bytes] = set()
        _poll(deadline, lambda: _welcome(run, attempt, missing, answered))
        if missing:
            waited = "the others wait for them at the rendezvous"
            cure = "look into their logs; a longer launch.timeout_seconds if they only start slowly"
            raise RankLostError(Problem(f"{describe_ranks(sorted(missing))} of {size} did not come", waited, cure))
        return attempt
    word = secrets.token_hex(8)
    run.set(f"join/words/{rank}", word)
    if not _poll(deadline, lambda: run.check([f"join/answers/{word}"])):
        rule = "rank 0 of the same run has to answer at the rendezvous"
        cure = "look into the log of rank 0; another MASTER_PORT if a second run uses this one"
        raise RankLostError(Problem(f"rank {rank} found a store but no rank 0 in it", rule, cure))
    attempt = int(run.get(f"join/answers/{word}"))
    run.set(f"join/{attempt}/{rank}", "")
    return attempt


def _welcome(run: Store, attempt: int, missing: set[int], answered: set[bytes]) -> bool:
    """One round of rank 0: answer new words, strike out who has read the answer. Gives whether all are there."""
    for rank in sorted(missing):
        if run.check([f"join/{attempt}/{rank}"]):
            missing.remove(rank)
        elif run.check([f"join/words/{rank}"]) and (word := run.get(f"join/words/{rank}")) not in answered:
            run.set(f"join/answers/{word.decode()}", str(attempt))
            answered.add(word)
    return not missing


def _require_handles(facts: LaunchFacts, is_server: bool) -> None:
    """Raise the limit of open files as far as it goes, and refuse one that is too low: torch's server would fall silent at it."""
    limit = raise_handle_limit()
    needed = _OWN_HANDLES + facts.world_size * (_MESH_HANDLES + (_STORE_HANDLES if is_server else 0))
    if limit < needed and limit != resource.RLIM_INFINITY:
        what = f"rank {facts.rank} may have {limit} open files"
        rule = f"with {facts.world_size} ranks it needs about {needed}: its connections are open files too"
        raise ConfigError(Problem(what, rule, f"a higher hard limit: {_MORE_HANDLES}"))


def _serve(facts: LaunchFacts, patience: timedelta) -> TCPStore:
    """The store itself, listening where our launcher has bound a socket, else on no more than has to be reached."""
    if facts.listen_fd is not None:
        host, descriptor = facts.master_addr, facts.listen_fd
    else:
        try:
            listener = _listen(facts)
        except OSError as error:
            raise ConfigError(
                Problem(
                    what=f"rank 0 cannot listen at {_place(facts)}: {error.strerror}",
                    rule="all ranks meet there, so the port has to be free on the host of rank 0",
                    cure="another port: export MASTER_PORT=29511 for every rank",
                )
            ) from None
        bound = listener.getsockname()[0]
        host, descriptor = LOOPBACK if bound == _ALL_INTERFACES else bound, listener.detach()
    # Without libuv torch takes no socket that is already bound.
    return TCPStore(
        host,
        facts.master_port,
        is_master=True,
        timeout=patience,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=True,
    )


def _place(facts: LaunchFacts) -> str:
    return f"MASTER_ADDR={facts.master_addr}, MASTER_PORT={facts.master_port}"


def _listen(facts: LaunchFacts) -> socket.socket:
    """A listening socket: on loopback for one host, else on the named address where this host has it, else on all interfaces.

    The store knows no passwords, so it is not offered to more of the network than needed.
    """
    if facts.num_nodes == 1:
        return _bound(socket.AF_INET, (LOOPBACK, facts.master_port))
    found = []
    with suppress(socket.gaierror):
        found = socket.getaddrinfo(facts.master_addr, facts.master_port, type=socket.SOCK_STREAM)
    for family, _, _, _, address in found:
        # Many hosts call themselves 127.0.1.1, which no other one can reach.
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            continue
        try:
            return _bound(family, address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return _bound(socket.AF_INET, (_ALL_INTERFACES, facts.master_port))


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a run that has just ended keep a port from being bound for a minute otherwise.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _connect(facts: LaunchFacts, patience: timedelta, deadline: float) -> TCPStore:
    """A connection to the store that rank 0 or torchrun serves."""
    serves_here = facts.num_nodes == 1 and not facts.served
    host, port = LOOPBACK if serves_here else facts.master_addr, facts.master_port
    place = _place(facts)
    server = "torchrun" if facts.served else "rank 0"
    cure = f"look whether {server} still runs; both variables have to be the same on all ranks"
    last_error = _knock(host, port, deadline)
    if last_error is not None and last_error.errno in _OUT_OF_HANDLES:
        what = f"rank {facts.rank} cannot open a connection to {place}: {last_error.strerror}"
        raise RankLostError(Problem(what, "a connection is an open file", f"a higher limit: {_MORE_HANDLES}"))
    if last_error is not None:
        what = f"rank {facts.rank} reaches nobody at {place} within {patience.total_seconds():g} s: {last_error}"
        raise RankLostError(Problem(what, f"{server} has to listen there", cure))
    store = answered_within(
        lambda: TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False, use_libuv=True),
        _left(deadline),
    )
    if store is None:
        what = f"what listens at {place} does not answer rank {facts.rank} as a store within {patience.total_seconds():g} s"
        hint = f"{cure}; one that may open too few files takes no more connections: {_MORE_HANDLES}"
        raise RankLostError(Problem(what, f"{server} has to serve the store there", hint))
    return store


def _knock(host: str, port: int, deadline: float) -> OSError | None:
    """Wait until somebody listens; the last error when nobody did in time, or this process may open no more files.

    torch would print a warning for every try.
    """
    errors: list[OSError] = []

    def try_once() -> bool:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))) as probe:
                # Where nobody listens on this host, the system may by chance connect a socket with itself.
                if probe.getsockname() != probe.getpeername():
                    return True
                errors[:] = [ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))]
        except OSError as error:
            errors[:] = [error]
            return error.errno in _OUT_OF_HANDLES
        return False

    is_there = _poll(deadline, try_once) and not (errors and errors[0].errno in _OUT_OF_HANDLES)
    return None if is_there else errors[0]


def _poll(deadline: float, is_done: Callable[[], bool]) -> bool:
    """Ask ever less often until it is so or the time has come; gives whether it is so."""
    pause = _FIRST_PAUSE
    while not is_done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return True


def _left(deadline: float) -> float:
    """Seconds until a reading of time.monotonic()."""
    return max(0.0, deadline - time.monotonic())
