"""Small models for tests, built by hand so that no test of a model depends on how configs are composed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.config.typed import (
    AttentionShapeConfig,
    DropoutConfig,
    FeedForwardConfig,
    FeedForwardKind,
    ModelConfig,
    NormKind,
    PositionKind,
)
from llmtrain.model.init import materialize
from llmtrain.model.transformer import Transformer
from llmtrain.ops.attention import AttentionBackend
from llmtrain.plan.precision import PRECISION_TABLES

VOCAB_SIZE = 61

LLAMA_LIKE = ModelConfig(
    dim=32,
    num_layers=2,
    vocab_size=VOCAB_SIZE,
    max_positions=48,
    position=PositionKind.ROTARY,
    norm=NormKind.RMS,
    norm_eps=1e-5,
    tie_embeddings=False,
    init_std=0.1,  # large enough for attention to differ from an average
    depth_scaled_init=True,
    attention=AttentionShapeConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=False, bias=False, output_bias=False),
    feed_forward=FeedForwardConfig(FeedForwardKind.SWIGLU, 48, bias=False),
    rope_theta=10000.0,
    dropout=DropoutConfig(embedding=0.0, attention=0.0, residual=0.0, feed_forward=0.0),
)

GPT2_LIKE = replace(
    LLAMA_LIKE,
    position=PositionKind.LEARNED,
    norm=NormKind.LAYER,
    tie_embeddings=True,
    attention=AttentionShapeConfig(num_heads=4, num_kv_heads=4, head_dim=8, qk_norm=False, bias=True, output_bias=True),
    feed_forward=FeedForwardConfig(FeedForwardKind.GELU, 64, bias=True),
)

QK_NORM = replace(LLAMA_LIKE, attention=replace(LLAMA_LIKE.attention, qk_norm=True, bias=True), tie_embeddings=True)

WINDOWED = replace(LLAMA_LIKE, num_layers=4, attention=replace(LLAMA_LIKE.attention, windows=(4, None, 4)))

SHAPES = {"llama": LLAMA_LIKE, "gpt2": GPT2_LIKE, "qk_norm": QK_NORM}

DROPOUT = DropoutConfig(embedding=0.5, attention=0.5, residual=0.5, feed_forward=0.5)


def build(
    config: ModelConfig, *, precision: str = "fp32", backend: AttentionBackend | str = "reference", seed: int = 0
) -> Transformer:
    """A model with its initial weights, on the CPU."""
    model = Transformer(config, PRECISION_TABLES[precision], backend)
    materialize(model, seed=seed, device="cpu")
    return model


def random_tokens(*shape: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """Token ids that depend on the seed alone."""
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: Transformer) -> dict[str, Any]:
    """The gradients of all parameters, taken out of the model."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Distance over length, in fp64."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))
