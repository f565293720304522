"""Who sees an option of several ranks at work: each function runs something small and returns what can be compared."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.observers import BASE, Place, refusal, update
from helpers.rank_faults import AtPlace
from helpers.rank_jobs import train_rank
from helpers.ranks import RankPool
from helpers.runs import run_words
from torch.nn.parallel import DistributedDataParallel

from llmtrain.cli import sweep
from llmtrain.cli.dispatch import dispatch
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ExitCode
from llmtrain.data.corpus import build_corpus
from llmtrain.dist.collectives import GroupCollectives
from llmtrain.dist.position import Position
from llmtrain.metrics.memory import NoLedger
from llmtrain.parallel import data
from llmtrain.plan.make_plan import make_plan
from llmtrain.train import engine_native
from llmtrain.train.assemble import build_engine
from llmtrain.train.machine import detect_machine

PAUSE_SECONDS = 6.0
SHORT = ("train.steps=1", "generate.max_tokens=2")


@dataclass(frozen=True)
class RankPlace(Place):
    """Where a row works that needs several ranks."""

    ranks: RankPool


def degrees(place: Place, *words: str) -> Any:
    """Ranks along each axis, or why they do not fit one process."""

    def settle(*more: str) -> Any:
        config = compose_config(place.words(*more)).config
        return make_plan(config, detect_machine(config.launch), vocab_size=300).degrees

    return refusal(settle, *words) or settle(*words)


def buckets(place: Place, *words: str) -> Any:
    """How gradients travel: of each call its size, its dtype and how many gradients were there by then; where gradients lie; and
    whether torch is told that the graph never changes.

    On a group of one rank, which cuts and sends buckets as a larger one does.
    """
    config = compose_config(place.words("accumulation.micro_batch_size=2", *words)).config
    corpus = build_corpus(config.data, config.tokenizer, seed=0, vocab_size=None, progress=lambda text: None)
    plan = make_plan(config, detect_machine(config.launch), vocab_size=corpus.tokenizer.vocab_size)
    sent: list[Any] = []
    homes: list[int] = []
    made: list[int] = []
    told: dict[str, Any] = {}
    plain_send, plain_norm = GroupCollectives.average_bucket, engine_native.global_norm

    def send(self: GroupCollectives, tensor: torch.Tensor, finish: Any) -> Any:
        sent.append((tensor.numel(), str(tensor.dtype), len(made)))
        return plain_send(self, tensor, finish)

    def norm(gradients: Any) -> torch.Tensor:
        homes.append(len({gradient.untyped_storage().data_ptr() for gradient in gradients}))
        sent.append("update")
        return plain_norm(gradients)

    def wrapped(module: Any, **options: Any) -> Any:
        told.update(options)
        return DistributedDataParallel(module, **options)

    with one_rank_group() as collectives, pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "DistributedDataParallel", functools.wraps(DistributedDataParallel)(wrapped))
        patch.setattr(GroupCollectives, "average_bucket", send)
        patch.setattr(engine_native, "global_norm", norm)
        world: Any = SimpleNamespace(collectives=collectives, position=Position())
        engine = build_engine(config, plan, NoLedger(), world)
        for parameter in engine.model.parameters():
            parameter.register_hook(lambda gradient: made.append(gradient.numel()))
        engine.warm_up(corpus.train.batch(0, 2))
        sent.clear()
        for number in (1, 2):
            made.clear()
            update(engine, corpus, plan, number)
    return sent, homes, told["static_graph"]


@contextlib.contextmanager
def one_rank_group() -> Iterator[GroupCollectives]:
    """Collectives over a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield GroupCollectives(group, Position(), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


SHARED = "accumulation.micro_batch_size=2"
"""Half of an update, for two ranks."""


def launched(place: Place, *words: str) -> Any:
    """A whole command in a process of its own: which ranks kept a log, and whether their Python tells what it imports."""
    name = f"run-{len(list(place.runs.iterdir()))}"
    command = [sys.executable, "-m", "llmtrain", *run_words(place.text, place.runs, name, *BASE, *SHORT, SHARED, *words)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    logs = sorted(path.name for path in (place.runs / name / "logs").iterdir())
    return logs, "import time:" in ended.stderr


@dataclass(frozen=True)
class Pause(AtPlace):
    """A rank does nothing for a while."""

    def act(self) -> None:
        time.sleep(PAUSE_SECONDS)


def outlives_a_pause(place: Place, *words: str) -> Any:
    """The exit codes of two ranks of which one does nothing for some seconds."""
    assert isinstance(place, RankPlace)
    name = f"run-{len(list(place.runs.iterdir()))}"
    words = run_words(place.text, place.runs, name, *BASE, SHARED, *words)
    job = place.ranks.start(train_rank, 2, words, (Pause(1, "forward", step=2),), timeout=90.0)
    try:
        codes = job.wait().codes
        assert set(codes) <= {ExitCode.DONE, ExitCode.LOST}, job.told()
        return codes
    finally:
        place.ranks.finish(job)


def swept(place: Place, *words: str) -> Any:
    """Of a sweep over three values: how many jobs ran at once, how many were started, and which trained in this process."""
    running: set[int] = set()
    most = started = 0

    class Job:
        """Ends without a result when it has been asked three times."""

        def __init__(self, number: int) -> None:
            self.pid, self._polls = number, 0

        def poll(self) -> int | None:
            self._polls += 1
            if self._polls <= 3:
                return None
            running.discard(self.pid)
            return 70

        def send_signal(self, sig: int) -> None:
            pass

    def start(command: Any, log: Path, environment: Any) -> Job:
        nonlocal most, started
        started += 1
        log.touch()
        running.add(started)
        most = max(most, len(running))
        return Job(started)

    name = f"sweep-{len(list(place.runs.iterdir()))}"
    line = run_words(place.text, place.runs, name, *BASE, *SHORT, *words, "train.steps=1,2,3")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(sweep, "start_process", start)
        dispatch(["-m", *line])
    lengths = [json.loads(path.read_text().splitlines()[-1])["step"] for path in (place.runs / name).glob("*/metrics.jsonl")]
    return most, started, lengths
