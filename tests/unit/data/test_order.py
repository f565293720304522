"""The computed shuffle is a permutation, depends on seed and epoch only, and looks like a random one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.order import shuffled


@given(num_rows=st.integers(1, 700), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_row_exactly_once(num_rows: int, seed: int, epoch: int) -> None:
    rows = shuffled(np.arange(num_rows), num_rows, seed=seed, epoch=epoch)
    assert sorted(rows.tolist()) == list(range(num_rows))


def test_each_place_is_computed_by_itself() -> None:
    whole = shuffled(np.arange(1000), 1000, seed=3, epoch=2)
    places = np.array([999, 0, 17, 17, 512])
    assert shuffled(places, 1000, seed=3, epoch=2).tolist() == whole[places].tolist()


@pytest.mark.parametrize("other", [{"seed": 4, "epoch": 2}, {"seed": 3, "epoch": 3}, {"seed": 2, "epoch": 3}])
def test_other_seed_or_epoch_is_unrelated(other: dict[str, int]) -> None:
    first = shuffled(np.arange(1000), 1000, seed=3, epoch=2)
    second = shuffled(np.arange(1000), 1000, **other)
    # Two random permutations agree in one place on average.
    assert (first == second).sum() <= 8


@pytest.mark.parametrize("num_rows", [5, 37, 100])
def test_each_row_is_equally_likely_at_each_place(num_rows: int) -> None:
    trials = 4000
    counts = np.zeros((num_rows, num_rows))
    places = np.arange(num_rows)
    for seed in range(trials):
        counts[places, shuffled(places, num_rows, seed=seed, epoch=0)] += 1
    expected = trials / num_rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (num_rows - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_spread() -> None:
    rows = shuffled(np.arange(2**16), 2**16, seed=0, epoch=0).astype(float)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(rows.size), rows)[0, 1]) < 0.02


def test_numbers_never_change() -> None:
    """A saved run resumes under any later version: the order is part of the format."""
    assert shuffled(np.arange(10), 10, seed=0, epoch=0).tolist() == [4, 2, 5, 0, 8, 6, 7, 1, 3, 9]
    assert shuffled(np.array([0, 1, 10**12 - 1]), 10**12, seed=7, epoch=3).tolist() == [
        263462123647,
        399857241312,
        966369916472,
    ]
