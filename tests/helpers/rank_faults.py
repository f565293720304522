"""Faults planted into a rank by changing functions of llmtrain inside its process; llmtrain itself knows of none of them."""

from __future__ import annotations

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.rank_server import JOB

from llmtrain.config.errors import Problem, StorageError


@dataclass(frozen=True)
class AtPlace(ABC):
    """Something that happens once on one rank, at a place of update `step`; 0 = the first time that it comes there.

    The place `begin` is before the first own line of the rank.
    """

    rank: int
    place: str
    step: int = field(default=3, kw_only=True)

    @abstractmethod
    def act(self) -> None:
        """What happens."""

    def install(self, rank: int) -> None:
        if rank != self.rank:
            return
        if self.place == "begin":
            self.act()
            return
        from llmtrain.checkpoint.store import CheckpointStore
        from llmtrain.data.loader import TokenLoader, ValidationLoader
        from llmtrain.metrics.sinks import JsonlSink
        from llmtrain.metrics.trackers import Trackers
        from llmtrain.model.transformer import Transformer
        from llmtrain.train import build, trainer
        from llmtrain.train.engine_native import NativeEngine

        where: dict[str, list[tuple[Any, str]]] = {
            "start-up": [(build, "build_corpus")],
            "batch": [(TokenLoader, "batch")],
            "forward": [(Transformer, "forward")],
            "backward": [(torch.Tensor, "backward")],
            "evaluate": [(ValidationLoader, "batches")],
            "save": [(CheckpointStore, "save"), (trainer.NoSaver, "save")],
            "complete": [(JsonlSink, "replace_last")],
            "track": [(Trackers, "log")],
        }
        fuse = _Fuse(self.act, is_armed=self.step == 0)
        for owner, name in where[self.place]:
            setattr(owner, name, fuse.before(getattr(owner, name)))
        plain = NativeEngine.train_step
        # The batch of an update is read after the update before.
        armed_in = self.step - 1 if self.place == "batch" else self.step

        def train_step(engine: Any, update: int, *args: Any, **kwargs: Any) -> Any:
            fuse.is_armed |= update == armed_in
            return plain(engine, update, *args, **kwargs)

        NativeEngine.train_step = train_step  # type: ignore[method-assign]


class _Fuse:
    """Acts once, at the first call after it was armed."""

    def __init__(self, act: Callable[[], None], *, is_armed: bool) -> None:
        self._act = act
        self._is_spent = False
        self.is_armed = is_armed

    def before(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_armed and not self._is_spent:
                self._is_spent = True
                self._act()
            return plain(*args, **kwargs)

        return call


@dataclass(frozen=True)
class Fault(AtPlace):
    """A rank raises, refuses with a message, hangs, is stopped or is killed."""

    kind: str
    after: float = field(default=0.0, kw_only=True)
    """Seconds that the rank is at the place before: longer than a beat, and the others know that it is there."""

    def act(self) -> None:
        time.sleep(self.after)
        planted(self.kind, self.rank)


def planted(kind: str, rank: int) -> None:
    """The fault itself; the name of this function is to be found in the stacks."""
    if kind == "raise":
        raise RuntimeError(f"planted on rank {rank}")
    if kind == "refuse":
        raise StorageError(Problem(f"planted on rank {rank}", "a rule"))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        time.sleep(3600)


@dataclass(frozen=True)
class SignalAt(AtPlace):
    """A signal to this rank, to the launcher, to all ranks, or to every process of the job, as this rank comes to the place."""

    number: int
    target: str

    def act(self) -> None:
        pids = {path.stem: int(path.read_text()) for path in JOB["folder"].glob("*.pid")}
        ranks = [pid for name, pid in pids.items() if name.startswith("rank")]
        launcher = [os.getppid()]
        targets = {"rank": [os.getpid()], "launcher": launcher, "ranks": ranks, "all": launcher + ranks}
        for pid in targets[self.target]:
            os.kill(pid, self.number)
        if self.step == 0 and self.target == "launcher":
            # Until it is passed on: start-up would be over before.
            time.sleep(3.0)


@dataclass(frozen=True)
class PoisonGradient:
    """An infinite gradient on one rank in one update, the first time that it is made."""

    rank: int
    update: int

    def install(self, rank: int) -> None:
        from llmtrain.train.engine_native import NativeEngine

        if rank != self.rank:
            return
        plain, poisoned = NativeEngine.train_step, []

        def train_step(engine: Any, update: int, *args: Any, **kwargs: Any) -> Any:
            hooks = []
            if update == self.update and not poisoned:
                poisoned.append(update)
                hooks.append(next(iter(engine.model.parameters())).register_hook(lambda grad: grad * math.inf))
            result = plain(engine, update, *args, **kwargs)
            for hook in hooks:
                hook.remove()
            return result

        NativeEngine.train_step = train_step  # type: ignore[method-assign]


@dataclass(frozen=True)
class DrawNumbers:
    """Random numbers drawn on one rank before anything is built."""

    rank: int

    def install(self, rank: int) -> None:
        if rank == self.rank:
            torch.rand(7)


@dataclass(frozen=True)
class FlipLowestBit:
    """One bit of one weight of one rank, as soon as the model is built."""

    rank: int
    weight: str

    def install(self, rank: int) -> None:
        from llmtrain.train.engine_native import NativeEngine

        if rank != self.rank:
            return
        plain = NativeEngine.__init__

        def build(engine: Any, *args: Any, **kwargs: Any) -> None:
            plain(engine, *args, **kwargs)
            weight = dict(engine.model.named_parameters())[self.weight].detach()
            weight.view(torch.int32)[3, 5] ^= 1

        NativeEngine.__init__ = build  # type: ignore[method-assign]


@dataclass(frozen=True)
class Slow:
    """Every update of one rank takes this much longer."""

    rank: int
    seconds: float

    def install(self, rank: int) -> None:
        from llmtrain.train.engine_native import NativeEngine

        if rank != self.rank:
            return
        plain = NativeEngine.train_step

        def train_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(self.seconds)
            return plain(engine, *args, **kwargs)

        NativeEngine.train_step = train_step  # type: ignore[method-assign]


@dataclass(frozen=True)
class SlowDisk:
    """Checkpoints are written or read at so many bytes a second, in pieces that take a third of a second each."""

    calls: str
    bytes_per_second: int

    def install(self, rank: int) -> None:
        from llmtrain.checkpoint import writer
        from llmtrain.checkpoint.files import Files

        plain_write, plain_read, piece = Files.write, Files.read, self.bytes_per_second // 3
        writer.FILE_BYTES = piece

        def write(files: Files, descriptor: int, data: memoryview) -> int:
            taken = plain_write(files, descriptor, data[:piece])
            time.sleep(taken / self.bytes_per_second)
            return taken

        def read(files: Files, path: Path) -> bytes:
            data = plain_read(files, path)
            time.sleep(len(data) / self.bytes_per_second)
            return data

        if self.calls == "write":
            Files.write = write  # type: ignore[method-assign]
        else:
            Files.read = read  # type: ignore[method-assign]


@dataclass(frozen=True)
class SlowDigests:
    """Each tensor that is compared with those of other ranks takes so long on one rank."""

    rank: int
    seconds: float

    def install(self, rank: int) -> None:
        from llmtrain.train import run_start

        if rank != self.rank:
            return
        plain, seconds = run_start.check_replicas, self.seconds

        class SlowTensors(dict[str, torch.Tensor]):
            def values(self) -> Any:
                for tensor in super().values():
                    time.sleep(seconds)
                    yield tensor

        def check_replicas(collectives: Any, meeting: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
            plain(collectives, meeting, SlowTensors(tensors), *args, **kwargs)

        run_start.check_replicas = check_replicas  # type: ignore[attr-defined]
