"""When things happen: batch, update, evaluation, save, stop. How an update happens is the engine's business."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.typed import CheckpointConfig, TrainConfig
from llmtrain.data.corpus import Corpus
from llmtrain.plan.plan import Plan
from llmtrain.train.accumulate import microbatch_ranges
from llmtrain.train.engine import Engine, StepResult
from llmtrain.train.guard import check_skips
from llmtrain.train.reporter import Reporter
from llmtrain.train.signals import StopSignals
from llmtrain.train.state import TrainState


class Outcome(StrEnum):
    """Why `fit` returned."""

    FINISHED = "finished"
    """All updates of the run are made."""
    STOP_AFTER = "stop_after"
    """The update of `train.stop_after` is made."""
    SIGNAL = "signal"
    """A signal asked for it."""


class Trainer:
    """Runs an engine over a corpus up to the last update, from wherever the state stands."""

    def __init__(
        self,
        *,
        plan: Plan,
        train: TrainConfig,
        checkpoint: CheckpointConfig,
        engine: Engine,
        corpus: Corpus,
        store: CheckpointStore,
        state: TrainState,
        reporter: Reporter,
        stop: StopSignals,
    ) -> None:
        self._plan = plan
        self._train = train
        self._checkpoint = checkpoint
        self._engine = engine
        self._corpus = corpus
        self._store = store
        self._reporter = reporter
        self._stop = stop
        self._saved_step: int | None = state.step if state.step else None
        self.state = state
        self.last_step = plan.steps if train.stop_after is None else min(plan.steps, train.stop_after)

    def fit(self) -> Outcome:
        """Make updates until the last one, or until a signal; the state is saved when this returns.

        Raises:
            NumericsError: too many updates in a row were not finite; the checkpoints before are intact.
            StorageError: a record or checkpoint cannot be written.
        """
        self._reporter.start(self.state)
        with _collecting_garbage(self._train.gc_every) as collect:
            while self.state.step < self.last_step and self._stop.received is None:
                result = self._update()
                if result.skipped:
                    self._reporter.skipped(self.state, result)
                    check_skips(self.state, result, self._train.max_consecutive_skips)
                    continue
                val_loss = self._validate() if self._is_due(self._train.eval_every) else None
                self._reporter.report(self.state, result, val_loss)
                if self._is_due(self._checkpoint.every):
                    self._save()
                collect(self.state.step)
        self._save()
        return self._outcome()

    def _update(self) -> StepResult:
        """One batch through the engine; counts it as a step or as skipped."""
        batch = self._plan.batch
        with self._reporter.update():
            ranges = microbatch_ranges(batch, self.state.consumed_samples)
            microbatches = [self._corpus.train.batch(part.first, part.count) for part in ranges]
            result = self._engine.train_step(self.state.step + 1, microbatches)
        self.state.consume(samples=batch.global_batch_size, tokens=batch.tokens_per_step, skipped=result.skipped)
        return result

    def _validate(self) -> float:
        """Token mean over the fixed prefix of validation rows that is scored during training."""
        with self._reporter.aside("evaluating"):
            batches = self._corpus.validation.batches(self._plan.batch.micro_batch_size, self._train.eval_tokens)
            return self._engine.evaluate(batches).loss

    def _save(self) -> None:
        """Publish the state of this step, unless that was done already."""
        if self._saved_step == self.state.step:
            return
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
