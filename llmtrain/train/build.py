"""The composition root of a training: from a composed config to a finished run folder. Nothing below here sees the whole config."""

from __future__ import annotations

import copy
import functools
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from llmtrain.checkpoint.store import CheckpointStore, Loaded
from llmtrain.config.compose import Composed
from llmtrain.config.errors import DataError, ExitCode, LlmtrainError, Problem, StorageError, exit_code_of
from llmtrain.config.keys import path_keys
from llmtrain.config.paths import user_path
from llmtrain.config.plugins import makers
from llmtrain.data.corpus import Corpus, build_corpus
from llmtrain.dist.runtime import configure_process
from llmtrain.dist.world import read_launch
from llmtrain.metrics.console import Console, Tone
from llmtrain.metrics.memory import StorageLedger
from llmtrain.metrics.meters import DeviceMeter
from llmtrain.metrics.sinks import JsonlSink, open_sink
from llmtrain.metrics.throughput import PeakFlops, Throughput, peak_flops
from llmtrain.metrics.trackers import Trackers, open_trackers
from llmtrain.ops.dtypes import DTYPES
from llmtrain.plan.make_plan import check_memory, make_plan
from llmtrain.plan.plan import Machine, Plan
from llmtrain.train.assemble import build_engine
from llmtrain.train.card import card_rows, done_lines, next_commands, sample_text, text_facts
from llmtrain.train.engine_native import NativeEngine
from llmtrain.train.initial import check_tokenizer, initial_weights, overridden, run_tokenizer
from llmtrain.train.machine import detect_machine
from llmtrain.train.memory_errors import explained_memory_errors
from llmtrain.train.origin import copy_origin, end_ids, forget_origin
from llmtrain.train.reporter import Reporter
from llmtrain.train.run_folder import Opening, RunFolder, Start, describe_environment, existing_run_folder, resolve_run_folder
from llmtrain.train.signals import StopSignals, stop_signals_raise
from llmtrain.train.state import TrainState
from llmtrain.train.trainer import Outcome, Trainer

SMALLEST_VOCABULARY = 2
DEFAULT_MODEL = "tiny"
"""The option whose values are the defaults of the schema; a run without any is called after it."""
LEDGER_UPDATES = 2
"""Updates of each start whose memory is measured."""


def train(composed: Composed, console: Console) -> ExitCode:
    """Train, or resume, or say that there is nothing left to do.

    Returns:
        DONE, or REQUEUE after a signal and a save.

    Raises:
        LlmtrainError: with the exit code of its kind; status.json of the run folder repeats it once there is a folder.
    """
    config = composed.config
    console.status("looking at the machine")
    machine = detect_machine(config.launch)
    # What cannot run with the smallest vocabulary is refused before hours of preparation tell the right one.
    check_memory(make_plan(config, machine, vocab_size=config.model.vocab_size or SMALLEST_VOCABULARY), machine)
    folder = _folder(composed)
    with stop_signals_raise():
        corpus = build_corpus(
            config.data,
            run_tokenizer(config.tokenizer, folder),
            seed=config.run.seed,
            vocab_size=config.model.vocab_size,
            progress=console.status,
            prepare=config.prepare,
        )
    if corpus.warning:
        console.warn(corpus.warning)
    plan = make_plan(config, machine, vocab_size=corpus.tokenizer.vocab_size)
    check_memory(plan, machine)
    configure_process(threads=plan.threads, deterministic=config.train.deterministic)
    folder.create()
    wire = with_absolute_paths(composed.wire)
    with folder.lock():
        opening = folder.decide(wire, plan, origins=composed.origins)
        if opening.start is Start.FINISHED:
            console.line(opening.message)
            console.next(next_commands(config, folder.path, corpus.tokenizer))
            console.document({"run": str(folder.path), "code": int(ExitCode.DONE), "message": opening.message})
            return ExitCode.DONE
        environment = describe_environment(plan.device, machine.device_name, plan.threads) | text_facts(corpus)
        with StopSignals() as stop:
            folder.record_start(wire, composed.words, plan, environment, opening)
            run = _Run(composed, console, machine, corpus, plan, folder, opening, stop)
            with _status_of_failures(folder), explained_memory_errors(plan):
                trained = run.fit()
        return run.tell(trained)


@dataclass(frozen=True)
class _Trained:
    """What a start of a run leaves behind in memory."""

    engine: NativeEngine
    state: TrainState
    reporter: Reporter
    code: ExitCode
    reason: str


class _Run:
    """One start of a run inside its locked folder."""

    def __init__(
        self,
        composed: Composed,
        console: Console,
        machine: Machine,
        corpus: Corpus,
        plan: Plan,
        folder: RunFolder,
        opening: Opening,
        stop: StopSignals,
    ) -> None:
        self._composed = composed
        self._config = composed.config
        self._console = console
        self._machine = machine
        self._corpus = corpus
        self._plan = plan
        self._folder = folder
        self._opening = opening
        self._stop = stop
        self._store = CheckpointStore(folder.checkpoints, composed.config.checkpoint.keep)
        self._ledger = StorageLedger(torch.device(plan.device), LEDGER_UPDATES)
        self._tracker_notes: list[str] = []
        self._began = time.monotonic()

    def fit(self) -> _Trained:
        """Build or restore, train, save, and write the final status."""
        config, plan, console = self._config, self._plan, self._console
        console.status("building the model")
        engine = build_engine(config, plan, self._ledger)
        state = self._restore(engine)
        console.status("measuring the speed of a matrix product")
        peak = peak_flops(torch.device(plan.device), DTYPES[plan.precision.matmul])
        self._show_card(peak)
        with _opened_sink(self._folder, state.step) as sink, self._opened_trackers(state.step) as trackers:
            if sink.num_damaged:
                console.line(f"{sink.num_damaged} torn lines of metrics.jsonl were dropped")
            reporter = self._build_reporter(sink, trackers, peak)
            trainer = self._build_trainer(engine, state, reporter)
            console.start_training(
                first_step=state.step,
                total_steps=trainer.last_step,
                log_every=config.train.log_every,
                baseline_loss=self._corpus.byte_frequency_loss,
            )
            console.status("first update")
            outcome = trainer.fit()
        code, reason = ExitCode.DONE, outcome.value
        if outcome is Outcome.SIGNAL and self._stop.received is not None:
            code, reason = ExitCode.REQUEUE, f"stopped by {self._stop.received.name}"
        self._folder.write_status(int(code), state.step, reason)
        return _Trained(engine, state, reporter, code, reason)

    def _restore(self, engine: NativeEngine) -> TrainState:
        """The state of the newest good checkpoint, or that of a run that begins."""
        if self._opening.start is Start.FRESH:
            self._begin_with_saved_weights(engine)
            return TrainState()
        self._console.status("loading the checkpoint")
        loaded = self._store.load()
        for reason in loaded.skipped:
            self._console.warn(f"checkpoint passed over: {reason}")
        _check_data(loaded, self._corpus)
        engine.load_state(loaded.tensors)
        self._console.line(f"{self._opening.message}: going on from step {loaded.step}")
        for change in self._opening.changes:
            self._console.line(f"  changed  {change}")
        return TrainState.from_dict(loaded.state["train"])

    def _begin_with_saved_weights(self, engine: NativeEngine) -> None:
        forget_origin(self._folder)
        if self._config.init_from is not None:
            self._console.status(f"loading the weights of {self._config.init_from}")
            source = existing_run_folder(user_path(self._config.init_from, f"model.init_from={self._config.init_from}"))
            initial = initial_weights(source.path)
            keep_going = self._composed.wire["run"]["on_change"] == "continue"
            check_tokenizer(initial, self._corpus.tokenizer, keep_going=keep_going, warn=self._console.warn)
            engine.load_weights(initial.tensors)
            copy_origin(source, self._folder)
            self._console.line(f"begins with the weights of {self._config.init_from} at step {initial.step}")
            for change in overridden(source.read_config() or {}, self._composed.wire):
                self._console.line(f"  changed  {change}")

    def _show_card(self, peak: PeakFlops) -> None:
        config, path = self._config, self._folder.path
        rows = card_rows(config, self._plan, self._machine, self._corpus, peak, self._resume_command())
        self._console.card(f"llmtrain train · {path}", rows)

    @contextmanager
    def _opened_trackers(self, resumed_step: int) -> Iterator[Trackers]:
        """The trackers of the run; what is wrong with one is a warning, never the end of a training."""
        config, folder = self._config, self._folder
        trackers = open_trackers(
            config.tracker,
            folder=folder.path,
            run_name=folder.path.name,
            wire=self._composed.wire,
            resumed_step=resumed_step,
            warn=self._console.warn,
            others=makers("tracker", config.plugins),
        )
        try:
            yield trackers
        except BaseException:
            trackers.finish()
            self._console.next(trackers.notes())
            raise
        trackers.finish()
        self._tracker_notes = trackers.notes()

    def _build_reporter(self, sink: JsonlSink, trackers: Trackers, peak: PeakFlops) -> Reporter:
        return Reporter(
            plan=self._plan,
            console=self._console,
            sink=sink,
            trackers=trackers,
            ledger=self._ledger,
            device_meter=DeviceMeter(torch.device(self._plan.device)),
            peak_flops=peak.flops_per_second * self._plan.world_size,
            throughput=Throughput(),
        )

    def _build_trainer(self, engine: NativeEngine, state: TrainState, reporter: Reporter) -> Trainer:
        return Trainer(
            plan=self._plan,
            train=self._config.train,
            checkpoint=self._config.checkpoint,
            engine=engine,
            corpus=self._corpus,
            store=self._store,
            state=state,
            reporter=reporter,
            stop=self._stop,
        )

    def tell(self, trained: _Trained) -> ExitCode:
        """Say how it went; the status is written already, so nothing that goes wrong here changes it."""
        console, path, state, reporter = self._console, self._folder.path, trained.state, trained.reporter
        val_loss = None if reporter.last is None else reporter.last.val_loss
        lines = done_lines(
            self._plan,
            self._corpus,
            state,
            seconds=time.monotonic() - self._began,
            tokens_per_second=reporter.tokens_per_second(),
            val_loss=val_loss,
            measured_peak_bytes=reporter.measured_peak_bytes,
        )
        document = {"run": str(path), "code": int(trained.code), "reason": trained.reason, "step": state.step}
        if val_loss is not None:
            document |= {"val_loss": val_loss, "bits_per_byte": self._corpus.bits_per_byte(val_loss)}
        if trained.code is ExitCode.REQUEUE:
            console.block("stopped", lines, Tone.BAD)
            console.next([self._resume_command(), *self._tracker_notes])
        else:
            console.block("done", lines, Tone.GOOD)
            text = sample_text(trained.engine.model, self._corpus, self._config, end_ids(self._folder, self._corpus.tokenizer))
            if text is not None:
                console.block("sample", text.splitlines() or [""])
                document["sample"] = text
            console.next([*next_commands(self._config, path, self._corpus.tokenizer), *self._tracker_notes])
        console.document(document)
        return trained.code

    def _resume_command(self) -> str:
        """What to type to go on with this run from anywhere the same paths mean the same."""
        words = [word for word in self._composed.words if not word.lstrip("+").startswith("run.name=")]
        return shlex.join(["llmtrain", *self._composed.options, *words, f"run.name={self._folder.path.name}"])


def _folder(composed: Composed) -> RunFolder:
    """Where this run belongs; a name is drawn when none was given, the same one for a requeued Slurm job."""
    config = composed.config
    label = composed.groups.get("experiment") or composed.groups.get("model") or DEFAULT_MODEL
    job_id = read_launch(os.environ, config.launch.nproc).job_id
    parent = user_path(config.run.dir, f"run.dir={config.run.dir}")
    return resolve_run_folder(parent, config.run.name, label, job_id=job_id)


def with_absolute_paths(wire: Mapping[str, Any]) -> dict[str, Any]:
    """The config to keep: what it reads is found again from any folder."""
    kept = copy.deepcopy(dict(wire))
    for key in path_keys():
        *sections, name = key.split(".")
        section: Any = functools.reduce(lambda inner, part: inner.get(part, {}), sections, kept)  # a plugin may not be used
        if value := section.get(name):
            section[name] = str(user_path(value, f"{key}={value}").absolute())
    return kept


def _check_data(loaded: Loaded, corpus: Corpus) -> None:
    """Raise DataError when the data is not what the checkpoint was trained on."""
    if loaded.state["data_fingerprint"] != corpus.fingerprint:
        raise DataError(
            Problem(
                f"the data differs from that of checkpoint step {loaded.step}",
                "a resumed run reads the samples that follow those it has read; other text, tokenizer or packing has no such order",
                "the text the run was started with, or another run.name",
            )
        )


@contextmanager
def _opened_sink(folder: RunFolder, resumed_step: int) -> Iterator[JsonlSink]:
    sink = open_sink(folder.metrics_file, resumed_step)
    try:
        yield sink
    finally:
        sink.close()


@contextmanager
def _status_of_failures(folder: RunFolder) -> Iterator[None]:
    """Whatever ends the run, status.json says so before the process ends."""
    try:
        yield
    except BaseException as error:
        reason = error.problems[0].what if isinstance(error, LlmtrainError) else f"{type(error).__name__}: {error}"
        # Where the disk is the trouble the status cannot be written either; what is told is the first error.
        with suppress(StorageError):
            steps = CheckpointStore(folder.checkpoints, keep=1).published()
            folder.write_status(int(exit_code_of(error)), steps[-1] if steps else 0, reason)
        raise
