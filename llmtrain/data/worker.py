"""A process that tokenizes units of text: `python -c "…main()" DESCRIPTOR`, started by `workers.py`.

Imports no torch: a worker is there within a fraction of a second and takes little memory. A thread waits for the next unit; when the
other end of the connection is closed, because the preparation ended or was killed, it ends the process at once.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from llmtrain.config.errors import LlmtrainError, Problem
from llmtrain.data.shards import ShardSettings, make_shard
from llmtrain.data.tokenizer import load_tokenizer
from llmtrain.data.units import WorkUnit

REPORT_SECONDS = 0.2


@dataclass(frozen=True)
class Task:
    """A unit to tokenize."""

    index: int
    unit: WorkUnit


@dataclass(frozen=True)
class Progress:
    """How far a worker has come with its unit."""

    source_bytes: int
    """UTF-8 bytes tokenized."""
    tokens: int


@dataclass(frozen=True)
class Done:
    """A shard is on the disk."""

    description: dict[str, Any]
    progress: Progress


@dataclass(frozen=True)
class Failed:
    """What went wrong with a unit, in a form that survives the way to another process."""

    kind: type[LlmtrainError] | None
    """None = an OSError, or a fault of ours."""
    problems: tuple[Problem, ...]
    error: OSError | None
    trace: str


def main() -> None:
    """Work until the connection closes; its descriptor is the first argument, its first message says how to work."""
    # Ctrl-C reaches every process of the terminal, a scheduler may signal all of a job: the one that started this one decides what
    # it means, and when it ends this one does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection: Connection = Connection(int(sys.argv[1]))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    stored, settings = inbox.get()
    settings = replace(settings, tokenizer=load_tokenizer(stored))
    while True:
        connection.send(_work(settings, inbox.get(), connection))


def _receive(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _work(settings: ShardSettings, task: Task, connection: Connection) -> Done | Failed:
    last = Progress(0, 0)
    sent = time.monotonic()

    def report(source_bytes: int, tokens: int) -> None:
        nonlocal last, sent
        last = Progress(source_bytes, tokens)
        if time.monotonic() - sent >= REPORT_SECONDS:
            connection.send(last)
            sent = time.monotonic()

    try:
        return Done(make_shard(settings, task.index, task.unit, report), last)
    except LlmtrainError as error:
        return Failed(type(error), error.problems, None, "")
    except OSError as error:
        return Failed(None, (), error, "")
    except Exception:
        return Failed(None, (), None, traceback.format_exc())
