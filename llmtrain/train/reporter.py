"""Watches a training: times each update, measures its memory, and hands the record to the file, the trackers and the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from llmtrain.dist.collectives import CommSummary, Meter, NoMeter
from llmtrain.metrics.console import Console
from llmtrain.metrics.memory import Ledger, MemorySummary
from llmtrain.metrics.meters import DeviceMeter, StepRecord
from llmtrain.metrics.sinks import Sink
from llmtrain.metrics.throughput import Rate, Throughput, mfu
from llmtrain.metrics.trackers import Trackers
from llmtrain.plan.plan import Plan
from llmtrain.train.engine import StepResult
from llmtrain.train.state import TrainState


class Reporter:
    """Reads what the trainer does and changes none of it.

    Args:
        peak_flops: matmul FLOP/s of all devices of the run.
        unscored: the record that lacks the evaluation of its step.
        on_first: called when the first update has been made.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        console: Console,
        sink: Sink,
        trackers: Trackers,
        ledger: Ledger,
        device_meter: DeviceMeter,
        comm_meter: Meter | NoMeter,
        peak_flops: float,
        throughput: Throughput,
        unscored: StepRecord | None = None,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._console = console
        self._sink = sink
        self._trackers = trackers
        self._ledger = ledger
        self._device_meter = device_meter
        self._comm_meter = comm_meter
        self._peak_flops = peak_flops
        self._throughput = throughput
        self._rate = Rate(0.0, 0)
        """Of everything since the last record: the update and the skipped batches before it."""
        self._memory: MemorySummary | None = None
        self._on_first: Callable[[], None] | None = on_first
        self._comm = CommSummary(0.0, 0.0, 0, 0)
        """Of the update just made and the border before it."""
        self._skipped = 0
        self.last = unscored
        """The newest record: of this process, or the one whose evaluation an earlier start was stopped in."""
        self.measured_peak_bytes: int | None = None
        """Highest bytes of any update that was measured."""

    def start(self, state: TrainState) -> None:
        """The first update is about to begin, of a run that stands at `state`."""
        self._skipped = state.skipped_since_step
        self._comm_meter.start_step()
        self._throughput.start()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around one update, data included."""
        self._device_meter.start_step()
        with self._ledger.window():
            yield
        rate = self._throughput.step(self._plan.batch.tokens_per_step)
        self._rate = Rate(self._rate.seconds + rate.seconds, self._rate.tokens + rate.tokens)
        self._memory = self._ledger.summary()
        self._comm = self._comm_meter.summary()
        if self._on_first is not None:
            self._on_first()
            self._on_first = None

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Around work that belongs to no update; `what` is shown while it lasts."""
        self._console.status(what)
        self._device_meter.wait()
        with self._throughput.excluded():
            yield
        self._console.status("")

    def skipped(self, state: TrainState, result: StepResult) -> None:
        """The batch was consumed but made no step."""
        self._skipped += 1
        self._console.line(
            f"skipped a batch before step {state.step + 1}: loss {result.loss}, gradient norm {result.grad_norm} "
            f"({state.skipped_since_step} in a row)"
        )
        self._console.warn("batches with non-finite loss or gradients were skipped; `skipped` in metrics.jsonl counts them")

    def report(self, state: TrainState, result: StepResult, val_loss: float | None) -> None:
        """Write the record of the update just made."""
        record = self._record(state, result, val_loss)
        self._sink.write(record)
        self._show(record)

    def report_unscored(self, state: TrainState, result: StepResult) -> None:
        """Write the record of an update whose evaluation was cut short; the next start completes it."""
        self._sink.write(replace(self._record(state, result, None), unscored=True))

    def complete(self, val_loss: float) -> None:
        """The evaluation that was cut short has been made up for."""
        if self.last is not None:
            record = replace(self.last, val_loss=val_loss, unscored=None)
            self.last = record
            self._sink.replace_last(record)
            self._show(record)

    def _record(self, state: TrainState, result: StepResult, val_loss: float | None) -> StepRecord:
        speed = self._rate.tokens_per_second
        record = StepRecord(
            step=state.step,
            tokens=state.consumed_tokens,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            step_seconds=self._rate.seconds,
            tokens_per_second=speed,
            mfu=mfu(speed, self._plan.flops_per_token, self._peak_flops),
            peak_memory_bytes=self._device_meter.peak_bytes(self._memory),
            memory=self._memory,
            skipped=self._skipped,
            exposed_comm_seconds=self._comm.exposed_seconds if self._comm.num_calls else None,
            val_loss=val_loss,
        )
        self._skipped, self._rate = 0, Rate(0.0, 0)
        self._comm_meter.start_step()
        self.last = record
        if record.peak_memory_bytes is not None:
            self.measured_peak_bytes = max(record.peak_memory_bytes, self.measured_peak_bytes or 0)
        return record

    def _show(self, record: StepRecord) -> None:
        self._trackers.log(record)
        self._console.step(record)

    def sync(self) -> None:
        """Make all records durable; a checkpoint that follows counts on them."""
        self._sink.sync()

    def tokens_per_second(self) -> float:
        """Speed over all updates of this process."""
        return self._throughput.total().tokens_per_second
