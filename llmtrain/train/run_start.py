"""One start of a run inside its locked folder: build or restore, train, save, and say how it went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from llmtrain.checkpoint.files import ToldFiles
from llmtrain.checkpoint.store import CheckpointStore, Loaded
from llmtrain.config.compose import Composed
from llmtrain.config.errors import DataError, ExitCode, Problem
from llmtrain.config.paths import user_path
from llmtrain.config.plugins import makers
from llmtrain.config.typed import TrackerConfig
from llmtrain.data.corpus import Corpus
from llmtrain.dist.ranks import World
from llmtrain.dist.replicas import check_replicas
from llmtrain.metrics.console import Console, Tone
from llmtrain.metrics.memory import StorageLedger
from llmtrain.metrics.meters import DeviceMeter, StepRecord
from llmtrain.metrics.rank_log import RankLog
from llmtrain.metrics.sinks import NoSink, Sink, open_sink, record_of_step
from llmtrain.metrics.throughput import PeakFlops, Throughput, peak_flops
from llmtrain.metrics.trackers import Trackers, open_trackers
from llmtrain.ops.dtypes import DTYPES
from llmtrain.plan.plan import Machine, Plan
from llmtrain.train.assemble import build_engine
from llmtrain.train.card import card_rows, done_lines, next_commands, sample_text
from llmtrain.train.engine_native import NativeEngine
from llmtrain.train.initial import check_tokenizer, initial_weights, overridden
from llmtrain.train.origin import copy_origin, end_ids, forget_origin
from llmtrain.train.reporter import Reporter
from llmtrain.train.run_folder import Opening, RunFolder, Start, existing_run_folder
from llmtrain.train.signals import StopSignals
from llmtrain.train.startup import StartupClock
from llmtrain.train.state import TrainState
from llmtrain.train.trainer import NoSaver, Outcome, Trainer

LEDGER_UPDATES = 2
"""Updates of each start whose memory is measured."""


@dataclass(frozen=True)
class Surroundings:
    """What every part of a start on one rank speaks to."""

    composed: Composed
    console: Console
    world: World
    stop: StopSignals
    clock: StartupClock
    log: RankLog


@dataclass(frozen=True)
class Trained:
    """What a start of a run leaves behind in memory."""

    engine: NativeEngine
    state: TrainState
    reporter: Reporter
    code: ExitCode
    reason: str


class RunStart:
    """One start, on one rank. Rank 0 alone writes records and checkpoints and speaks to trackers."""

    def __init__(
        self, around: Surroundings, machine: Machine, corpus: Corpus, plan: Plan, folder: RunFolder, opening: Opening
    ) -> None:
        self._around = around
        self._config = around.composed.config
        self._console = around.console
        self._world = around.world
        self._machine = machine
        self._corpus = corpus
        self._plan = plan
        self._folder = folder
        self._opening = opening
        files = ToldFiles(around.world.position.tick)
        self._store = CheckpointStore(folder.checkpoints, self._config.checkpoint.keep, files)
        self._ledger = StorageLedger(torch.device(plan.device), LEDGER_UPDATES)
        self._tracker_notes: list[str] = []
        self._began = time.monotonic()

    def fit(self) -> Trained:
        """Build or restore, train, save, and write the final status."""
        plan, console, world = self._plan, self._console, self._world
        self._enter("connect")
        world.connect(plan.device)
        self._enter("model")
        console.status("building the model")
        engine = build_engine(self._config, plan, self._ledger, world)
        state = self._restore(engine)
        self._enter("replicas")
        tick = world.position.tick
        check_replicas(world.collectives, world.meeting, engine.state(), "weights and moments", tick)
        self._enter("warm-up")
        console.status("measuring the speed of a matrix product")
        peak = peak_flops(torch.device(plan.device), DTYPES[plan.precision.matmul])
        self._show_card(peak)
        unscored = self._unscored_record(state.step)
        is_unscored = world.meeting.share("unscored", lambda: unscored is not None)
        with self._opened_sink(state.step) as sink, self._opened_trackers(state.step) as trackers:
            reporter = self._build_reporter(sink, trackers, peak, unscored)
            trainer = self._build_trainer(engine, state, reporter, is_unscored=is_unscored)
            console.start_training(
                first_step=state.step,
                total_steps=trainer.last_step,
                log_every=self._config.train.log_every,
                baseline_loss=self._corpus.byte_frequency_loss,
            )
            console.status("first update")
            self._enter("first update")
            # What has been built up to here would only be built again: from here on there is something to save.
            self._around.stop.begin_training()
            outcome = trainer.fit()
        code, reason = ExitCode.DONE, outcome.value
        if outcome is Outcome.SIGNAL and trainer.stopped_by is not None:
            code, reason = ExitCode.REQUEUE, f"stopped by {trainer.stopped_by.name}"
        if world.is_main:
            self._folder.write_status(int(code), state.step, reason)
        return Trained(engine, state, reporter, code, reason)

    def _enter(self, phase: str) -> None:
        self._world.position.enter(phase)
        self._around.clock.enter(phase)

    def _restore(self, engine: NativeEngine) -> TrainState:
        """The newest good checkpoint, the same on every rank; or a run that begins."""
        if self._opening.start is Start.FRESH:
            self._begin_with_saved_weights(engine)
            return TrainState()
        self._enter("checkpoint")
        self._console.status("loading the checkpoint")
        loaded = self._load_together()
        for reason in loaded.skipped:
            self._console.warn(f"checkpoint passed over: {reason}")
        _check_data(loaded, self._corpus)
        engine.load_state(loaded.tensors)
        self._console.line(f"{self._opening.message}: going on from step {loaded.step}")
        for change in self._opening.changes:
            self._console.line(f"  changed  {change}")
        return TrainState.from_dict(loaded.state["train"])

    def _load_together(self) -> Loaded:
        """The newest checkpoint that all ranks find good, read by all at once.

        On a network file system a host may not see the newest one yet, or read it damaged; then an older one is the newest of all.
        """
        meeting = self._world.meeting
        with meeting.together("checkpoint"):
            loaded = self._store.load()
        newest_of_all = min(meeting.gather("checkpoint", loaded.step))
        with meeting.together("checkpoint"):
            return loaded if loaded.step == newest_of_all else self._store.load(newest_of_all)

    def _begin_with_saved_weights(self, engine: NativeEngine) -> None:
        if self._world.is_main:
            forget_origin(self._folder)
        if self._config.init_from is not None:
            self._console.status(f"loading the weights of {self._config.init_from}")
            source = existing_run_folder(user_path(self._config.init_from, f"model.init_from={self._config.init_from}"))
            initial = initial_weights(source.path)
            keep_going = self._around.composed.wire["run"]["on_change"] == "continue"
            check_tokenizer(initial, self._corpus.tokenizer, keep_going=keep_going, warn=self._console.warn)
            engine.load_weights(initial.tensors)
            if self._world.is_main:
                copy_origin(source, self._folder)
            self._console.line(f"begins with the weights of {self._config.init_from} at step {initial.step}")
            for change in overridden(source.read_config() or {}, self._around.composed.wire):
                self._console.line(f"  changed  {change}")

    def _show_card(self, peak: PeakFlops) -> None:
        path, resume = self._folder.path, self._world.resume or ""
        rows = card_rows(self._config, self._plan, self._machine, self._corpus, peak, resume)
        self._console.card(f"llmtrain train · {path}", rows)

    def _unscored_record(self, step: int) -> StepRecord | None:
        """The record of this step if a signal cut its evaluation short."""
        record = record_of_step(self._folder.metrics_file, step) if self._world.is_main else None
        return record if record is not None and record.unscored else None

    @contextmanager
    def _opened_sink(self, step: int) -> Iterator[Sink]:
        """Where records go that follow this step."""
        if not self._world.is_main:
            yield NoSink()
            return
        sink = open_sink(self._folder.metrics_file, step)
        if sink.num_damaged:
            self._console.line(f"{sink.num_damaged} torn lines of metrics.jsonl were dropped")
        try:
            yield sink
        finally:
            sink.close()

    @contextmanager
    def _opened_trackers(self, resumed_step: int) -> Iterator[Trackers]:
        """The trackers of the run; what is wrong with one is a warning, never the end of a training."""
        config, folder, is_main = self._config, self._folder, self._world.is_main
        trackers = open_trackers(
            config.tracker if is_main else TrackerConfig(None, False),
            folder=folder.path,
            run_name=folder.path.name,
            wire=self._around.composed.wire,
            resumed_step=resumed_step,
            warn=self._console.warn,
            others=makers("tracker", config.plugins) if is_main else None,
        )
        try:
            yield trackers
        except BaseException:
            trackers.finish()
            self._console.next(trackers.notes())
            raise
        trackers.finish()
        self._tracker_notes = trackers.notes()

    def _build_reporter(self, sink: Sink, trackers: Trackers, peak: PeakFlops, unscored: StepRecord | None) -> Reporter:
        return Reporter(
            plan=self._plan,
            console=self._console,
            sink=sink,
            trackers=trackers,
            ledger=self._ledger,
            device_meter=DeviceMeter(torch.device(self._plan.device)),
            comm_meter=self._world.collectives.meter,
            peak_flops=peak.flops_per_second * self._plan.world_size,
            throughput=Throughput(),
            unscored=unscored,
            on_first=self._tell_startup,
        )

    def _tell_startup(self) -> None:
        """The first update of this start is made."""
        self._around.clock.finish()
        self._around.log.write(self._around.clock.told())

    def _build_trainer(self, engine: NativeEngine, state: TrainState, reporter: Reporter, *, is_unscored: bool) -> Trainer:
        return Trainer(
            plan=self._plan,
            train=self._config.train,
            checkpoint=self._config.checkpoint,
            engine=engine,
            corpus=self._corpus,
            store=self._store if self._world.is_main else NoSaver(),
            state=state,
            reporter=reporter,
            stop=self._around.stop,
            world=self._world,
            is_unscored=is_unscored,
        )

    def tell(self, trained: Trained) -> ExitCode:
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
            console.next([self._world.resume or "", *self._tracker_notes])
        else:
            console.block("done", lines, Tone.GOOD)
            text = sample_text(trained.engine.model, self._corpus, self._config, end_ids(self._folder, self._corpus.tokenizer))
            if text is not None:
                console.block("sample", text.splitlines() or [""])
                document["sample"] = text
            console.next([*next_commands(self._config, path, self._corpus.tokenizer), *self._tracker_notes])
        console.document(document)
        return trained.code


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
