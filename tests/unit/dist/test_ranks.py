"""The world of a rank: who tells of a failure, what it is called on each rank, and that nobody is left waiting for one that ends."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool
from torch.nn.parallel import DistributedDataParallel

from llmtrain.config.errors import ExitCode, OutOfMemoryError, PeerError, Problem, StoppedError, exit_code_of
from llmtrain.dist import ranks as ranks_module
from llmtrain.dist import watch
from llmtrain.dist.failure import Failure, is_told, reason_of_run
from llmtrain.dist.ranks import World, join_world
from llmtrain.dist.verdict import read_run

pytestmark = pytest.mark.timeout(90)

SCREEN = " of 2 (host "
LONG = 40.0


@contextmanager
def joined(place: Any, timeout_seconds: float = LONG) -> Any:
    with join_world(place, timeout_seconds=timeout_seconds, stop_received=lambda: None) as world:
        yield world


def keep(folder: str, name: str, value: Any) -> None:
    (Path(folder) / name).write_text(json.dumps(value))


def kept(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def ended(ranks: RankPool, function: Callable[..., Any], *args: Any, launched: bool = False) -> tuple[list[int], list[str]]:
    """Exit codes and what stands on the terminals, by rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environ = None if launched else {"MASTER_PORT": str(port)}
    job = ranks.start(function, 2, *args, launched=launched, environ=environ, grace=20.0)
    try:
        end = job.wait()
        assert not end.late, job.told()
        return end.codes, [(job.folder / f"rank{rank}.out").read_text() for rank in range(2)]
    finally:
        ranks.finish(job)


# A rank that cannot come back from where it stands.


def stuck_while_another_fails(place: Any, folder: str) -> None:
    """As with NCCL: the end of a rank does not break the collective that the other one waits in."""
    watch.FAILED_SECONDS = 1.0
    with joined(place) as world:
        world.on_loss = lambda failure: keep(folder, f"loss{place.rank}", [failure.code, reason_of_run(failure)])
        world.position.at_step(3)
        if place.rank == 1:
            time.sleep(0.5)
            try:
                with world.failures():
                    raise OutOfMemoryError(Problem("too large", "a rule"))
            except OutOfMemoryError as error:
                os._exit(exit_code_of(error))
        time.sleep(LONG)


def test_a_stuck_rank_0_ends_with_the_code_of_the_cause_and_keeps_it(ranks: RankPool, tmp_path: Path) -> None:
    codes, told = ended(ranks, stuck_while_another_fails, str(tmp_path))
    assert codes == [ExitCode.OUT_OF_MEMORY, ExitCode.OUT_OF_MEMORY]
    assert kept(tmp_path, "loss0") == [78, "rank 1: failed in phase start of step 3: too large"]
    assert not (tmp_path / "loss1").exists()
    assert "too large" in told[1] and told[0] == "", "its reporter has told it"


def one_does_not_connect(place: Any, folder: str, absent: int) -> None:
    with joined(place, 2.0) as world:
        world.on_loss = lambda failure: keep(folder, f"loss{place.rank}", reason_of_run(failure))
        world.meeting.gather("ready", None)
        world.position.enter("model" if place.rank == absent else "connect")
        if place.rank == absent:
            time.sleep(LONG)
        world.connect("cpu")


@pytest.mark.parametrize("absent", [0, 1])
def test_b54_a_rank_that_hangs_before_the_group_is_made_is_named(ranks: RankPool, tmp_path: Path, absent: int) -> None:
    """The others wait within torch, on the main thread's connection to the store."""
    codes, told = ended(ranks, one_does_not_connect, str(tmp_path), absent)
    assert codes == [ExitCode.LOST, ExitCode.LOST]
    assert f"rank {absent}{SCREEN}" in told[0] and f"rank {absent} is behind" in told[0] and told[1] == ""
    assert kept(tmp_path, "loss0") == f"rank {absent}: stands still in phase model, before step 1"


# A rank that fails.


def one_fails(place: Any, folder: str, failing: int) -> None:
    ranks_module.LEAVE_SECONDS = 10.0
    seconds = None
    try:
        with joined(place) as world:
            world.connect("cpu")
            group = world.collectives.group
            model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group, init_sync=False)
            model(torch.ones(1, 2)).sum().backward()
            if place.rank == failing:
                time.sleep(0.5)
                keep(folder, "failed", time.time())
                raise OutOfMemoryError(Problem("too large", "a rule"))
            try:
                world.collectives.sum_counts([1])
            finally:
                seconds = time.time() - kept(Path(folder), "failed")
    except (OutOfMemoryError, PeerError) as error:
        keep(folder, f"end{place.rank}", [str(error), int(exit_code_of(error)), seconds])
        # Python still holds all that holds the group.
        time.sleep(4.0)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("launched", [False, True])
def test_b54_nobody_waits_for_a_rank_that_has_failed(ranks: RankPool, tmp_path: Path, failing: int, launched: bool) -> None:
    ended(ranks, one_fails, str(tmp_path), failing, launched=launched)
    said, code, seconds = kept(tmp_path, f"end{1 - failing}")
    assert code == ExitCode.OUT_OF_MEMORY and said.startswith(f"error: rank {failing}: failed in phase start")
    assert seconds < 3.0


# Who says so.

ERRORS: dict[str, BaseException] = {
    "crash": RuntimeError("odd"),
    "message": OutOfMemoryError(Problem("too large", "a rule")),
    "stop": StoppedError(Problem("stopped by SIGTERM", "a rule")),
    "interruption": KeyboardInterrupt(),
}


def fails(place: Any, folder: str, failing: list[int], error: str, moved: bool) -> None:
    try:
        with joined(place) as world:
            if moved:
                world.terminal = open(f"{folder}/terminal{place.rank}", "w")
            world.meeting.gather("ready", None)
            if place.rank in failing:
                raise ERRORS[error]
            world.meeting.gather("never", None)
    except BaseException as end:
        keep(folder, f"end{place.rank}", [type(end).__name__, is_told(end), int(exit_code_of(end))])


def marks(folder: Path) -> list[tuple[str, bool]]:
    return [tuple(kept(folder, f"end{rank}")[:2]) for rank in range(2)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_crash_is_shown_with_the_line_that_says_whose_fault_it_is_and_marked(
    ranks: RankPool, tmp_path: Path, failing: int
) -> None:
    _, told = ended(ranks, fails, str(tmp_path), [failing], "crash", False)
    assert marks(tmp_path)[failing] == ("RuntimeError", True)
    assert told[failing].count("Traceback") == 1 and "a fault of llmtrain" in told[failing] and told[1 - failing] == ""


def test_a_message_of_rank_0_is_left_to_the_command_line_and_that_of_another_is_not(ranks: RankPool, tmp_path: Path) -> None:
    _, told = ended(ranks, fails, str(tmp_path), [0], "message", False)
    assert marks(tmp_path) == [("OutOfMemoryError", False), ("PeerError", False)] and told == ["", ""]
    _, told = ended(ranks, fails, str(tmp_path), [1], "message", False)
    assert marks(tmp_path)[1] == ("OutOfMemoryError", True) and told[1].count("too large") == 1


def test_what_fails_on_all_ranks_alike_is_told_by_one(ranks: RankPool, tmp_path: Path) -> None:
    _, told = ended(ranks, fails, str(tmp_path), [0, 1], "crash", False)
    assert marks(tmp_path) == [("RuntimeError", True)] * 2 and "".join(told).count(SCREEN) == 1


def test_a_log_gets_its_traceback_where_the_screen_goes_to_the_terminal(ranks: RankPool, tmp_path: Path) -> None:
    _, told = ended(ranks, fails, str(tmp_path), [1], "crash", True)
    assert marks(tmp_path)[1] == ("RuntimeError", False) and told[1] == ""
    assert f"rank 1{SCREEN}" in (tmp_path / "terminal1").read_text()


@pytest.mark.parametrize(
    "error, said, code",
    [("stop", "stopped by SIGTERM", ExitCode.REQUEUE), ("interruption", "interrupted", ExitCode.INTERRUPTED)],
)
def test_a_stop_is_one_line_and_no_failure(ranks: RankPool, tmp_path: Path, error: str, said: str, code: ExitCode) -> None:
    _, told = ended(ranks, fails, str(tmp_path), [1], error, False)
    assert told == ["", f"rank 1: {said}\n"]
    assert [kept(tmp_path, f"end{rank}")[2] for rank in range(2)] == [code, code] and marks(tmp_path)[1][1]


# What the launcher reads.


def leaves_word(place: Any) -> Any:
    with joined(place) as world:
        world.leave_word({"folder": "/runs/x", "resume": f"by rank {place.rank}"})
        world.meeting.gather("left", None)
        found = read_run(place.report_folder)
        assert found is not None
        return str(found.folder), found.resume, sorted(file.name for file in place.report_folder.glob("*.part"))


def test_the_word_for_the_launcher_is_rank_0s_and_whole(ranks: RankPool) -> None:
    assert ranks.run(leaves_word, 2) == [("/runs/x", "by rank 0", [])] * 2


def test_one_rank_opens_nothing_and_lets_errors_through() -> None:
    from llmtrain.dist.world import LaunchFacts

    with pytest.raises(KeyError) as caught, join_world(LaunchFacts(0, 0, 1, "one process"), **_alone()) as world:
        assert type(world) is World and world.terminal is sys.stderr
        with world.failures():
            raise KeyError("odd")
    assert not is_told(caught.value)


def _alone() -> dict[str, Any]:
    return {"timeout_seconds": 1.0, "stop_received": lambda: None}


def test_a_failure_that_its_reporter_has_told_is_not_told_again(ranks: RankPool, tmp_path: Path) -> None:
    """The watch also ends a rank that is stuck at its own end."""
    codes, told = ended(ranks, ends_by_its_own_failure)
    assert codes[1] == ExitCode.DATA and told[1] == ""


def ends_by_its_own_failure(place: Any) -> None:
    with joined(place) as world:
        if place.rank == 1:
            failure = Failure(1, "here", os.getpid(), "data", 0, 0, "error", 65, "error: no text", 1)
            world._end_because(failure)
        os._exit(0)
