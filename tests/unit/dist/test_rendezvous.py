"""How ranks find each other: who listens where, whose keys are whose, and what is said when somebody does not come."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from llmtrain.config.errors import ConfigError, ExitCode, RankLostError
from llmtrain.dist.rendezvous import agree_on_attempt, another_connection, leave_store, open_store, run_store
from llmtrain.dist.world import LaunchFacts

pytestmark = pytest.mark.timeout(60)

LISTENING = "0A"
"""State of a socket in /proc/net/tcp (include/net/tcp_states.h)."""
LOOPBACK_HEX = "0100007F"
ANY_HEX = "00000000"


def free_port() -> int:
    """A port that nobody has and that the system gives to no connection of another test (those are from 32768 up)."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody will meanwhile."""
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def listeners(port: int) -> list[str]:
    """Hexadecimal addresses on which somebody listens at `port`, as the kernel has them."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, _, number = local.partition(":")
            if state == LISTENING and int(number, 16) == port:
                found.append(address)
    return found


def two_ranks(port: int, **changed: object) -> list[LaunchFacts]:
    common = LaunchFacts(0, 0, 2, "WORLD_SIZE", local_world_size=2, master_port=port, run_id="run")
    return [replace(common, rank=rank, local_rank=rank, **changed) for rank in range(2)]  # type: ignore[arg-type]


def open_both(places: list[LaunchFacts], seconds: float = 20.0) -> list[PrefixStore]:
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(lambda place: open_store(place, seconds), places))


@pytest.fixture
def agent() -> TCPStore:
    """The store of a torchrun, which outlives the ranks it starts."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_rank_0_serves_one_host_on_loopback_only() -> None:
    places = two_ranks(free_port())
    zero, one = open_both(places)
    assert listeners(places[0].master_port) == [LOOPBACK_HEX]
    zero.set("key", "value")
    assert one.get("key") == b"value"


@pytest.mark.parametrize("is_listening", [False, True])
def test_the_launchers_socket_is_used_and_stays_on_loopback(is_listening: bool) -> None:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        if is_listening:
            listener.listen()
        port = listener.getsockname()[1]
        places = two_ranks(port)
        stores = open_both([replace(places[0], listen_fd=os.dup(listener.fileno())), places[1]])
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"
    assert listeners(port) == [LOOPBACK_HEX]


def test_a_host_that_calls_itself_loopback_listens_for_the_other_hosts_too() -> None:
    places = two_ranks(free_port(), num_nodes=2, master_addr="127.0.1.1")
    stores = open_both(places)
    assert listeners(places[0].master_port) == [ANY_HEX]
    del stores


def test_several_hosts_meet_on_the_named_address_only() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent, the kernel only chooses its own
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    places = two_ranks(free_port(), num_nodes=2, master_addr=own)
    stores = open_both(places)
    assert listeners(places[0].master_port) == [socket.inet_aton(own)[::-1].hex().upper()]
    del stores


def test_attempts_under_one_torchrun_do_not_see_each_others_keys(agent: TCPStore) -> None:
    # The second node's count of restarts is behind, as after a failure on the first node under a c10d rendezvous.
    first = open_both(two_ranks(agent.port, served=True))
    first[0].set("key", "old")
    places = [replace(place, attempt=1 - place.rank) for place in two_ranks(agent.port, served=True)]
    second = open_both(places)
    assert not second[0].check(["key"]) and not second[1].check(["key"])
    second[1].set("key", "new")
    assert (first[1].get("key"), second[0].get("key")) == (b"old", b"new")


def test_what_all_attempts_share_is_kept_by_torchrun(agent: TCPStore) -> None:
    first = open_both(two_ranks(agent.port, served=True))
    run_store(first[0]).set("name", "tiny")
    second = open_both(two_ranks(agent.port, served=True))
    assert run_store(second[1]).get("name") == b"tiny"
    other_job = open_both(two_ranks(agent.port, served=True, run_id="another"))
    assert not run_store(other_job[0]).check(["name"])


def agree(store: Store, ranks: list[int], size: int, seconds: float = 20.0) -> list[int]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: agree_on_attempt(store, rank, size, time.monotonic() + seconds), ranks))


def test_words_that_an_old_attempt_left_are_no_answer() -> None:
    store = HashStore()
    assert agree(store, [0, 1, 2], 3) == [0, 0, 0]
    with pytest.raises(RankLostError, match="ranks 1-2 of 3 did not come"):
        agree(store, [0], 3, seconds=0.3)
    with pytest.raises(RankLostError, match="rank 1 found a store but no rank 0"):
        agree(store, [1], 3, seconds=0.3)
    assert agree(store, [2, 1, 0], 3) == [2, 2, 2]


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(RankLostError, match="ranks 1, 3 of 4 did not come") as caught:
        with ThreadPoolExecutor() as pool:
            store = HashStore()
            late = pool.submit(agree, store, [2], 4)
            agree(store, [0], 4, seconds=1.0)
    assert late.result() == [0]
    assert caught.value.exit_code == ExitCode.LOST


@pytest.mark.parametrize("served", [False, True])
def test_nobody_there_is_said_in_time(served: bool, deaf_port: int) -> None:
    place = two_ranks(deaf_port, served=served)[1]
    began = time.monotonic()
    with pytest.raises(RankLostError, match=f"MASTER_PORT={place.master_port} within 0.5 s.*refused") as caught:
        open_store(place, 0.5)
    assert time.monotonic() - began < 10
    assert ("torchrun has to listen" if served else "rank 0 has to listen") in str(caught.value)


def test_a_socket_that_is_connected_with_itself_is_nobody(deaf_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect_with_itself(address: tuple[str, int], timeout: float) -> socket.socket:
        own = socket.socket()
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        return own

    monkeypatch.setattr(socket, "create_connection", connect_with_itself)
    with pytest.raises(RankLostError, match="reaches nobody.*refused"):
        open_store(two_ranks(deaf_port)[1], 0.3)


def test_a_name_that_nobody_knows_is_said() -> None:
    place = two_ranks(free_port(), num_nodes=2, master_addr="no-such-host.invalid")[1]
    with pytest.raises(RankLostError, match=r"MASTER_ADDR=no-such-host\.invalid"):
        open_store(place, 0.5)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where somebody listens and never says a word: torch's own wait for it has no end."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def test_somebody_else_on_the_port_is_said_in_time(silent_port: int) -> None:
    began = time.monotonic()
    with pytest.raises(RankLostError, match=f"what listens at .*MASTER_PORT={silent_port} does not answer rank 1"):
        open_store(two_ranks(silent_port)[1], 0.5)
    assert time.monotonic() - began < 10


def test_a_port_in_use_is_said_by_rank_0(silent_port: int) -> None:
    with pytest.raises(ConfigError, match=f"rank 0 cannot listen at .*MASTER_PORT={silent_port}: Address already in use"):
        open_store(two_ranks(silent_port)[0], 5.0)


class Signalled(Exception):
    pass


@pytest.fixture
def soon_signalled() -> Iterator[Callable[[], None]]:
    """Sends this process SIGUSR1, whose handler raises, a moment after it is called."""

    def raise_it(*_: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGUSR1, raise_it)
    timers: list[threading.Timer] = []

    def send() -> None:
        timers.append(threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)))
        timers[0].start()

    yield send
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", ["nobody", "silent", "alone"])
def test_signals_are_noticed_while_waiting(
    kind: str, deaf_port: int, silent_port: int, soon_signalled: Callable[[], None]
) -> None:
    place = {"nobody": two_ranks(deaf_port)[1], "silent": two_ranks(silent_port)[1], "alone": two_ranks(free_port())[0]}[kind]
    began = time.monotonic()
    soon_signalled()
    with pytest.raises(Signalled):
        open_store(place, 40.0)
    assert time.monotonic() - began < 15


def test_another_connection_is_not_held_up_by_a_waiting_one(agent: TCPStore) -> None:
    store = open_both(two_ranks(agent.port, served=True))[0]
    other = another_connection(store)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.get, "late")
        time.sleep(0.1)
        assert not other.check(["late"])
        assert not waiting.done()
        other.set("late", "here")
        assert waiting.result(20) == b"here"


def test_the_server_stays_until_the_others_have_left() -> None:
    places = two_ranks(free_port())
    zero, one = open_both(places)
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(leave_store, zero, places[0], 20.0)
        time.sleep(0.2)
        assert not leaving.done()
        leave_store(one, places[1], 20.0)
        leaving.result(15)
    began = time.monotonic()
    leave_store(zero, replace(places[0], world_size=3), 0.2)  # rank 2 has died without a word
    assert time.monotonic() - began < 10


def test_leaving_a_store_that_is_gone_says_nothing() -> None:
    places = two_ranks(free_port())
    stores = open_both(places)
    del stores[0]
    leave_store(stores[0], places[1], 5.0)


@pytest.fixture
def few_files() -> Iterator[int]:
    """A soft limit of open files little above what this process has open; gives how many it may still open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 24, before[1]))
    yield 24
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(few_files: int) -> None:
    places = two_ranks(free_port())
    size = few_files  # two open files each in this process, one at each end
    stores = open_both([replace(places[min(rank, 1)], rank=rank, world_size=size) for rank in range(size)])
    stores[-1].set("key", "value")
    assert all(store.get("key") == b"value" for store in stores)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


@pytest.mark.parametrize(("rank", "served", "needed"), [(0, False, "664"), (0, True, "264"), (3, False, "264")])
def test_too_few_open_files_are_said_at_once(rank: int, served: bool, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    place = replace(two_ranks(free_port())[0], rank=rank, world_size=200, served=served)
    with pytest.raises(ConfigError, match=f"rank {rank} may have 256 open files") as caught:
        open_store(place, 20.0)
    assert f"with 200 ranks it needs about {needed}" in str(caught.value) and "ulimit -n" in str(caught.value)


def test_a_connection_that_fails_for_want_of_files_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(RankLostError, match="rank 1 cannot open a connection .* Too many open files") as caught:
        open_store(two_ranks(free_port())[1], 50.0)
    assert "ulimit -n" in str(caught.value)
