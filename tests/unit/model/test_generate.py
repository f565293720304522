"""Cached decoding equals the full forward; sampling honours each of its settings."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import models as shapes
from helpers.attention import HERE, build_here
from helpers.models import WINDOWED, build, random_tokens
from torch import Tensor

from llmtrain.config.errors import ConfigError
from llmtrain.config.typed import GenerateConfig
from llmtrain.model.cache import KVCache
from llmtrain.model.generate import generate, sample
from llmtrain.model.transformer import Transformer

SHAPES = shapes.SHAPES | {"windows": WINDOWED}
GREEDY = GenerateConfig(step=None, prompt="", max_tokens=12, temperature=0.0, top_k=None, top_p=None, seed=0)
RANDOM = replace(GREEDY, temperature=1.0)


def cache_for(model: Transformer, batch_size: int, capacity: int) -> KVCache:
    return KVCache(model.config, model.precision, batch_size=batch_size, capacity=capacity, device="cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "kernel"), HERE)
@pytest.mark.parametrize("pieces", [(20,), (1,) * 20, (7, 1, 1, 5, 6)], ids=["at once", "one by one", "mixed"])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(shape: str, name: str, kernel: str, pieces: tuple[int, ...]) -> None:
    model, tokens = build(SHAPES[shape], backend=build_here(name, kernel)), random_tokens(3, 20)
    cache, found, start = cache_for(model, 3, 20), [], 0
    for piece in pieces:
        found.append(model(tokens[:, start : start + piece], cache=cache))
        start += piece
        assert cache.length == start
    torch.testing.assert_close(torch.cat(found, dim=1), model(tokens), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_cleared_cache_starts_again() -> None:
    model, cache = build(SHAPES["llama"]), None
    cache = cache_for(model, 1, 10)
    model(random_tokens(1, 10), cache=cache)
    cache.clear()
    tokens = random_tokens(1, 6, seed=1)
    torch.testing.assert_close(model(tokens, cache=cache), model(tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="cannot hold 11"):
        model(random_tokens(1, 5), cache=cache)


@torch.no_grad()
def naive(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, all tokens read again at every step."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(model.logits(model(torch.tensor([history])))[0, -1].argmax()))
    return history[len(prompt) :]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_generation_is_the_likeliest_continuation(shape: str) -> None:
    model, prompt = build(SHAPES[shape], backend="sdpa"), random_tokens(9).tolist()
    assert list(generate(model, prompt, GREEDY, eos_ids=frozenset())) == naive(model, prompt, 12)


def test_generation_stops_at_eos_and_at_max_tokens() -> None:
    model, prompt = build(SHAPES["llama"]), [1, 2, 3]
    tokens = list(generate(model, prompt, GREEDY, eos_ids=frozenset()))
    assert len(tokens) == 12
    eos = tokens[4]
    assert list(generate(model, prompt, GREEDY, eos_ids=frozenset({eos}))) == tokens[: tokens.index(eos)]


def test_generation_depends_on_its_seed_alone() -> None:
    model, prompt = build(SHAPES["llama"]), [1, 2, 3]
    first = list(generate(model, prompt, RANDOM, eos_ids=frozenset()))
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    assert list(generate(model, prompt, RANDOM, eos_ids=frozenset())) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert list(generate(model, prompt, replace(RANDOM, seed=1), eos_ids=frozenset())) != first


def test_generation_leaves_the_model_as_it_was() -> None:
    model = build(SHAPES["llama"])
    for training in (True, False):
        model.train(training)
        list(generate(model, [1], GREEDY, eos_ids=frozenset()))
        assert model.training is training and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_generation_goes_on_when_the_positions_are_used_up(shape: str) -> None:
    """Of 16 positions the newest 8 tokens are read again as a context of their own."""
    model, prompt = build(replace(SHAPES[shape], max_positions=16)), random_tokens(10).tolist()
    tokens = list(generate(model, prompt, replace(GREEDY, max_tokens=20), eos_ids=frozenset()))
    history = prompt + naive(model, prompt, 7)  # the 17th token follows from all 16
    while len(history) < 30:
        history += naive(model, history[-8:], min(9, 30 - len(history)))
    assert tokens == history[10:]


@pytest.mark.parametrize(("prompt", "message"), [([], "of 0 tokens"), ([1] * 49, "1 to 48 tokens")])
def test_a_prompt_that_does_not_fit_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(generate(build(SHAPES["llama"]), prompt, GREEDY, eos_ids=frozenset()))


@pytest.mark.parametrize(
    "settings", [GREEDY, RANDOM, replace(RANDOM, temperature=100.0), replace(RANDOM, top_p=0.99, top_k=60)]
)
def test_b17_padded_rows_are_never_sampled(settings: GenerateConfig) -> None:
    """The embedding has 61 rows, the tokenizer 50 tokens, and the model would rather say one of the 11 others."""
    model = build(SHAPES["llama"])
    with torch.no_grad():
        model.head_weight[50:] = model.head_weight[:11] * 50
    limited = [*generate(model, [1], replace(settings, max_tokens=300), eos_ids=frozenset(), vocab_size=50)]
    free = [*generate(model, [1], replace(settings, max_tokens=300), eos_ids=frozenset())]
    assert len(limited) == 300 and max(limited) < 50 and max(free) >= 50


def counts(scores: Tensor, settings: GenerateConfig, num_samples: int = 20000) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(sample(scores, settings, generator) for _ in range(num_samples))


PROBABILITIES = torch.tensor([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RANDOM, [0.1, 0.4, 0.2, 0.3]),
        (replace(RANDOM, temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (replace(RANDOM, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (replace(RANDOM, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (replace(RANDOM, top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (replace(RANDOM, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (replace(RANDOM, top_p=1e-6), [0, 1, 0, 0]),
        (replace(RANDOM, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
        (replace(RANDOM, temperature=0.0, top_k=3), [0, 1, 0, 0]),
    ],
)
def test_sampling_follows_the_distribution(settings: GenerateConfig, expected: list[float]) -> None:
    found = counts(PROBABILITIES.log(), settings)
    for token, share in enumerate(expected):
        if share in (0, 1):
            assert found[token] == 20000 * share
        else:
            assert abs(found[token] / 20000 - share) < 4 * math.sqrt(share * (1 - share) / 20000)


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-44, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("highest", [-3.0, 0.0, 5.0, 3e38])
def test_the_lowest_temperatures_take_the_likeliest_token(temperature: float, highest: float) -> None:
    scores = torch.tensor([highest - 1.0 - abs(highest) / 2, highest, -3e38])
    settings = replace(RANDOM, temperature=temperature, top_k=2, top_p=0.9)
    assert sample(scores, settings, torch.Generator()) == 1
