"""When things happen: batch, update, evaluation, save, stop. How an update happens is the engine's business."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor

from llmtrain.config.typed import CheckpointConfig, TrainConfig
from llmtrain.data.corpus import Corpus
from llmtrain.data.loader import Batch
from llmtrain.dist.ranks import World
from llmtrain.plan.plan import Plan
from llmtrain.train.accumulate import microbatch_ranges
from llmtrain.train.engine import Engine, EvaluationResult, StepResult
from llmtrain.train.guard import check_skips
from llmtrain.train.reporter import Reporter
from llmtrain.train.signals import STOP_SIGNALS, StopSignals
from llmtrain.train.state import TrainState


class Saver(Protocol):
    """Where a trainer saves; a rank that keeps no checkpoints has one that does nothing."""

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> object:
        """Make the state of `step` durable."""
        ...


class NoSaver:
    """On ranks whose state another one saves."""

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        pass


class Outcome(StrEnum):
    """Why `fit` returned."""

    FINISHED = "finished"
    """All updates of the run are made."""
    STOP_AFTER = "stop_after"
    """The update of `train.stop_after` is made."""
    SIGNAL = "signal"
    """A signal asked for it."""


class Trainer:
    """Runs an engine over a corpus up to the last update, from wherever the state stands.

    Several ranks run the same trainer in step: what only one of them knows (a signal, how many targets it has read) is agreed at the
    border between two updates and at the end of an evaluation, so all of them save and stop after the same update.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        train: TrainConfig,
        checkpoint: CheckpointConfig,
        engine: Engine,
        corpus: Corpus,
        store: Saver,
        state: TrainState,
        reporter: Reporter,
        stop: StopSignals,
        world: World,
        is_unscored: bool = False,
    ) -> None:
        """
        Args:
            is_unscored: the evaluation of the step that `state` stands at was cut short and is to be made first.
        """
        self._plan = plan
        self._train = train
        self._checkpoint = checkpoint
        self._engine = engine
        self._corpus = corpus
        self._store = store
        self._reporter = reporter
        self._stop = stop
        self._world = world
        # What a run begins with is a function of its config and needs no save.
        self._saved_step = state.step
        self._is_unscored = is_unscored
        self._held: list[Batch] | None = None
        """The next batch, when it has been read already."""
        self.state = state
        self.stopped_by: signal.Signals | None = None
        """The signal that all ranks agreed to stop for."""
        self.last_step = plan.steps if train.stop_after is None else min(plan.steps, train.stop_after)

    def fit(self) -> Outcome:
        """Make updates until the last one, or until a signal; the state is saved when this returns.

        Raises:
            NumericsError: too many updates in a row were not finite; the checkpoints before are intact.
            StorageError: a record or checkpoint cannot be written.
        """
        self._world.position.at_step(self.state.step)
        if self._is_unscored:
            self._score_last_step()
        if self.state.step < self.last_step and not self._is_unscored:
            self._warm_up()
        self._reporter.start(self.state)
        with _collecting_garbage(self._train.gc_every) as collect:
            while self.state.step < self.last_step and not self._is_unscored:
                microbatches = self._next_batch()
                num_targets = self._agree(sum(batch.num_targets for batch in microbatches))
                if self.stopped_by is not None:
                    break
                result = self._update(microbatches, num_targets)
                if result.skipped:
                    self._reporter.skipped(self.state, result)
                    check_skips(self.state, result, self._train.max_consecutive_skips)
                    continue
                self._report(result)
                if self._is_due(self._checkpoint.every):
                    self._save()
                collect(self.state.step)
        self._save()
        return self._outcome()

    def _warm_up(self) -> None:
        """What an engine does once before its first update belongs to none."""
        self._held = self._next_batch()
        self._world.position.enter("warm-up")
        with self._reporter.aside("warming up"):
            self._engine.warm_up(self._held[0])

    def _next_batch(self) -> list[Batch]:
        """This rank's micro-batches of the next update."""
        self._world.position.at_step(self.state.step + 1)
        self._world.position.enter("batch")
        if self._held is not None:
            held, self._held = self._held, None
            return held
        ranges = microbatch_ranges(self._plan.batch, self.state.consumed_samples, data_rank=self._world.rank)
        return [self._corpus.train.batch(part.first, part.count) for part in ranges]

    def _agree(self, num_targets: int) -> int:
        """The border between two updates: targets of the next one over all ranks; and a signal that any rank received is everyone's.

        Only what was agreed decides: a signal that came to this rank a moment later is for the next border.
        """
        self._world.position.enter("border")
        received = self._stop.received
        votes = [int(number == received) for number in STOP_SIGNALS]
        total, *voted = self._world.collectives.sum_counts([num_targets, *votes])
        asked = [number for number, count in zip(STOP_SIGNALS, voted, strict=True) if count]
        self.stopped_by = asked[0] if asked else None
        return total

    def _update(self, microbatches: list[Batch], num_targets: int) -> StepResult:
        """One batch through the engine; counts it as a step or as skipped."""
        batch = self._plan.batch
        with self._reporter.update():
            result = self._engine.train_step(self.state.step + 1, microbatches, num_targets)
        self.state.consume(samples=batch.global_batch_size, tokens=batch.tokens_per_step, skipped=result.skipped)
        return result

    def _report(self, result: StepResult) -> None:
        """Evaluate if it is time to, and write the record of the update just made."""
        is_due = self._is_due(self._train.eval_every)
        scored = self._validate() if is_due else None
        self._is_unscored = is_due and scored is None
        self._world.position.enter("report")
        if self._is_unscored:
            self._reporter.report_unscored(self.state, result)
        else:
            self._reporter.report(self.state, result, None if scored is None else scored.loss)

    def _score_last_step(self) -> None:
        """Make up for the evaluation that the start before was stopped in."""
        scored = self._validate()
        if scored is not None:
            self._is_unscored = False
            self._reporter.complete(scored.loss)

    def _validate(self) -> EvaluationResult | None:
        """Score the fixed prefix of validation rows that is scored during training; None when a signal cut it short."""
        world = self._world
        world.position.enter("evaluate")
        with self._reporter.aside("evaluating"):
            batches = self._corpus.validation.batches(
                self._plan.batch.micro_batch_size, self._train.eval_tokens, rank=world.rank, num_ranks=world.size
            )
            result = self._engine.evaluate(batches, self._stop.asked)
        if result is None:
            self._agree(0)
        return result

    def _save(self) -> None:
        """Publish the state of this step, unless that was done already."""
        if self._saved_step == self.state.step:
            return
        self._world.position.enter("save")
        with self._reporter.aside("saving"):
            self._reporter.sync()
            self._store.save(self.state.step, self._engine.state(), saved_state(self.state, self._corpus))
        self._saved_step = self.state.step

    def _is_due(self, every: int) -> bool:
        """Whether something that happens every so many updates, and after the last of the run, happens now; 0 = never.

        Where this process stops does not matter, so that a run in two parts does what a run in one does.
        """
        return every > 0 and (self.state.step % every == 0 or self.state.step == self._plan.steps)

    def _outcome(self) -> Outcome:
        if self._is_unscored:
            return Outcome.SIGNAL
        if self.state.step >= self._plan.steps:
            return Outcome.FINISHED
        return Outcome.STOP_AFTER if self.state.step >= self.last_step else Outcome.SIGNAL


def saved_state(state: TrainState, corpus: Corpus) -> dict[str, Any]:
    """The JSON that goes into a checkpoint beside the tensors: with the tokenizer a checkpoint can be sampled without its data."""
    return {"train": state.to_dict(), "data_fingerprint": corpus.fingerprint, "tokenizer": corpus.tokenizer.to_json()}


@contextmanager
def _collecting_garbage(every: int) -> Iterator[Any]:
    """Gives a function to call after each update. With `every` > 0 Python collects at those updates and at no other time."""
    if every == 0:
        yield lambda step: None
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield lambda step: gc.collect() if step % every == 0 else None
    finally:
        if was_enabled:
            gc.enable()
