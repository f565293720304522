"""Nearest numbers; and no number that a config may hold makes looking for them long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.compose import compose_config
from llmtrain.config.declare import MAX_BATCH_TOKENS
from llmtrain.config.errors import ConfigError
from llmtrain.config.keys import ValueKind, leaves
from llmtrain.config.suggest import divisors, divisors_near


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def test_divisors_of_the_largest_numbers() -> None:
    largest_prime = MAX_BATCH_TOKENS - 5
    assert divisors(largest_prime) == [1, largest_prime]
    assert divisors(MAX_BATCH_TOKENS) == [2**power for power in range(37)]
    assert len(divisors(10**18)) == 19**2  # 2^18 5^18: small factors are divided out, so its square root does not matter


@pytest.mark.parametrize(
    ("number", "value", "near"),
    [(16, 5, [4, 8]), (16, 4, [4, 8]), (16, 32, [16]), (7, 3, [1, 7]), (2**24 - 3, 2, [1, 2**24 - 3])],
)
def test_divisors_near(number: int, value: int, near: list[int]) -> None:
    assert divisors_near(number, value) == near


def test_every_count_has_an_upper_bound() -> None:
    counts = [info for info in leaves().values() if info.kind is ValueKind.WHOLE]
    assert len(counts) > 30
    for info in counts:
        assert info.le is not None or info.lt is not None, info.name
        assert (info.le or info.lt or 0) < 10**15, f"{info.name}: a message would round it"


@pytest.mark.usefixtures("remembered_files")
@pytest.mark.parametrize("word", ["accumulation.global_batch_size=1e18", "train.steps=1e18", "model.attention.num_heads=1e15"])
def test_a_count_beyond_reason_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([word])
    key = word.partition("=")[0]
    (problem,) = caught.value.problems
    assert problem.what == word and problem.cure == f"{key}={int(leaves()[key].le or 0)}"
