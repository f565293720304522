"""The rules of the storage ledger on single tensors; `test_memory_training.py` has whole training steps."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from llmtrain.metrics.memory import MemorySummary, NoLedger, StorageLedger

CPU = torch.device("cpu")


def summary_of(work: Callable[[StorageLedger], object]) -> MemorySummary:
    ledger = StorageLedger(CPU)
    with ledger.window():
        kept = work(ledger)
    summary = ledger.summary()
    assert summary is not None
    del kept
    return summary


def test_views_and_aliases_count_once() -> None:
    def work(ledger: StorageLedger) -> object:
        base = torch.zeros(1000)
        return base, base.view(10, 100), base[5:], base.detach(), base.t(), base.add_(1), base.unsqueeze(0).expand(7, 1000)

    assert summary_of(work).peak_bytes == 4000


def test_a_death_is_booked_out_at_once() -> None:
    def work(ledger: StorageLedger) -> object:
        for _ in range(10):
            torch.zeros(1000)
        return None

    assert summary_of(work).peak_bytes == 4000


def test_tensors_from_outside_count_only_when_adopted() -> None:
    outside = torch.zeros(1000)
    assert summary_of(lambda ledger: outside.view(10, 100)).peak_bytes == 0

    def adopting(ledger: StorageLedger) -> object:
        ledger.adopt([outside], "params")
        ledger.adopt([outside.view(-1)], "params")
        return None

    summary = summary_of(adopting)
    assert summary.at_peak["params"] == summary.peak_bytes == 4000


def test_resize_is_followed() -> None:
    def by_tensor(ledger: StorageLedger) -> object:
        tensor = torch.zeros(10)
        return tensor.resize_(1000)

    assert summary_of(by_tensor).peak_bytes == 4000

    def by_storage(ledger: StorageLedger) -> object:
        first = torch.zeros(1000)
        first.untyped_storage().resize_(0)
        return first, torch.zeros(900)

    assert summary_of(by_storage).peak_bytes == 4000
    assert "resize_" not in vars(torch.UntypedStorage), "torch is left as it was"


def test_out_argument_that_grows_is_followed() -> None:
    def work(ledger: StorageLedger) -> object:
        out = torch.zeros(0)
        return torch.add(torch.zeros(1000), 1, out=out)

    assert summary_of(work).peak_bytes == 8000


def test_adopting_corrects_the_past() -> None:
    def work(ledger: StorageLedger) -> object:
        gradient = torch.zeros(1000)
        torch.zeros(500)  # the highest instant, before anyone knows whose the first one is
        ledger.adopt([gradient], "grads")
        return gradient

    summary = summary_of(work)
    assert summary.at_peak == {**dict.fromkeys(summary.at_peak, 0), "grads": 4000, "other": 2000}


def test_each_peak_is_its_own_instant() -> None:
    def work(ledger: StorageLedger) -> object:
        with ledger.region("activations"):
            torch.zeros(1000)
        with ledger.region("loss"):
            torch.zeros(300)
        torch.zeros(2000)
        return None

    summary = summary_of(work)
    assert (summary.peak_bytes, summary.activations_peak_bytes, summary.loss_peak_bytes) == (8000, 4000, 1200)
    assert summary.at_peak["activations"] == summary.at_peak["loss"] == 0


def test_host_bytes_are_apart() -> None:
    def work(ledger: StorageLedger) -> object:
        with ledger.region("host"):
            return torch.zeros(1000), torch.zeros(10)

    summary = summary_of(work)
    assert summary.peak_bytes == 0
    mixed = summary_of(lambda ledger: (work(ledger), torch.zeros(5)))
    assert mixed.at_peak["host"] == 4040 and mixed.peak_bytes == 20


def test_a_window_starts_from_what_lives() -> None:
    ledger = StorageLedger(CPU)
    with ledger.window():
        kept = torch.zeros(1000)
        torch.zeros(5000)
    del_me = kept.clone()  # made outside a window: not seen
    with ledger.window():
        torch.zeros(100)
    summary = ledger.summary()
    assert summary is not None and summary.peak_bytes == 4400
    del kept, del_me
    gc.collect()
    with ledger.window():
        pass
    summary = ledger.summary()
    assert summary is not None and summary.peak_bytes == 0


def test_a_failure_inside_a_window_leaves_nothing_behind() -> None:
    ledger = StorageLedger(CPU)
    with pytest.raises(ZeroDivisionError), ledger.window():
        with ledger.region("loss"):
            1 / 0
    assert "resize_" not in vars(torch.UntypedStorage)
    with ledger.window():
        torch.zeros(10)
    summary = ledger.summary()
    assert summary is not None and summary.at_peak["other"] == 40


def test_no_ledger_measures_nothing() -> None:
    ledger = NoLedger()
    ledger.watch(nn.Linear(2, 2))
    with ledger.window(), ledger.region("loss"), ledger.backward():
        pass
    assert ledger.summary() is None
