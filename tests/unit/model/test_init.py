"""Initial weights: keyed by seed and name, equal however a model is built, spread as documented."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.models import LLAMA_LIKE, SHAPES, build, random_tokens
from helpers.tiny import config_of, plan_of
from torch import nn

from llmtrain.config.typed import ModelConfig, ReferenceLoss
from llmtrain.model.init import build_on_meta, draw, materialize
from llmtrain.model.layers import Normal
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.plan.precision import PRECISION_TABLES

FP32 = PRECISION_TABLES["fp32"]


def on_meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config, FP32, "reference")


def dirty_memory() -> None:
    """Leave something other than zeros where the next tensors may go."""
    junk = [torch.full((size,), math.nan) for size in range(1, 4096, 64)]
    del junk


@pytest.mark.parametrize("shape", SHAPES)
def test_b14_meta_and_direct_build_are_bit_equal(shape: str) -> None:
    dirty_memory()
    meta, direct = on_meta(SHAPES[shape]), Transformer(SHAPES[shape], FP32, "reference")
    assert all(parameter.is_meta for parameter in meta.parameters())
    for model in (meta, direct):
        materialize(model, seed=7, device="cpu")
    first, second = (dict((*model.named_parameters(), *model.named_buffers())) for model in (meta, direct))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    tokens = random_tokens(2, 16)
    results = []
    for model in (meta, direct):
        build_loss(ReferenceLoss(), FP32)(model(tokens).flatten(0, 1), model.head_weight, tokens.flatten()).backward()
        results.append(model.embed.weight.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", ["gpt2", "qk_norm"])
def test_b14_ties_stay_ties(shape: str) -> None:
    model = on_meta(SHAPES[shape])
    materialize(model, seed=0, device="cpu")
    assert model.head.weight is model.embed.weight is model.head_weight
    assert "head.weight" not in dict(model.named_parameters())


def test_b14_planned_model_starts_as_planned() -> None:
    plan = plan_of(config_of({"model.tie_embeddings": True}))
    model = build_on_meta(plan)
    assert sum(parameter.numel() for parameter in model.parameters()) == plan.num_parameters
    materialize(model, seed=0, device="cpu")
    assert plan.tied == (("embed.weight", "head.weight"),) and model.head.weight is model.embed.weight


def test_a_direct_model_is_filled_in_place() -> None:
    model = Transformer(LLAMA_LIKE, FP32, "reference").requires_grad_(False)
    materialize(model, seed=0, device="cpu")
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_weights_depend_on_seed_and_name_alone() -> None:
    small, large, other = build(LLAMA_LIKE), build(replace(LLAMA_LIKE, num_layers=2, vocab_size=99)), build(LLAMA_LIKE, seed=1)
    large_weights, other_weights = dict(large.named_parameters()), dict(other.named_parameters())
    matrices = {name: weight for name, weight in small.named_parameters() if weight.ndim == 2}
    for name, weight in matrices.items():
        if name not in ("embed.weight", "head.weight"):
            assert torch.equal(weight, large_weights[name]), name
        assert not torch.equal(weight, other_weights[name]), name
    for name, weight in matrices.items():
        twins = [other for other, tensor in matrices.items() if other != name and tensor.shape == weight.shape]
        assert all(not torch.equal(weight, matrices[twin]) for twin in twins)


def test_draws_stay_what_they_are() -> None:
    """A changed draw would make every run of an older version irreproducible."""
    values = draw(0, "embed.weight", (4, 8), Normal(1.0)).flatten()[:3]
    torch.testing.assert_close(values, torch.tensor([0.0461098, 1.0665999, -0.9883265]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depth_scaled", [True, False])
def test_b14_spread_is_as_documented(depth_scaled: bool) -> None:
    config = replace(LLAMA_LIKE, dim=128, num_layers=3, vocab_size=500, init_std=0.02, depth_scaled_init=depth_scaled)
    config = replace(config, attention=replace(config.attention, bias=True, num_heads=8, num_kv_heads=8, head_dim=16))
    for name, parameter in build(config).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        into_stream = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        std = 0.02 / math.sqrt(2 * 3) if into_stream and depth_scaled else 0.02
        assert abs(parameter.std().item() / std - 1) < 0.05, name
        assert abs(parameter.mean().item()) < 4 * std / math.sqrt(parameter.numel()), name


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    build(LLAMA_LIKE)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parameter_nobody_starts_is_an_error() -> None:
    model = on_meta(LLAMA_LIKE)
    model.extra = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(AssertionError, match="how extra starts"):
        materialize(model, seed=0, device="cpu")


def test_a_tensor_left_without_memory_is_an_error() -> None:
    model = on_meta(LLAMA_LIKE)
    model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(AssertionError, match="left without values: table"):
        materialize(model, seed=0, device="cpu")
