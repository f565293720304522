"""The pool of ranks itself: results in order, failures of all kinds told with every rank, nothing left behind."""

import ast
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.ranks import TESTS, RanksFailedError
from helpers.scripts import ROOT


@dataclass(frozen=True)
class Answer:
    """A class of a test module can be sent and returned."""

    number: int


def place_of(place):
    return place.rank, place.local_rank, place.world_size, os.getpid()


def doubled(place, answer):
    return Answer(2 * answer.number + place.rank)


def many_bytes(place, count):
    return bytes([place.rank]) * count


def raises_on(place, rank):
    if place.rank == rank:
        raise ValueError(f"planted on {place.rank}")
    print("waiting for a rank that raised", flush=True)
    time.sleep(60)


def hangs(place):
    if place.rank == 1:
        the_place_where_it_hangs()
    return place.rank


def the_place_where_it_hangs():
    time.sleep(60)


def stops_itself(place):
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def killed(place):
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return place.rank


def leaves_a_child(place):
    if place.rank == 0 and os.fork() == 0:
        os.setsid()
        time.sleep(60)


def summed(place):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="env://", rank=place.rank, world_size=place.world_size)
    numbers = torch.arange(3) + place.rank
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    return numbers.tolist()


def environment(place):
    return os.environ.get("SET_HERE"), os.environ.get("HOME"), os.environ.get("GLOO_SOCKET_IFNAME")


def failed(ranks, function, *args, size=2, **options):
    """(message, seconds)"""
    began = time.monotonic()
    with pytest.raises(RanksFailedError) as info:
        ranks.run(function, size, *args, **options)
    return str(info.value), time.monotonic() - began


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_the_order_of_ranks(ranks, size):
    told = ranks.run(place_of, size)
    assert [row[:3] for row in told] == [(rank, rank, size) for rank in range(size)]
    assert len({row[3] for row in told}) == size


def test_arguments_and_results_are_what_was_sent(ranks):
    assert ranks.run(doubled, 2, Answer(20)) == [Answer(40), Answer(41)]
    assert ranks.run(many_bytes, 2, 5_000_000) == [bytes(5_000_000), b"\1" * 5_000_000]


def test_variables_are_set_and_taken_away(ranks):
    assert ranks.run(environment, 2, environ={"SET_HERE": "x", "HOME": None}) == [("x", None, "lo")] * 2
    assert ranks.run(environment, 1)[0][0] is None


def test_exception_of_a_rank_is_told_with_the_stacks_of_the_others(ranks):
    text, seconds = failed(ranks, raises_on, 1, grace=0.5)
    assert "planted on 1" in text and "test_ranks.py" in text
    assert "rank0, exit code -9" in text and "in raises_on" in text and "waiting for a rank that raised" in text
    assert seconds < 20


def test_hang_is_told_with_the_stacks_of_all_ranks_and_ends(ranks):
    job = ranks.start(hangs, 3, timeout=1.0)
    with pytest.raises(RanksFailedError, match="the_place_where_it_hangs") as info:
        job.results()
    assert "rank1, exit code -9" in str(info.value) and "rank2, exit code 0" in str(info.value)
    assert job.ended.late and job.ended.left == []
    for pid in job.pids:
        assert not Path(f"/proc/{pid}").exists()
    ranks.finish(job)
    assert not job.folder.exists()
    assert ranks.run(place_of, 2)[1][0] == 1, "the server goes on"


def test_stopped_rank_is_woken_for_its_stacks_and_told_to_have_been_stopped(ranks):
    text, _ = failed(ranks, stops_itself, timeout=1.0)
    assert "stopped by a signal" in text and "in stops_itself" in text


def test_rank_that_is_killed_is_told(ranks):
    text, _ = failed(ranks, killed)
    assert "rank0, exit code -9" in text and "rank1, exit code 0" in text


def test_signal_from_the_test_reaches_its_rank(ranks):
    job = ranks.start(hangs, 2, grace=0.2)
    assert job.signal("rank1", signal.SIGTERM)
    ended = job.wait()
    assert ended.codes == [0, -signal.SIGTERM] and not ended.late and job.outcome(0) == ("value", 0)
    ranks.finish(job)


def test_process_that_a_rank_leaves_behind_is_killed_and_told(ranks):
    text, _ = failed(ranks, leaves_a_child)
    assert "left behind" in text


def test_job_that_nobody_waits_for_is_killed(ranks):
    job = ranks.start(hangs, 2)
    ranks.finish(job)
    assert job.ended.late and job.ended.codes[1] == -signal.SIGKILL


def test_ranks_find_each_other(ranks):
    # The socket of our launcher is not torch's way: rank 0 opens its own.
    for _ in range(2):
        assert ranks.run(summed, 2, environ={"MASTER_PORT": str(free_port())}) == [[1, 3, 5]] * 2


def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_no_test_starts_ranks_by_other_means():
    """The time limit, the stacks and the clearing away are in the pool."""
    for path in sorted(TESTS.rglob("*.py")):
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        banned = {"torch.multiprocessing", "multiprocessing.Process", "multiprocessing.spawn"} & names
        assert not banned, f"{path.relative_to(ROOT)}: {banned}"
