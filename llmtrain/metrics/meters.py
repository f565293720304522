"""What is known about one update: the record that goes to `metrics.jsonl` and to the console."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmtrain.metrics.memory import CATEGORIES, MemorySummary


@dataclass(frozen=True)
class StepRecord:
    """One update; None means "does not apply" and is left out of the file."""

    step: int
    """Number of the update, from 1."""
    tokens: int
    """Input tokens consumed since the start of the run, those of skipped batches included."""
    loss: float
    """Sum over target tokens / number of target tokens, over all micro-batches and ranks of this update (nats)."""
    lr: float
    grad_norm: float
    """Global norm before clipping."""
    step_seconds: float
    """Wall time since the previous record: the update and the batches skipped before it, evaluation and saving excluded."""
    tokens_per_second: float
    """Over all ranks; a token that several ranks share counts once."""
    mfu: float | None = None
    """Share of the peak of all devices, causal attention counted at half."""
    peak_memory_bytes: int | None = None
    """Highest bytes of tensors on this rank's device during the update."""
    memory: MemorySummary | None = None
    """What the ledger saw; in the file `memory`, `activations_peak_bytes` and `loss_peak_bytes`."""
    loss_scale: float | None = None
    skipped: int = 0
    """Batches skipped for non-finite gradients since the previous update."""
    exposed_comm_seconds: float | None = None
    val_loss: float | None = None
    """Token mean over the validation tokens scored after this update (nats)."""
    unscored: bool | None = None
    """True while `val_loss` is owed: a signal cut the evaluation short, and the next start makes up for it."""

    def to_dict(self) -> dict[str, Any]:
        """The record with the names of `metrics.jsonl`, in the order of `METRIC_KEYS`, without what does not apply."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.memory is not None:
            assert set(self.memory.at_peak) <= set(CATEGORIES), f"unknown memory categories in {self.memory.at_peak}"
            values["memory"] = dict(self.memory.at_peak)
            values["activations_peak_bytes"] = self.memory.activations_peak_bytes
            values["loss_peak_bytes"] = self.memory.loss_peak_bytes
        assert set(values) <= set(METRIC_KEYS), f"unknown metrics {sorted(set(values) - set(METRIC_KEYS))}"
        return {key: values[key] for key in METRIC_KEYS if values.get(key) is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRecord:
        """The record that `to_dict` wrote.

        Raises:
            ValueError: a name is unknown, or one that every record has is missing.
        """
        unknown = sorted(set(values) - set(METRIC_KEYS))
        missing = [key for key in ALWAYS_THERE if key not in values]
        if unknown or missing:
            raise ValueError(f"unknown names {unknown}, missing names {missing}")
        plain = dict(values)
        at_peak = plain.pop("memory", None)
        activations, loss = plain.pop("activations_peak_bytes", None), plain.pop("loss_peak_bytes", None)
        if at_peak is not None:
            total = sum(nbytes for category, nbytes in at_peak.items() if category != "host")
            plain["memory"] = MemorySummary(total, at_peak, activations, loss)
        return cls(**plain)


METRIC_KEYS = (
    "step",
    "tokens",
    "loss",
    "lr",
    "grad_norm",
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
    "memory",
    "activations_peak_bytes",
    "loss_peak_bytes",
    "loss_scale",
    "skipped",
    "exposed_comm_seconds",
    "val_loss",
    "unscored",
)
"""Every name a record may have."""

ALWAYS_THERE = ("step", "tokens", "loss", "lr", "grad_norm", "step_seconds", "tokens_per_second")


class DeviceMeter:
    """The device's own count of its highest memory use and of the work it still has, where there is one (CUDA, not a CPU)."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device

    def start_step(self) -> None:
        """Forget what was before."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def wait(self) -> None:
        """Wait until the device has done what it was given, so that the time of other work begins when the update has ended."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def peak_bytes(self, ledger: MemorySummary | None) -> int | None:
        """Highest bytes since `start_step`; on a device without a count what the ledger saw, if it looked."""
        if self._is_cuda:
            return int(torch.cuda.max_memory_allocated(self._device))
        return None if ledger is None else ledger.peak_bytes
