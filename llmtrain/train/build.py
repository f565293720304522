"""The composition root of a training: from a composed config to a finished run folder. Only here and in `run_start`, which makes the
parts, is the whole config seen.

Every rank of a run comes through here. What only one of them may decide (the name of the run, what its folder means) rank 0 decides
and shares; after each phase the ranks wait for each other, so that what goes wrong on one ends all of them with its message.
"""

from __future__ import annotations

import copy
import functools
import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.compose import Composed
from llmtrain.config.errors import ExitCode, LlmtrainError, StorageError, exit_code_of
from llmtrain.config.keys import path_keys
from llmtrain.config.paths import user_path
from llmtrain.data.corpus import Corpus, build_corpus
from llmtrain.dist.failure import Failure, reason_of_run
from llmtrain.dist.ranks import join_world
from llmtrain.dist.runtime import configure_process
from llmtrain.dist.world import NPROC, SLURM, LaunchFacts, read_launch
from llmtrain.metrics.console import Console
from llmtrain.metrics.rank_log import LogConsole, LoggedConsole, RankLog, redirect_output
from llmtrain.plan.make_plan import check_memory, make_plan
from llmtrain.plan.plan import Machine
from llmtrain.train.agreement import same_config, same_plan, share_folder, share_opening
from llmtrain.train.card import next_commands, text_facts
from llmtrain.train.initial import run_tokenizer
from llmtrain.train.machine import agreed_machine, detect_machine, shared_facts
from llmtrain.train.memory_errors import explained_memory_errors
from llmtrain.train.run_folder import Opening, RunFolder, Start, describe_environment, resolve_run_folder
from llmtrain.train.run_start import RunStart, Surroundings, Trained
from llmtrain.train.signals import StopSignals
from llmtrain.train.startup import StartupClock, seconds_since_start

SMALLEST_VOCABULARY = 2
DEFAULT_MODEL = "tiny"
"""The option whose values are the defaults of the schema; a run without any is called after it."""


def train(composed: Composed, console: Console) -> ExitCode:
    """Train, or resume, or say that there is nothing left to do: as the only rank of a run, or as one of several.

    Returns:
        DONE, or REQUEUE after a signal and a save.

    Raises:
        LlmtrainError: with the exit code of its kind; status.json of the run folder repeats it once there is a folder.
    """
    launch = composed.config.launch
    clock = StartupClock(seconds_since_start())
    clock.enter("ranks")
    facts = read_launch(os.environ, launch.nproc)
    assert not facts.starts_ranks, "this process starts the ranks, see train/launch.py"
    log = RankLog(rank=facts.rank, size=facts.world_size, words=composed.words)
    shown = LoggedConsole(console, log) if facts.is_main else LogConsole(log)
    with StopSignals() as stop:
        world = join_world(facts, timeout_seconds=launch.timeout_seconds, stop_received=lambda: stop.received)
        with world as ranks:
            start = _Start(Surroundings(composed, shown, ranks, stop, clock, log))
            trained = start.run()
        if trained is None:
            return ExitCode.DONE
        # Still inside StopSignals: one that comes when everything is saved must not make another end of it.
        return start.tell(trained) if facts.is_main else trained.code


class _Start:
    """One start of one rank, from what was asked to a training that runs in its locked folder."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._composed = around.composed
        self._config = around.composed.config
        self._console = around.console
        self._world = around.world

    def run(self) -> Trained | None:
        """Train; None when the run is finished already."""
        world = self._world
        same_config(world, self._composed.wire)
        machine = self._look_at_machine()
        path = world.meeting.share_once("run folder", lambda: str(_folder_path(self._composed)))
        folder = RunFolder(Path(path))
        corpus = self._read_data(folder)
        with world.meeting.together("plan"):
            plan = make_plan(self._config, machine, vocab_size=corpus.tokenizer.vocab_size)
            check_memory(plan, machine)
            configure_process(
                threads=plan.threads,
                deterministic=self._config.train.deterministic,
                device=machine.device,
                device_index=machine.device_index,
            )
        same_plan(world, plan, corpus)
        self._around.clock.enter("folder")
        with ExitStack() as held:
            with world.meeting.together("folder"):
                if world.is_main:
                    folder.create()
                    held.enter_context(folder.lock())
            self._open_folder(folder)
            wire = with_absolute_paths(self._composed.wire)
            with world.meeting.together("folder"):
                decided = folder.decide(wire, plan, origins=self._composed.origins) if world.is_main else None
            opening = share_opening(world, decided)
            hosts = world.meeting.gather("hosts", [socket.gethostname(), plan.threads])
            if opening.start is Start.FINISHED:
                self._tell_finished(folder, corpus, opening)
                return None
            status = _status_of_failures(folder) if world.is_main else nullcontext()
            with status, world.failures(), explained_memory_errors(plan):
                if world.is_main:
                    facts = describe_environment(plan, machine.device_name, hosts) | text_facts(corpus)
                    folder.record_start(wire, self._composed.words, plan, facts, opening)
                # From here on the folder is this start's: how it ends is kept there, also by others.
                world.on_loss = functools.partial(_write_loss, folder)
                world.leave_word({"folder": str(folder.path), "resume": world.resume})
                self._start = RunStart(self._around, machine, corpus, plan, folder, opening)
                return self._start.fit()

    def tell(self, trained: Trained) -> ExitCode:
        """Say how the training went."""
        return self._start.tell(trained)

    def _look_at_machine(self) -> Machine:
        """The machine to plan for; what cannot run with the smallest vocabulary is refused before hours of preparation tell the right one."""
        self._console.status("looking at the machine")
        self._around.clock.enter("machine")
        with self._world.meeting.together("machine"):
            machine = detect_machine(self._config.launch, self._world.facts)
        everyone = self._world.meeting.gather("machine", shared_facts(machine))
        smallest = self._config.model.vocab_size or SMALLEST_VOCABULARY
        with self._world.meeting.together("plan"):
            machine = agreed_machine(machine, everyone)
            check_memory(make_plan(self._config, machine, vocab_size=smallest), machine)
        return machine

    def _read_data(self, folder: RunFolder) -> Corpus:
        config, world = self._config, self._world

        def progress(text: str) -> None:
            world.position.tick()
            self._console.status(text)

        self._around.clock.enter("data")
        with world.meeting.together("data"):
            corpus = build_corpus(
                config.data,
                run_tokenizer(config.tokenizer, folder),
                seed=config.run.seed,
                vocab_size=config.model.vocab_size,
                progress=progress,
                prepare=config.prepare,
            )
        if corpus.warning:
            self._console.warn(corpus.warning)
        return corpus

    def _open_folder(self, folder: RunFolder) -> None:
        """Every rank sees the folder and has a log in it; what the others print goes there too."""
        world = self._world
        share_folder(world, folder)
        log = folder.path / "logs" / f"rank{world.rank}.log"
        world.log, world.resume = log, self._resume_command(folder)
        if not world.is_main:
            world.terminal = redirect_output(log)
        self._around.log.open(log)

    def _tell_finished(self, folder: RunFolder, corpus: Corpus, opening: Opening) -> None:
        self._console.line(opening.message)
        self._console.next(next_commands(self._config, folder.path, corpus.tokenizer))
        self._console.document({"run": str(folder.path), "code": int(ExitCode.DONE), "message": opening.message})

    def _resume_command(self, folder: RunFolder) -> str:
        """What to type to go on with this run from anywhere the same paths mean the same, on as many ranks."""
        composed = self._composed
        words = [word for word in composed.words if not word.lstrip("+").startswith("run.name=")]
        started = [*start_words(self._world.facts), *composed.options, *words, f"run.name={folder.path.name}"]
        return shlex.join(started)


def start_words(facts: LaunchFacts) -> list[str]:
    """How a run with so many ranks is started: by llmtrain itself, by torchrun or by srun."""
    if facts.world_size == 1 or facts.source == NPROC:
        return ["llmtrain"]
    if facts.source == SLURM:
        return ["srun", f"--nodes={facts.num_nodes}", f"--ntasks={facts.world_size}", "llmtrain"]
    several = []
    if facts.num_nodes > 1:
        meeting = [f"--master-addr={facts.master_addr}", f"--master-port={facts.master_port}"]
        several = [f"--nnodes={facts.num_nodes}", "--node-rank=NODE_RANK", *meeting]
    return ["torchrun", *several, f"--nproc-per-node={facts.local_world_size}", "-m", "llmtrain"]


def _folder_path(composed: Composed) -> Path:
    """Where this run belongs; a name is drawn when none was given, the same one for a requeued Slurm job."""
    config = composed.config
    label = composed.groups.get("experiment") or composed.groups.get("model") or DEFAULT_MODEL
    job_id = read_launch(os.environ, config.launch.nproc).job_id
    parent = user_path(config.run.dir, f"run.dir={config.run.dir}")
    return resolve_run_folder(parent, config.run.name, label, job_id=job_id).path


def with_absolute_paths(wire: Mapping[str, Any]) -> dict[str, Any]:
    """The config to keep: what it reads is found again from any folder."""
    kept = copy.deepcopy(dict(wire))
    for key in path_keys():
        *sections, name = key.split(".")
        section: Any = functools.reduce(lambda inner, part: inner.get(part, {}), sections, kept)  # a plugin may not be used
        if value := section.get(name):
            section[name] = str(user_path(value, f"{key}={value}").absolute())
    return kept


@contextmanager
def _status_of_failures(folder: RunFolder) -> Iterator[None]:
    """Whatever ends the run, status.json says so before the process ends."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, LlmtrainError):
            problem = error.problems[0].what
        else:
            problem = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        _write_end(folder, int(exit_code_of(error)), problem)
        raise


def _write_loss(folder: RunFolder, failure: Failure) -> None:
    """A rank is gone or hangs, perhaps the one that keeps the status: the one that noticed first writes it."""
    _write_end(folder, failure.code, reason_of_run(failure))


def _write_end(folder: RunFolder, code: int, reason: str) -> None:
    # Where the disk is the trouble the status cannot be written either; what is told is the first error.
    with suppress(StorageError):
        steps = CheckpointStore(folder.checkpoints, keep=1).published()
        folder.write_status(code, steps[-1] if steps else 0, reason)
