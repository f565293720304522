"""Failures: which errors are a peer's doing, which failure of several is kept and by whom it is read, and what is said in a line."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from llmtrain.config.errors import DataError, ExitCode, Problem
from llmtrain.dist.failure import (
    FAILURE_KEY,
    Failure,
    FailureBoard,
    describe_ranks,
    failure_file,
    headline,
    is_peer_trouble,
    is_told,
    mark_told,
    reason,
    reason_of_run,
)
from llmtrain.dist.position import Position, Snapshot

pytestmark = pytest.mark.timeout(120)

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/{}] {}"
CRASH = Failure(1, "node", 77, "backward", 7, 2, "crash", 70, "Traceback …\nRuntimeError: shapes", 1)


def _failure(rank: int = 1, **others: Any) -> Failure:
    return Failure.from_dict(CRASH.to_dict() | {"rank": rank, "reporter": rank} | others)


# What gloo and the store raise.


def _store(port: int, listener: int | None = None, seconds: float = 20.0) -> dist.Store:
    options = {} if listener is None else {"master_listen_fd": listener}
    limit = timedelta(seconds=seconds)
    return dist.TCPStore("127.0.0.1", port, None, listener is not None, limit, wait_for_workers=False, **options)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    os._exit(0)


def _be_late() -> None:
    time.sleep(30.0)


def _close() -> None:
    dist.destroy_process_group()
    time.sleep(2.0)


def _meets_its_end(rank: int, port: int, end: Callable[[], None], queue: Any) -> None:
    """Rank 1 ends in the given way; rank 0 tells what its collective raises, and the next one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=6 if end is _be_late else 30)
    dist.init_process_group("gloo", store=_store(port), rank=rank, world_size=2, timeout=limit)
    dist.all_reduce(torch.ones(1000))
    if rank == 1:
        end()
        return
    told = []
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(1000))
        except Exception as error:
            told.append((type(error).__name__, str(error), is_peer_trouble(error)))
    queue.put(told)
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.mark.parametrize("end", [_kill, _leave, _be_late, _close])
def test_what_gloo_raises_when_a_peer_ends_is_peer_trouble(end: Callable[[], None]) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = _store(port, listener.detach())
    ranks = [context.Process(target=_meets_its_end, args=(rank, port, end, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        told = queue.get(timeout=40.0)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert len(told) == 2, told
    assert all(trouble for _, _, trouble in told), told
    del server


def _serve(port_pipe: Any) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = _store(port, listener.detach())
    port_pipe.send(port)
    time.sleep(60.0)
    del server


def test_errors_of_a_store_that_is_gone_are_peer_trouble_and_the_board_copes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,))
    server.start()
    try:
        assert ours.poll(40.0)
        port = ours.recv()
        store = _store(port, seconds=1.0)
        with pytest.raises(RuntimeError) as late:
            store.get("nobody sets this")
        assert is_peer_trouble(late.value)
        bare, with_folder = FailureBoard(store), FailureBoard(store, tmp_path)
        assert bare.first() is None
    finally:
        server.kill()
        server.join()
    with pytest.raises(RuntimeError) as gone:
        store.add("any", 1)
    assert is_peer_trouble(gone.value)
    assert bare.first() is None
    assert bare.post(CRASH), "without a store or a folder each takes its own for the first"
    assert with_folder.post(_failure(1)) and not with_folder.post(_failure(0))
    assert with_folder.first() == _failure(1)


def test_a_store_that_does_not_answer_holds_the_board_up_for_seconds_only(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,))
    server.start()
    try:
        assert ours.poll(40.0)
        board = FailureBoard(_store(ours.recv()), tmp_path)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert board.post(CRASH)
        assert board.first() == CRASH
        assert time.monotonic() - began < 20.0
    finally:
        server.kill()
        server.join()


@pytest.mark.parametrize(
    "text",
    [
        GLOO.format("pair.cc:553", "Connection closed by peer [127.0.0.1]:28823. This is typically caused by a remote worker"),
        GLOO.format("pair.cc:537", "Read error [127.0.0.1]:944: Connection reset by peer. This is typically caused by"),
        GLOO.format("pair.cc:301", "writev [127.0.0.1]:944: Broken pipe"),
        GLOO.format("unbound_buffer.cc:78", "Timed out waiting 3000ms for recv operation to complete"),
        GLOO.format("unbound_buffer.cc:129", "Timed out waiting 3000ms for send operation to complete"),
        "Application timeout caused pair closure",
        "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    ],
)
def test_texts_of_gloo(text: str) -> None:
    assert is_peer_trouble(RuntimeError(text))
    assert not is_peer_trouble(ValueError(text)), "gloo raises RuntimeError"


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2018, {}, NCCL version 2.27\n{}"


def test_errors_of_nccl_are_told_apart() -> None:
    remote = NCCL.format(
        "remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    )
    assert is_peer_trouble(dist.DistBackendError(remote))
    own = [
        ("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed."),
        ("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
        ("invalid argument", "ncclInvalidArgument: Invalid value for an argument."),
    ]
    for words in own:
        assert not is_peer_trouble(dist.DistBackendError(NCCL.format(*words))), words


def test_errors_of_ones_own_are_no_peer_trouble() -> None:
    own: list[BaseException] = [OSError("Connection reset by peer"), BrokenPipeError("Broken pipe"), KeyboardInterrupt()]
    own.append(
        RuntimeError("[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes")
    )
    own.append(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. Connection closed by peer"))
    for call in (lambda: torch.ones(3) @ torch.ones(4), lambda: torch.ones(2).view(3)):
        with pytest.raises(RuntimeError) as caught:
            call()
        own.append(caught.value)
    assert [error for error in own if is_peer_trouble(error)] == []


def test_the_cause_of_an_error_counts_and_what_was_handled_before_does_not() -> None:
    gloo = RuntimeError(GLOO.format("pair.cc:553", "Connection closed by peer [127.0.0.1]:28823."))
    wrapped, after = ValueError("could not sum the loss"), ValueError("something else")
    wrapped.__cause__, after.__context__ = gloo, gloo
    assert is_peer_trouble(wrapped)
    assert not is_peer_trouble(after)


# The board.


def test_a_failure_travels_as_json() -> None:
    hang = _failure(3, kind="hang", reporter=0, stacks={3: "File …", 0: "x"}, signal=9)
    assert Failure.from_dict(json.loads(json.dumps(hang.to_dict()))) == hang
    assert hang.stacks == {3: "File …", 0: "x"}
    with pytest.raises(ValueError, match="no kind of failure: 'odd'"):
        Failure.from_dict(hang.to_dict() | {"kind": "odd"})


def test_the_same_failure_elsewhere() -> None:
    assert CRASH.at(Snapshot("save", 9, 1, 5, 6)) == _failure(1, phase="save", step=9, microbatch=1)


def test_the_first_failure_over_all_ranks_stays() -> None:
    store = dist.HashStore()
    boards = [FailureBoard(store) for _ in range(3)]
    assert boards[0].first() is None
    assert boards[2].post(_failure(2)) and not boards[0].post(_failure(0))
    assert [board.first() for board in boards] == [_failure(2)] * 3
    assert store.check([FAILURE_KEY])


def test_waiting_for_the_first_failure_ends_when_it_comes() -> None:
    store = dist.HashStore()
    began = time.monotonic()
    assert FailureBoard(store).first(0.3) is None
    assert time.monotonic() - began >= 0.3
    FailureBoard(store).post(CRASH)
    began = time.monotonic()
    assert FailureBoard(store).first(30.0) == CRASH
    assert time.monotonic() - began < 10.0


def test_reports_are_whole_and_of_each_rank_its_first(tmp_path: Path) -> None:
    board = FailureBoard(None, tmp_path)
    assert board.first() is None
    assert board.post(_failure(1, text="the first"))
    board.post(_failure(1, text="the second"))
    assert not board.post(_failure(0))
    kept = [Failure.from_dict(json.loads(failure_file(tmp_path, rank).read_bytes())) for rank in (0, 1)]
    assert kept == [_failure(0), _failure(1, text="the first")]
    assert board.first() == _failure(1, text="the first")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first.json", "rank0.json", "rank1.json"]


def test_the_first_report_stays_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    boards = [FailureBoard(None, tmp_path) for _ in range(2)]
    assert boards[1].post(_failure(1)) and not boards[0].post(_failure(0))
    assert [board.first() for board in boards] == [_failure(1)] * 2


def test_a_torn_report_is_read_once_it_is_whole(tmp_path: Path) -> None:
    text = json.dumps(CRASH.to_dict())
    (tmp_path / "first.json").write_text(text[:40])
    board = FailureBoard(None, tmp_path)
    assert board.first() is None
    (tmp_path / "first.json").write_text(text)
    assert board.first() == CRASH


def test_a_failure_that_was_read_outlives_the_store() -> None:
    store = dist.HashStore()
    board = FailureBoard(store)
    board.post(CRASH)
    assert board.first() == CRASH
    store.delete_key(FAILURE_KEY)
    assert board.first() == CRASH


def test_a_folder_that_is_gone_is_no_failure_of_its_own(tmp_path: Path) -> None:
    board = FailureBoard(None, tmp_path / "gone", tmp_path / "gone" / "error.json")
    board.post(CRASH)
    assert board.first() is None


def test_torchrun_reads_the_cause_and_prefers_it_to_a_victim(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    FailureBoard(None, None, error_file).post(CRASH)
    cause = ProcessFailure(local_rank=1, pid=77, exitcode=70, error_file=str(error_file))
    victim = ProcessFailure(local_rank=0, pid=76, exitcode=70, error_file=str(tmp_path / "none"))
    shown = ChildFailedError("llmtrain", {0: victim, 1: cause})
    assert shown.get_first_failure()[0] == 1
    assert "RuntimeError: shapes" in str(shown)
    assert cause.message["message"] == headline(CRASH)  # type: ignore[index]


# One error.


def test_a_failure_of_an_error() -> None:
    position = Position()
    position.at_step(4)
    position.enter("save")
    try:
        1 // 0  # noqa: B018
    except ZeroDivisionError as error:
        crash = Failure.of(error, 3, position.snapshot())
    assert (crash.rank, crash.reporter, crash.pid, crash.host) == (3, 3, os.getpid(), socket.gethostname())
    assert (crash.phase, crash.step, crash.kind, crash.code) == ("save", 4, "crash", ExitCode.FAULT)
    assert crash.text.startswith("Traceback") and "1 // 0" in crash.text and not crash.text.endswith("\n")
    message = Failure.of(DataError(Problem("no text", "a rule")), 0, position.snapshot())
    assert (message.kind, message.code, message.text) == ("error", ExitCode.DATA, "error: no text\n  rule  a rule")
    interruption = Failure.of(KeyboardInterrupt(), 0, position.snapshot())
    assert (interruption.kind, interruption.text, interruption.is_stop, message.is_stop) == (
        "error",
        "interrupted",
        True,
        False,
    )


def test_an_error_is_marked_as_told() -> None:
    for error in (RuntimeError(), KeyboardInterrupt(), DataError("no text")):
        assert not is_told(error)
        mark_told(error)
        assert is_told(error)


TRACEBACK = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"kind": "error", "phase": "data", "step": 0, "text": "error: no text\n  rule  r"}, "failed in phase data, before step 1: no text"),
        ({"phase": "save", "text": f"{TRACEBACK}\n  File x\n    call()\nValueError: two\nlines"}, "raised an exception in phase save of step 7: ValueError: two"),
        ({"phase": "save", "text": f"{TRACEBACK}\n  a\nKeyError: 1\n\nDuring …\n\n{TRACEBACK}\n  b\nOSError: 2"}, "raised an exception in phase save of step 7: OSError: 2"),
        ({"kind": "error", "phase": "start", "step": 0, "text": f"ended with exit code 1\nprinted:\n{TRACEBACK}\n  a\nImportError: x"}, "failed in phase start, before step 1: ImportError: x"),
        ({"kind": "lost", "phase": "save", "text": "contact was lost"}, "vanished in phase save of step 7"),
        ({"kind": "hang", "phase": "save", "text": "nothing moved"}, "stands still in phase save of step 7"),
        ({"kind": "error", "code": 75, "text": "error: stopped by SIGTERM\n  rule  r"}, "stopped by SIGTERM"),
        ({"kind": "error", "text": ""}, "failed in phase backward of step 7, micro-batch 2"),
    ],
)  # fmt: skip
def test_why_a_run_ended_in_one_line(others: dict[str, Any], words: str) -> None:
    failure = _failure(1, **others)
    assert reason(failure) == words and reason_of_run(failure) == f"rank 1: {words}"


def test_ranks_in_words() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([0, 2, 3, 4, 7]) == "ranks 0, 2-4, 7"
