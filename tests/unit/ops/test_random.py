"""Counter-based numbers: uniform, independent, and a function of nothing but their place."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from llmtrain.ops.random import LANE_LEVELS, DropoutKey, Site, uniform_lanes

WORD = 2**64
GOLDEN, SECOND = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def key(seed: int = 0, update: int = 0, first_sample: int = 0, num_samples: int = 64) -> DropoutKey:
    return DropoutKey(seed, update, torch.arange(first_sample, first_sample + num_samples))


def draw(key: DropoutKey, layer: int = 0, site: Site = Site.FEED_FORWARD, positions: int = 32, channels: int = 128) -> Tensor:
    """Lanes as numbers in the middle of their levels, on (0, 1)."""
    return (uniform_lanes(key, layer, site, positions, channels).float() + (LANE_LEVELS // 2 + 0.5)) / LANE_LEVELS


def finalise(x: int) -> int:
    """SplitMix64's output function, from its published form."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


@pytest.mark.parametrize(("seed", "update", "layer", "site"), [(0, 0, 0, 0), (2**32 - 1, 10**6, 79, 4), (3, 1, 2, 1)])
def test_lanes_are_splitmix64(seed: int, update: int, layer: int, site: int) -> None:
    samples = [0, 5, 2**40]
    lanes = uniform_lanes(DropoutKey(seed, update, torch.tensor(samples)), layer, Site(site), 3, 10)
    base = 0
    for part in (seed, update, layer * 5 + site):
        base = finalise((base + part + GOLDEN) % WORD)
    for (b, sample), t, c in itertools.product(enumerate(samples), range(3), range(10)):
        row = finalise((finalise((sample * GOLDEN + base) % WORD) + t * SECOND) % WORD)
        word = finalise((row + (c // 4 + 1) * GOLDEN) % WORD)
        lane = (word >> (16 * (c % 4))) % 2**16
        assert lanes[b, t, c].item() == lane - (2**16 if lane >= 2**15 else 0)


def test_numbers_are_uniform() -> None:
    numbers = draw(key()).flatten()
    count = numbers.numel()
    assert 0 < numbers.min() and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / count) ** 0.5
    observed = torch.histc(numbers, 256, 0, 1)
    chi_square = ((observed - count / 256) ** 2 / (count / 256)).sum()
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


def test_every_bit_is_fair() -> None:
    lanes = uniform_lanes(key(), 0, Site.EMBEDDING, 32, 128).flatten().int()
    for bit in range(16):
        share = ((lanes >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 4 * 0.5 / lanes.numel() ** 0.5, bit


OTHERS = {
    "seed": draw(key(seed=1)),
    "update": draw(key(update=1)),
    "layer": draw(key(), layer=1),
    "site": draw(key(), site=Site.FEED_FORWARD_RESIDUAL),
    "next layer's first site": draw(key(), layer=1, site=Site.EMBEDDING),
    "sample": draw(key(first_sample=1)),
    "position": draw(key(), positions=33)[:, 1:],
    "channel": draw(key(), channels=129)[:, :, 1:],
    "group of channels": draw(key(), channels=132)[:, :, 4:],
}


@pytest.mark.parametrize("what", OTHERS)
def test_numbers_of_different_places_are_independent(what: str) -> None:
    numbers, others = draw(key()).flatten() - 0.5, OTHERS[what].flatten() - 0.5
    correlation = (numbers * others).mean() * 12
    assert abs(correlation) < 4 / numbers.numel() ** 0.5
    assert (numbers == others).double().mean() < 1e-4


def test_numbers_do_not_depend_on_how_the_batch_is_cut() -> None:
    whole = draw(key(num_samples=8))
    parts = [draw(key(first_sample=first, num_samples=size)) for first, size in ((0, 1), (1, 4), (5, 3))]
    assert torch.equal(whole, torch.cat(parts))


def test_a_shorter_or_narrower_draw_is_a_part_of_the_whole() -> None:
    whole = draw(key(num_samples=4), positions=9, channels=130)
    assert torch.equal(draw(key(num_samples=4), positions=5, channels=7), whole[:, :5, :7])


def test_torch_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    draw(key(num_samples=2))
    assert torch.equal(torch.get_rng_state(), before)
