"""Where a training stands, put into words; both consoles show the same fields."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rich.cells import cell_len

from llmtrain.metrics.format import format_count, format_duration, format_lr, format_share
from llmtrain.metrics.meters import StepRecord
from llmtrain.metrics.throughput import Clock
from llmtrain.plan.report import format_bytes


class TrainingProgress:
    """Collects records and says the last known value of everything.

    Args:
        first_step: updates made before this process began (0 unless resumed).
        total_steps: update at which this process stops.
        window: updates that speed and MFU are averaged over.
        baseline_loss: validation loss of guessing by frequency alone, shown beside the real one.
    """

    def __init__(self, first_step: int, total_steps: int, window: int, baseline_loss: float | None, clock: Clock) -> None:
        self.step = self.first_step = first_step
        self.total_steps = total_steps
        self._records: deque[StepRecord] = deque(maxlen=window)
        self._baseline_loss = baseline_loss
        self._clock = clock
        self._began = clock()
        self._val_loss: float | None = None
        self._peak_bytes: int | None = None
        self._skipped = 0

    def update(self, record: StepRecord) -> None:
        self.step = record.step
        self._records.append(record)
        self._skipped += record.skipped
        if record.val_loss is not None:
            self._val_loss = record.val_loss
        if record.peak_memory_bytes is not None:
            self._peak_bytes = record.peak_memory_bytes

    @property
    def fraction(self) -> float:
        """Share of the run's updates that are made."""
        return self.step / self.total_steps if self.total_steps else 1.0

    def position(self) -> str:
        """`step  700/1000`."""
        return f"step {self.step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def quality(self, *, with_validation: bool) -> list[str]:
        """Loss, on request the newest validation loss, learning rate and gradient norm."""
        if not self._records:
            return []
        last = self._records[-1]
        val = [f"val {self._val_loss:.4f}"] if with_validation and self._val_loss is not None else []
        return [f"loss {last.loss:.4f}", *val, f"lr {format_lr(last.lr)}", f"gnorm {last.grad_norm:.3g}"]

    def speed(self) -> list[str]:
        """Tokens per second and MFU over the window, memory, time left, and skipped batches if there were any."""
        seconds = sum(record.step_seconds for record in self._records)
        if not seconds:
            return []
        tokens = sum(record.tokens_per_second * record.step_seconds for record in self._records)
        fields = [f"{format_count(tokens / seconds)} tok/s"]
        if all(record.mfu is not None for record in self._records):
            share = sum((record.mfu or 0.0) * record.step_seconds for record in self._records) / seconds
            fields.append(f"MFU {format_share(share)} (causal)")
        if self._peak_bytes is not None:
            fields.append(format_bytes(self._peak_bytes))
        fields.append(f"eta {self._eta()}")
        if self._skipped:
            fields.append(f"skipped {self._skipped}")
        return fields

    def evaluated(self) -> str:
        """The line of an evaluation that stays on the screen."""
        last = self._records[-1]
        beside = "" if self._baseline_loss is None else f"  (frequencies alone: {self._baseline_loss:.4f})"
        return f"{self.position()}  loss {last.loss:.4f}  val {last.val_loss:.4f}{beside}"

    def _eta(self) -> str:
        """Time left if the rest goes like what this process has done, evaluation and saving included."""
        done = self.step - self.first_step
        return format_duration((self._clock() - self._began) / done * (self.total_steps - self.step)) if done else "?"


def fit(fields: Sequence[str], width: int, separator: str = "  ") -> str:
    """As many of the fields, from the first on, as a line of `width` columns holds."""
    line = ""
    for field in fields:
        joined = f"{line}{separator}{field}" if line else field
        if cell_len(joined) > width:
            break
        line = joined
    return line
