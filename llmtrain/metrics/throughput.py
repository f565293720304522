"""Speed: tokens per second, and the share of the devices' peak that the model's arithmetic uses (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional

Clock = Callable[[], float]
"""Seconds since some fixed instant."""

MEASURE_SECONDS = 0.3
SHORTEST_PRODUCT_SECONDS = 0.01
FIRST_SIZE, LARGEST_SIZE = 256, 8192

TERA = 1e12
DATA_SHEET_FLOPS: dict[str, float] = {
    # A100 data sheet: 312 dense (624 is with sparsity).
    "NVIDIA A100-SXM4-40GB": 312 * TERA,
    "NVIDIA A100-SXM4-80GB": 312 * TERA,
    "NVIDIA A100-PCIE-40GB": 312 * TERA,
    "NVIDIA A100 80GB PCIe": 312 * TERA,
    # H100 data sheet, half of its figures with sparsity: SXM 1979, PCIe 1513, NVL 1671.
    "NVIDIA H100 80GB HBM3": 989.5 * TERA,
    "NVIDIA H100 PCIe": 756.5 * TERA,
    "NVIDIA H100 NVL": 835.5 * TERA,
    # H200 and GH200 data sheets, half of: SXM 1979, NVL 1671, GH200 1979.
    "NVIDIA H200": 989.5 * TERA,
    "NVIDIA H200 NVL": 835.5 * TERA,
    "NVIDIA GH200 480GB": 989.5 * TERA,
    # Blackwell architecture brief, dense: HGX B200 2.25, GB200 2.5 PFLOP/s.
    "NVIDIA B200": 2250 * TERA,
    "NVIDIA GB200": 2500 * TERA,
    # L40S and L4 data sheets, dense: 362.05, 121 (half of 242).
    "NVIDIA L40S": 362.05 * TERA,
    "NVIDIA L4": 121 * TERA,
    # Ada and Blackwell (GeForce) architecture papers, dense, fp32 accumulation.
    "NVIDIA GeForce RTX 4090": 165.2 * TERA,
    "NVIDIA GeForce RTX 5090": 209.5 * TERA,
}
"""Name that CUDA reports → dense bf16 (= fp16 with fp32 accumulation) matmul FLOP/s by the maker. Names are matched whole: variants
of a chip differ by a third, so a name that is not here is measured and not guessed."""


@dataclass(frozen=True)
class PeakFlops:
    """What a device could do at most."""

    flops_per_second: float
    source: str
    """Where the number is from: `data sheet` or `measured matmul`."""


def peak_flops(device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter) -> PeakFlops:
    """Matmul FLOP/s of one device at `dtype`: the maker's figure where known, else the best of a third of a second of products.

    The measurement uses the threads and matmul settings in force, so call it after they are set. A measured peak is what the
    library reaches, hence lower than a data sheet: an MFU against it reads higher.
    """
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        listed = DATA_SHEET_FLOPS.get(torch.cuda.get_device_name(device))
        if listed is not None:
            return PeakFlops(listed, "data sheet")
    return PeakFlops(_measured_flops(device, dtype, clock), "measured matmul")


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops_all_devices: float) -> float:
    """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B): needed FLOP/s over the peak FLOP/s of all devices of the run."""
    return tokens_per_second * flops_per_token / peak_flops_all_devices


@dataclass(frozen=True)
class Rate:
    """Work done in a stretch of time."""

    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Throughput:
    """Times updates back to back, so that waiting for data counts; what is marked as excluded does not.

    On an asynchronous device the end of an update must be waited for (reading the loss does) before `step` is called.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._excluded = 0.0
        self._total = Rate(0.0, 0)

    def start(self) -> None:
        """The first update begins now."""
        self._began = self._clock()
        self._excluded = 0.0

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Evaluation, saving: time that belongs to no update."""
        before = self._clock()
        try:
            yield
        finally:
            self._excluded += self._clock() - before

    def step(self, tokens: int) -> Rate:
        """An update over `tokens` tokens (of all ranks, each once) ended now, and the next one begins."""
        assert self._began is not None, "start() comes before the first step"
        now = self._clock()
        rate = Rate(now - self._began - self._excluded, tokens)
        self._total = Rate(self._total.seconds + rate.seconds, self._total.tokens + tokens)
        self._began, self._excluded = now, 0.0
        return rate

    def total(self) -> Rate:
        """All updates since `start`."""
        return self._total


def _measured_flops(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """Best FLOP/s of square products x Wᵀ, doubling their size until one takes long enough to be timed well."""
    size, best, deadline = FIRST_SIZE, 0.0, clock() + MEASURE_SECONDS
    x, weight = _random_squares(size, device, dtype)
    while True:
        # The first product of a size may load a kernel; only the faster of the two tells.
        seconds = min(_product_seconds(x, weight, clock), _product_seconds(x, weight, clock))
        best = max(best, 2 * size**3 / seconds)
        if seconds < SHORTEST_PRODUCT_SECONDS and size < LARGEST_SIZE:
            size *= 2
            x, weight = _random_squares(size, device, dtype)
        elif clock() >= deadline:
            return best


def _random_squares(size: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two [size, size] matrices. Random, as chips run cooler and faster on constant ones; not from the run's own generator."""
    generator = torch.Generator(device).manual_seed(0)
    pair = torch.rand(2, size, size, generator=generator, device=device).to(dtype)
    return pair[0], pair[1]


def _product_seconds(x: torch.Tensor, weight: torch.Tensor, clock: Clock) -> float:
    _wait(x.device)
    before = clock()
    functional.linear(x, weight)
    _wait(x.device)
    return max(clock() - before, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
