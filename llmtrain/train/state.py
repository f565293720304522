"""The counters of a run, and nothing else: with the weights and moments they are all a resumed run needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Progress of a run.

    There is one clock, `step`: the learning rate, stop conditions, saves and evaluations depend on it alone. A batch whose gradients
    were not finite is consumed but makes no step.
    """

    step: int = 0
    """Optimizer updates made."""
    consumed_samples: int = 0
    """Sequences taken from the data order, skipped batches included; the position of the loader."""
    consumed_tokens: int = 0
    """Input tokens of those sequences."""
    skipped: int = 0
    """Batches skipped since the beginning."""
    skipped_since_step: int = 0
    """Batches skipped in a row since the last update."""

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        return cls(**{name: int(values[name]) for name in cls.__dataclass_fields__})

    def consume(self, *, samples: int, tokens: int, skipped: bool) -> None:
        """Count one batch: as a step, or as skipped."""
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        if skipped:
            self.skipped += 1
            self.skipped_since_step += 1
        else:
            self.step += 1
            self.skipped_since_step = 0
