"""What ranks of whole trainings do; imported in ranks, and by the tests that ask for them."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol
from unittest import mock

from helpers.rank_server import JOB, end_process, name_process


@dataclass(frozen=True)
class Read:
    """One training sample as a rank has read it."""

    sample: int
    tokens: tuple[int, ...]
    num_targets: int


@dataclass
class Told:
    """What one rank says at its end."""

    code: int = 0
    printed: str = ""
    error: str = ""
    reads: list[Read] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)
    """Digests of every tensor that is saved, before the first update of this start."""
    after: dict[str, str] = field(default_factory=dict)
    """The same when the trainer has ended."""


class Plant(Protocol):
    """Changes something in a rank before it trains; can be pickled."""

    def install(self, rank: int) -> None: ...


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """A hash of the bytes of each tensor."""
    return {name: hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def record_training(told: Told) -> None:
    """Have the training of this process tell what it reads and what it begins and ends with."""
    from llmtrain.data.loader import TokenLoader
    from llmtrain.ops.cross_entropy import IGNORE_INDEX
    from llmtrain.train.trainer import Trainer

    plain_batch, plain_fit = TokenLoader.batch, Trainer.fit

    def batch(self: Any, first_sample: int, count: int) -> Any:
        read = plain_batch(self, first_sample, count)
        targets = (read.targets != IGNORE_INDEX).sum(1).tolist()
        rows = zip(read.sample_index.tolist(), read.tokens.tolist(), targets, strict=True)
        told.reads += [Read(sample, tuple(tokens), number) for sample, tokens, number in rows]
        return read

    def fit(self: Any) -> Any:
        told.before = digests(self._engine.state())
        outcome = plain_fit(self)
        told.after = digests(self._engine.state())
        return outcome

    TokenLoader.batch = batch  # type: ignore[method-assign]
    Trainer.fit = fit  # type: ignore[method-assign]


def train_rank(place: Any, words: tuple[str, ...], plants: Sequence[Plant] = ()) -> Told:
    """A training from the words of a command line, as `cli/train` does it, told to a string."""
    from llmtrain.config.compose import compose_config
    from llmtrain.config.errors import LlmtrainError, exit_code_of
    from llmtrain.metrics import throughput
    from llmtrain.metrics.console import PlainConsole
    from llmtrain.train.build import train

    told = Told()
    record_training(told)
    for plant in plants:
        plant.install(place.rank)
    stream = io.StringIO()
    console = PlainConsole(stream, 160)
    try:
        # No test looks at the speed of the machine, so it is not measured for long.
        with mock.patch.object(throughput, "MEASURE_SECONDS", 0.0):
            told.code = int(train(compose_config(words), console))
    except LlmtrainError as problem:
        told.code, told.error = int(exit_code_of(problem)), str(problem)
    finally:
        console.close()
    told.printed = stream.getvalue()
    return told


def run_command(place: Any, words: tuple[str, ...], plants: Sequence[Plant] = ()) -> NoReturn:
    """What `python -m llmtrain WORDS` does where a script, torchrun or srun starts it, to the end of its interpreter."""
    from llmtrain.cli.dispatch import dispatch
    from llmtrain.metrics import throughput

    throughput.MEASURE_SECONDS = 0.0
    for plant in plants:
        plant.install(place.rank)
    sys.exit(dispatch(words))


def launch_job(place: Any, words: tuple[str, ...], size: int, plants: Sequence[Plant]) -> int:
    """What `llmtrain launch.nproc=SIZE WORDS` does, but the ranks are forked: they have torch already, and plants.

    Returns:
        The exit code of the launcher.
    """
    from llmtrain.cli.dispatch import dispatch
    from llmtrain.metrics import throughput
    from llmtrain.train import launch

    def start(starter: Any, environ: dict[str, str], **files: Any) -> ForkedRank:
        return fork_rank(environ, plants, **files)

    throughput.MEASURE_SECONDS = 0.0
    launch._Starter._start = start  # type: ignore[assignment, method-assign]
    return int(dispatch([*words, f"launch.nproc={size}"]))


class ForkedRank:
    """What `subprocess.Popen` gives of a process, for a forked one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_rank(
    environ: dict[str, str], plants: Sequence[Plant], *, stdin: Any, stdout: Any = None, stderr: Any = None, pass_fds: Any = ()
) -> ForkedRank:
    """A rank as the launcher starts it, without a new interpreter."""
    from llmtrain.train.signals import STOP_SIGNALS

    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return ForkedRank(pid)
    code = 1
    try:
        os.setpgid(0, 0)
        # A new interpreter has none of the handlers of its parent.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environ)
        for descriptor, stream in ((0, stdin), (1, stdout), (2, stderr)):
            if stream is not None:
                os.dup2(stream if isinstance(stream, int) else stream.fileno(), descriptor)
        rank = int(environ["RANK"])
        name_process(JOB["folder"], f"rank{rank}")
        for plant in plants:
            plant.install(rank)
        code = _run_as_rank()
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(code)


def _run_as_rank() -> int:
    from llmtrain.cli.rank import main

    try:
        code = main()
    except SystemExit as end:
        code = end.code
    return int(code or 0)


def assert_same_run(ours: Path, theirs: Path) -> None:
    """`runs.assert_same_training`, where waiting for other ranks takes a time of its own."""
    from helpers import runs

    with mock.patch.object(runs, "TIMES_AND_MEMORY", (*runs.TIMES_AND_MEMORY, "exposed_comm_seconds")):
        runs.assert_same_training(ours, theirs)
