"""Same weights, same numbers as the transformers library: logits and gradients at all of 512 positions, family by family."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from helpers.models import GPT2_LIKE, LLAMA_LIKE, build, gradients, random_tokens, relative_error
from helpers.twins import GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, Family
from torch import Tensor, nn

from llmtrain.config.typed import (
    FeedForwardConfig,
    FeedForwardKind,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    ReferenceLoss,
    YarnScaling,
)
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import build_loss

VOCAB_SIZE, LENGTH = 211, 512

BASE = replace(
    LLAMA_LIKE,
    dim=48,
    vocab_size=VOCAB_SIZE,
    max_positions=LENGTH,
    attention=replace(LLAMA_LIKE.attention, num_heads=6, num_kv_heads=2, head_dim=32),  # 6 · 32 is not dim
    feed_forward=FeedForwardConfig(FeedForwardKind.SWIGLU, 80, bias=False),
)
SMALL_EPS = replace(BASE, norm_eps=1e-6, rope_theta=500000.0)
LLAMA_3_1 = replace(BASE, rope_theta=500000.0, rope_scaling=Llama3Scaling(8.0, 64, 1.0, 4.0))
LLAMA_3_2 = replace(LLAMA_3_1, tie_embeddings=True, rope_scaling=Llama3Scaling(32.0, 128, 1.0, 4.0))
SMOLLM2 = replace(
    BASE, tie_embeddings=True, rope_theta=100000.0, attention=replace(BASE.attention, num_heads=3, num_kv_heads=1)
)
LINEAR = replace(BASE, rope_scaling=LinearScaling(4.0))
YARN = replace(BASE, rope_scaling=YarnScaling(4.0, 128, 32.0, 1.0, 1.1386294361119891))
YARN_OF_ONES_OWN = replace(SMALL_EPS, rope_scaling=YarnScaling(16.0, 64, 12.0, 0.5, 1.5))
BIASED = replace(
    BASE,
    attention=replace(BASE.attention, bias=True, output_bias=True),
    feed_forward=replace(BASE.feed_forward, bias=True),
)
QWEN_2 = replace(BASE, norm_eps=1e-6, rope_theta=1000000.0, attention=replace(BASE.attention, bias=True))
QWEN_3 = replace(
    BASE, norm_eps=1e-6, rope_theta=1000000.0, tie_embeddings=True, attention=replace(BASE.attention, qk_norm=True)
)
QWEN_3_YARN = replace(QWEN_3, tie_embeddings=False, rope_scaling=replace(YARN.rope_scaling, original_max_positions=64))
QWEN_3_BIASED = replace(QWEN_3, attention=replace(QWEN_3.attention, bias=True, output_bias=True))
WINDOW = replace(BASE, attention=replace(BASE.attention, windows=(37,)))
WINDOW_PATTERN = replace(QWEN_3, num_layers=3, attention=replace(QWEN_3.attention, windows=(24, None)))
GPT_2 = replace(GPT2_LIKE, vocab_size=VOCAB_SIZE, max_positions=LENGTH)


def windowed(model: ModelConfig, *windows: int | None) -> ModelConfig:
    return replace(model, attention=replace(model.attention, windows=windows))


@dataclass(frozen=True)
class Case:
    """A model, its twin, and a model of the same weights that must not pass for it."""

    model: ModelConfig
    family: Family
    mistaken: ModelConfig | None = None


CASES = {
    "gpt2": Case(GPT_2, GPT2, replace(GPT_2, norm_eps=1e-1)),
    "llama": Case(BASE, LLAMA, replace(BASE, rope_theta=20000.0)),
    "small eps": Case(SMALL_EPS, LLAMA, replace(SMALL_EPS, norm_eps=1e-2)),
    "llama 3.1": Case(LLAMA_3_1, LLAMA, replace(LLAMA_3_1, rope_scaling=None)),
    "llama 3.2": Case(LLAMA_3_2, LLAMA, replace(LLAMA_3_2, rope_scaling=LLAMA_3_1.rope_scaling)),
    "smollm2": Case(SMOLLM2, LLAMA, replace(SMOLLM2, rope_theta=130000.0)),
    "linear": Case(LINEAR, LLAMA, replace(LINEAR, rope_scaling=LinearScaling(4.2))),
    "yarn": Case(YARN, LLAMA, replace(YARN, rope_scaling=replace(YARN.rope_scaling, attention_factor=1.0))),
    "yarn of one's own": Case(YARN_OF_ONES_OWN, LLAMA, replace(YARN_OF_ONES_OWN, rope_scaling=YARN.rope_scaling)),
    "biased": Case(BIASED, LLAMA),
    "qwen2": Case(QWEN_2, QWEN2),
    "qwen3": Case(QWEN_3, QWEN3),
    "qwen3 yarn": Case(QWEN_3_YARN, QWEN3, replace(QWEN_3_YARN, rope_scaling=YARN.rope_scaling)),
    "qwen3 biased": Case(QWEN_3_BIASED, QWEN3),
}
WINDOW_CASES = {
    "mistral": Case(WINDOW, MISTRAL, windowed(WINDOW, 36)),
    "mistral, one more": Case(WINDOW, MISTRAL, windowed(WINDOW, 38)),
    "mistral, own key only": Case(windowed(WINDOW, 1), MISTRAL, windowed(WINDOW, 2)),
    "qwen3 pattern": Case(WINDOW_PATTERN, QWEN3, windowed(WINDOW_PATTERN, None, 24)),
}


def twin_of(case: Case) -> nn.Module:
    """The other library's model with weights, biases and gains that are all drawn, so that none can be mixed up unseen."""
    torch.manual_seed(0)
    twin = case.family.build(case.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return twin


def with_weights_of(twin: nn.Module, case: Case, model: ModelConfig, backend: str) -> Transformer:
    ours = build(model, backend=backend)
    theirs = case.family.tensors(dict(twin.named_parameters()), case.model)
    wanted = dict(ours.named_parameters())
    assert theirs.keys() == wanted.keys()
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(theirs[name])
    return ours


def check(case: Case, backend: str) -> None:
    twin = twin_of(case)
    ours = with_weights_of(twin, case, case.model, backend)
    tokens, targets = random_tokens(2, LENGTH, vocab_size=VOCAB_SIZE), random_tokens(2, LENGTH, seed=1, vocab_size=VOCAB_SIZE)
    hidden, expected = ours(tokens), twin(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=0, atol=1e-4)
    build_loss(ReferenceLoss(), ours.precision)(hidden.flatten(0, 1), ours.head_weight, targets.flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    found, wanted = gradients(ours), gradients_of(twin, case)
    for name, gradient in found.items():
        if not wanted[name].any():  # a query with one key has nothing to choose
            assert gradient.abs().max() < 1e-5, name
        elif not name.endswith("k.bias"):  # its true gradient is zero
            assert relative_error(gradient, wanted[name]) < 1e-4, name


def gradients_of(twin: nn.Module, case: Case) -> dict[str, Tensor]:
    return case.family.tensors({name: parameter.grad for name, parameter in twin.named_parameters()}, case.model)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients(name: str, backend: str) -> None:
    check(CASES[name], backend)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("name", ["mistral", "mistral, own key only", "qwen3 pattern"])
def test_logits_and_gradients_with_windows(name: str, backend: str) -> None:
    check(WINDOW_CASES[name], backend)


@pytest.mark.parametrize("name", [name for name, case in (CASES | WINDOW_CASES).items() if case.mistaken])
@torch.no_grad()
def test_the_comparison_sees_a_mistaken_model(name: str) -> None:
    """The tolerances above are far below what another theta, stretch, window or eps makes of the same weights."""
    case = (CASES | WINDOW_CASES)[name]
    assert case.mistaken is not None
    twin = twin_of(case)
    tokens = random_tokens(2, LENGTH, vocab_size=VOCAB_SIZE)
    ours = with_weights_of(twin, case, case.mistaken, "reference")
    assert (ours.logits(ours(tokens)) - twin(tokens).logits).abs().max() > 2e-3
