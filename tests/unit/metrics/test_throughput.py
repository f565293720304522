"""Tokens per second with a clock that the test turns, and peaks."""

from __future__ import annotations

import pytest
import torch

from llmtrain.metrics import throughput
from llmtrain.metrics.throughput import DATA_SHEET_FLOPS, Throughput, mfu, peak_flops


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


def test_b59_tokens_per_second_of_a_slowed_step() -> None:
    clock = FakeClock()
    meter = Throughput(clock)
    clock.pass_seconds(50)  # preparing is no step
    meter.start()
    rates = []
    for seconds in (0.5, 0.5, 2.0, 0.5):
        clock.pass_seconds(seconds)
        rates.append(meter.step(tokens=1000))
    assert [rate.seconds for rate in rates] == [0.5, 0.5, 2.0, 0.5]
    assert [rate.tokens_per_second for rate in rates] == [2000, 2000, 500, 2000]
    assert meter.total().tokens_per_second == 4000 / 3.5


def test_b59_evaluation_and_saving_belong_to_no_step() -> None:
    clock = FakeClock()
    meter = Throughput(clock)
    meter.start()
    clock.pass_seconds(1)
    meter.step(1000)
    with meter.excluded():
        clock.pass_seconds(30)
    clock.pass_seconds(0.25)
    with meter.excluded():
        clock.pass_seconds(7)
    clock.pass_seconds(0.75)
    rate = meter.step(1000)
    assert (rate.seconds, rate.tokens_per_second) == (1.0, 1000.0)
    clock.pass_seconds(2)
    assert meter.step(1000).seconds == 2.0, "what was excluded is so once"
    assert meter.total().seconds == 4.0


def test_excluded_time_counts_as_such_when_it_ends_in_an_error() -> None:
    clock = FakeClock()
    meter = Throughput(clock)
    meter.start()
    with pytest.raises(RuntimeError), meter.excluded():
        clock.pass_seconds(5)
        raise RuntimeError
    clock.pass_seconds(1)
    assert meter.step(10).seconds == 1.0


def test_a_step_needs_a_start() -> None:
    with pytest.raises(AssertionError, match="start"):
        Throughput(FakeClock()).step(1)


def test_b59_mfu_is_over_all_devices() -> None:
    # 565,248 FLOPs a token (the small model of the convention) at 1e6 tokens/s on two devices of 1e12 FLOP/s each.
    assert mfu(1e6, 565_248, 2e12) == pytest.approx(0.282624)


def test_peak_is_measured_on_a_cpu() -> None:
    before = torch.random.get_rng_state()
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert peak.source == "measured matmul"
    assert 1e8 < peak.flops_per_second < 1e15
    assert torch.equal(torch.random.get_rng_state(), before), "measuring draws nothing from the run's generator"


def test_measured_peak_is_the_best_product_and_sizes_grow_until_one_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    sizes = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> None:
        clock.pass_seconds(2 * x.shape[0] ** 3 / 1e11 + (0.0 if x.shape[0] in sizes else 0.4))  # a kernel is loaded
        sizes.append(x.shape[0])

    monkeypatch.setattr(throughput.functional, "linear", product)
    peak = peak_flops(torch.device("cpu"), torch.float32, clock)
    assert sorted(set(sizes)) == [256, 512, 1024]
    assert peak.flops_per_second == pytest.approx(1e11)
    assert clock.now - 100 < 2.0


def test_the_data_sheet_is_used_by_whole_name_and_16_bit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(throughput, "_measured_flops", lambda *_: 1.0)
    names = iter(["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA H100 Imaginary"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    found = [peak_flops(cuda, torch.bfloat16) for _ in range(5)]
    assert [peak.flops_per_second for peak in found] == [989.5e12, 756.5e12, 312e12, 989.5e12, 1.0]
    assert [peak.source for peak in found] == ["data sheet"] * 4 + ["measured matmul"]
    assert peak_flops(cuda, torch.float32).source == "measured matmul"


def test_listed_peaks_are_dense() -> None:
    # The figures with sparsity, which data sheets print first, are twice these.
    assert max(DATA_SHEET_FLOPS.values()) <= 2500e12
    assert all(flops >= 100e12 for flops in DATA_SHEET_FLOPS.values())
