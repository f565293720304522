"""Processes that tokenize side by side, and what becomes of them when something goes wrong.

Each is a fresh interpreter that runs `worker.py`, not a copy of this process: it inherits no locks, threads or CUDA context, and nothing
of the caller's main module runs a second time, as it would under `multiprocessing`. A pipe to each is all that holds them: when this
process ends, however it ends, they notice and end too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, cast

from llmtrain.config.errors import DataError, Problem
from llmtrain.data.shards import ShardSettings, make_shard
from llmtrain.data.units import WorkUnit
from llmtrain.data.worker import Done, Failed, Progress, Task

SMALL_TEXT_BYTES = 4 << 20
"""Text below this is tokenized before a second process would have started."""
ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The processes are the parallelism; threads of libraries inside them would only be in each other's way."""
_COMMAND = "from llmtrain.data.worker import main; main()"

Report = Callable[[int, Progress, bool], None]
"""Gets the number of a unit, how far it has come (also when it begins), and whether that is its end."""


def choose_workers(wanted: int | None, source_bytes: int, num_units: int) -> int:
    """Processes to use: `prepare.workers`, else one per core this process may use; never more than there are units."""
    if wanted is None:
        # Imported here: it brings torch, which workers do without.
        from llmtrain.dist.devices import available_cores

        wanted = 1 if source_bytes < SMALL_TEXT_BYTES else available_cores()
    return max(1, min(wanted, num_units))


def make_shards(settings: ShardSettings, units: Sequence[WorkUnit], num_workers: int, report: Report) -> list[dict[str, Any]]:
    """Tokenize every unit whose shard is not there yet; the descriptions of all shards in order.

    Raises:
        DataError: text at fault, or a worker that was killed.
        OSError: a shard cannot be written.
    """
    if num_workers == 1:
        return [_make_here(settings, index, unit, report) for index, unit in enumerate(units)]
    with _started(num_workers, settings) as workers:
        return _hand_out(workers, units, report)


def _make_here(settings: ShardSettings, index: int, unit: WorkUnit, report: Report) -> dict[str, Any]:
    last = Progress(0, 0)
    report(index, last, False)

    def note(source_bytes: int, tokens: int) -> None:
        nonlocal last
        last = Progress(source_bytes, tokens)
        report(index, last, False)

    description = make_shard(settings, index, unit, note)
    report(index, last, True)
    return description


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    errors: IO[bytes]
    task: Task | None = None


@contextmanager
def _started(count: int, settings: ShardSettings) -> Iterator[list[_Worker]]:
    """Workers that know how to work; none is left at the end, whatever happened."""
    workers: list[_Worker] = []
    stored = settings.tokenizer.to_json()
    try:
        for _ in range(count):
            workers.append(_start())
        for worker in workers:
            _send(worker, (stored, replace(settings, tokenizer=cast(Any, None))))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            worker.connection.close()
            worker.errors.close()


def _start() -> _Worker:
    ours, theirs = Pipe()
    errors = tempfile.TemporaryFile()
    # Modules are looked for where this process looks for them; `-P` keeps the working folder out of it.
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    finally:
        theirs.close()
    return _Worker(process, cast(Connection, ours), errors)


def _hand_out(workers: list[_Worker], units: Sequence[WorkUnit], report: Report) -> list[dict[str, Any]]:
    waiting = iter(enumerate(units))
    found: dict[int, dict[str, Any]] = {}
    by_connection = {worker.connection: worker for worker in workers}
    for worker in workers:
        _give(worker, next(waiting, None), report)
    while len(found) < len(units):
        for connection in wait([worker.connection for worker in workers if worker.task is not None]):
            worker = by_connection[cast(Connection, connection)]
            message, task = _receive(worker), worker.task
            assert task is not None
            if isinstance(message, Failed):
                raise _failure(message)
            if isinstance(message, Progress):
                report(task.index, message, False)
                continue
            report(task.index, message.progress, True)
            found[task.index] = message.description
            _give(worker, next(waiting, None), report)
    return [found[index] for index in range(len(units))]


def _give(worker: _Worker, next_unit: tuple[int, WorkUnit] | None, report: Report) -> None:
    worker.task = None if next_unit is None else Task(*next_unit)
    if worker.task is not None:
        _send(worker, worker.task)
        report(worker.task.index, Progress(0, 0), False)


def _send(worker: _Worker, message: Any) -> None:
    try:
        worker.connection.send(message)
    except OSError as error:
        raise _death(worker) from error


def _receive(worker: _Worker) -> Done | Failed | Progress:
    try:
        return cast(Done | Failed | Progress, worker.connection.recv())
    except (EOFError, OSError) as error:
        raise _death(worker) from error


def _failure(message: Failed) -> Exception:
    if message.kind is not None:
        return message.kind(*message.problems)
    return message.error or RuntimeError(f"a worker process failed:\n{message.trace}")


def _death(worker: _Worker) -> DataError:
    """A worker is gone: which unit it had, how it ended, and how to go on."""
    code = worker.process.wait()
    worker.errors.seek(0)
    last_words = worker.errors.read().decode(errors="replace").strip().splitlines()[-1:]
    how = f"exit code {code}"
    if code < 0:
        hint = ": the system may have run out of memory" if -code == signal.SIGKILL else ""
        how = f"killed by {signal.Signals(-code).name} (exit code {128 - code}){hint}"
    where = "before its first unit" if worker.task is None else f"in unit {worker.task.index}: {worker.task.unit.place}"
    return DataError(
        Problem(
            f"a worker process ended {where}",
            "; ".join([how, *last_words]),
            "the same command goes on from the finished shards; with less memory: prepare.workers=1",
        )
    )
