"""The process behind `helpers.ranks`: it imports torch once and forks ranks on request; it computes nothing and has one thread.

A request names a function by file and name; every rank calls it as `function(place, *args)` and leaves its result in the folder of
the job. All that a job starts, also processes whose parents have died, are descendants of this server, and none outlives its job.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36
SHOW_STACKS = signal.SIGRTMIN + 3
"""Makes a rank write the stacks of all its threads, even while it waits inside a library; used by nothing in llmtrain."""
STACKS_SECONDS = 2.0
"""How long a rank may take to write its stacks."""


@dataclass(frozen=True)
class Request:
    """What the ranks of one job do."""

    file: str
    module: str
    function: str
    args: bytes
    """Pickled; read in the rank once the module is there."""
    size: int
    folder: Path
    name: str
    """Of a process, with its number among `size` where there are several: `rank` makes rank0, rank1, …"""
    timeout: float
    """Seconds after which the ranks are made to show their stacks and killed."""
    grace: float
    """Seconds that the others may take once a rank has failed."""
    settle: float
    """Seconds that processes started by ranks may live on after these."""
    launched: bool = True
    """Whether ranks find what the launcher of llmtrain gives; else only what any script gives that starts ranks."""
    environ: dict[str, str | None] = field(default_factory=dict)
    """Set in every rank after the launch variables; None takes a variable away."""


@dataclass(frozen=True)
class Ended:
    """How the processes of a job ended."""

    codes: list[int]
    """Exit codes by rank; -n where signal n ended it."""
    seconds: list[float]
    """From the start of the job to the end of each rank."""
    late: bool
    """The time limit, or the grace after the first failure, was over and what still ran was killed."""
    left: list[str]
    """Processes that were still there when all ranks had ended and had to be killed."""


JOB: dict[str, Any] = {}
"""In a rank: `folder` of its job and `name` of this process."""


def serve(descriptor: int) -> None:
    """Carry out one request after the other until the other side closes."""
    line = Connection(descriptor)
    die_with_parent(signal.SIGKILL)
    _prctl(SET_CHILD_SUBREAPER, 1)
    _import_what_ranks_need()
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a process that forks has one thread"
    line.send("ready")
    while True:
        try:
            request = line.recv()
        except EOFError:
            return
        if isinstance(request, Request):  # else it is the end of a job that has ended already
            line.send(_carry_out(request, line))


def _import_what_ranks_need() -> None:
    import pytest  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401  # optimizers import it in their first step
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

    torch.set_num_threads(1)
    # What cannot be imported is told by the rank that needs it.
    with suppress(Exception):
        import llmtrain.cli.train
        import llmtrain.train.build  # noqa: F401


def _carry_out(request: Request, line: Connection) -> Ended:
    began = time.monotonic()
    listener = socket.create_server(("127.0.0.1", 0)) if request.size > 1 and request.launched else None
    children = {}
    for rank in range(request.size):
        child = os.fork()
        if child == 0:
            line.close()
            _run_rank(request, rank, listener)
        children[child] = rank
    if listener is not None:
        listener.close()
    line.send(list(children))
    statuses, seconds, late = _wait(children, request, line, began)
    left = _clear_away(request.settle, statuses)
    codes = [os.waitstatus_to_exitcode(statuses[pid]) for pid in children]
    return Ended(codes, [seconds.get(pid, time.monotonic() - began) for pid in children], late, left)


def _wait(
    children: dict[int, int], request: Request, line: Connection, began: float
) -> tuple[dict[int, int], dict[int, float], bool]:
    """Status and time of the end of each rank; kills those that are late."""
    deadline = began + request.timeout
    statuses: dict[int, int] = {}
    seconds: dict[int, float] = {}
    show = True
    ends = {os.pidfd_open(pid): pid for pid in children}
    poller = select.poll()
    for descriptor in (*ends, line.fileno()):
        poller.register(descriptor, select.POLLIN)
    while len(statuses) < len(children):
        ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for descriptor, _ in ready:
            poller.unregister(descriptor)
            if descriptor == line.fileno():
                deadline, show = 0.0, line.recv() == "show"
                continue
            pid = ends[descriptor]
            statuses[pid] = os.waitpid(pid, 0)[1]
            seconds[pid] = time.monotonic() - began
            if statuses[pid] != 0:
                deadline = min(deadline, time.monotonic() + request.grace)
        if time.monotonic() >= deadline:
            break
    for descriptor in ends:
        os.close(descriptor)
    late = len(statuses) < len(children)
    if late:
        if show:
            show_stacks(request.folder)
        for pid in set(children) - set(statuses):
            os.kill(pid, signal.SIGKILL)
            statuses[pid] = os.waitpid(pid, 0)[1]
    return statuses, seconds, late


def show_stacks(folder: Path) -> None:
    """Have every process below this one write its stacks; those that are stopped are woken for it, after a note that they were."""
    asked = []
    for pid, state in descendants().items():
        name = (folder / f"{pid}.name").read_text() if (folder / f"{pid}.name").exists() else None
        if name is None or state == "Z":
            continue
        if state in "tT":
            (folder / f"{name}.stacks").write_text("stopped by a signal\n")
        os.kill(pid, SHOW_STACKS)
        os.kill(pid, signal.SIGCONT)
        asked.append(folder / f"{name}.stacks")
    deadline = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < deadline and not all(path.exists() and path.stat().st_size for path in asked):
        time.sleep(0.02)
    time.sleep(0.1)


def _clear_away(settle: float, statuses: dict[int, int]) -> list[str]:
    """Wait for what ranks have left behind, kill it after a while, and tell what that was."""
    deadline = time.monotonic() + settle
    left: list[str] = []
    while True:
        _reap(statuses)
        living = descendants()
        if not living:
            return left
        if time.monotonic() >= deadline:
            for pid in living:
                told = f"{pid}: {_command(pid)}"
                left += [told] if told not in left else []
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _reap(statuses: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        statuses.setdefault(pid, status)


def descendants() -> dict[int, str]:
    """Processes below this one and the letter of the state of each."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                # The name in brackets may hold blanks and brackets itself.
                state, parent, *_ = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry)] = (int(parent), state)
    found: dict[int, str] = {}
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, (parent, _) in parents.items() if parent in generation}
        found |= {pid: parents[pid][1] for pid in generation}
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:200]
    except OSError:
        return "gone"


def _run_rank(request: Request, rank: int, listener: socket.socket | None) -> NoReturn:
    """What a forked rank does; never returns into the loop of the server.

    Raises:
        SystemExit: from the function, for the interpreter to end with as that of a program does.
    """
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        os.setpgid(0, 0)
        name = process_name(request.name, rank)
        begin_process(request.folder, name)
        _set_environment(request, rank, listener)
        try:
            from llmtrain.dist.world import read_launch

            place = read_launch(os.environ, None)
            value = load_function(request)(place, *pickle.loads(request.args))
            content = pickle.dumps(("value", value))
            code = 0
        except SystemExit:
            raise
        except BaseException:
            content = pickle.dumps(("error", traceback.format_exc()))
        path = request.folder / f"{name}.result"
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").rename(path)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
    end_process(code)


def process_name(name: str, number: int) -> str:
    """How a process of a job is called in its files."""
    return f"rank{number}" if name == "rank" else name


def end_process(code: int) -> NoReturn:
    """End a forked process without the exit handlers of the one it was forked from."""
    for stream in (sys.stdout, sys.stderr):
        # What a test has closed, or a full disk refuses, was said to nobody who still reads it.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def begin_process(folder: Path, name: str) -> None:
    """What a process of a job begins with: an output of its own, and what `name_process` does."""
    output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name_process(folder, name)


def name_process(folder: Path, name: str) -> None:
    """Give this process a name in its job, and a way to show its stacks."""
    JOB.update(folder=folder, name=name)
    faulthandler.register(SHOW_STACKS, file=(folder / f"{name}.stacks").open("a"), all_threads=True, chain=False)
    # Renamed into place: whoever sees the file sees all of it.
    for path, text in ((folder / f"{os.getpid()}.name", name), (folder / f"{name}.pid", str(os.getpid()))):
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)


def _set_environment(request: Request, rank: int, listener: socket.socket | None) -> None:
    """The variables that say which rank this is, and those of the launcher of llmtrain; none for a single process."""
    if request.size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(request.size),
            "LOCAL_WORLD_SIZE": str(request.size),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    if listener is not None:
        reports = request.folder / "reports"
        reports.mkdir(exist_ok=True)
        os.environ |= {
            "MASTER_PORT": str(listener.getsockname()[1]),
            "LLMTRAIN_RUN_ID": request.folder.name,
            "LLMTRAIN_LAUNCHER": str(os.getppid()),
            "LLMTRAIN_REPORTS": str(reports),
        }
        if rank == 0:
            os.environ["LLMTRAIN_LISTEN_FD"] = str(listener.detach())
        else:
            listener.close()
    for name, value in request.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def load_function(request: Request) -> Callable[..., Any]:
    """The function a request names; its module gets the name it has in the test process, so that its classes can be pickled."""
    module = sys.modules.get(request.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(request.module, request.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[request.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in request.function.split("."):
        found = getattr(found, part)
    return found


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _prctl(SET_PARENT_DEATH_SIGNAL, number)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
