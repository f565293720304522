"""Connections that are ended from within: those that were named, and no other."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from llmtrain.dist import group_sockets
from llmtrain.dist.group_sockets import hang_up, open_sockets

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    mine = socket.create_connection(listener.getsockname(), timeout=5)
    theirs, _ = listener.accept()
    theirs.settimeout(5)
    return mine, theirs


def is_open(mine: socket.socket, theirs: socket.socket) -> bool:
    try:
        mine.sendall(b"x")
    except BrokenPipeError:
        return False
    return theirs.recv(1) == b"x"


def test_what_was_opened_meanwhile_is_ended_and_seen_so_by_both_sides(listener: socket.socket) -> None:
    old = connect(listener)
    before = open_sockets()
    mine, theirs = connect(listener)
    hang_up(open_sockets() - before, 1)
    assert theirs.recv(1) == b"" and mine.recv(1) == b""
    assert is_open(*old)
    for end in (*old, mine, theirs):
        end.close()


def test_connections_to_the_store_and_sockets_that_listen_stay() -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as store:
        pair = connect(store)
        hang_up(open_sockets() - before, store.getsockname()[1])
        assert is_open(*pair)
        hang_up(open_sockets() - before, 1)
        assert not is_open(*pair)
        again = connect(store)
        assert is_open(*again), "who listens still does"
        for end in (*pair, *again):
            end.close()


def test_a_name_is_not_found_in_another_socket_of_the_same_descriptor(listener: socket.socket) -> None:
    before = open_sockets()
    first = connect(listener)
    names = open_sockets() - before
    descriptors = [end.fileno() for end in first]
    for end in first:
        end.close()
    second = connect(listener)
    assert [end.fileno() for end in second] == descriptors
    hang_up(names, 1)
    assert is_open(*second)
    for end in second:
        end.close()


def test_nothing_is_done_where_descriptors_are_not_listed(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sockets, "_DESCRIPTORS", "/nowhere")
    pair = connect(listener)
    assert open_sockets() == frozenset()
    hang_up(open_sockets(), 1)
    assert is_open(*pair)
    for end in pair:
        end.close()
