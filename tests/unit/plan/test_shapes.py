"""Parameter names and shapes: by hand for one model, and equal to the real Transformer's for every variant."""

from __future__ import annotations

from math import prod

import pytest
import torch

from llmtrain.model.transformer import Transformer
from llmtrain.plan.precision import PRECISION_TABLES
from llmtrain.plan.shapes import num_parameters, parameter_shapes, tied_parameters

VARIANTS = {
    "default": {},
    "tied": {"model.tie_embeddings": True},
    "gpt2": {
        "model.position": "learned",
        "model.norm": "layer",
        "model.tie_embeddings": True,
        "model.attention.bias": True,
        "model.attention.output_bias": True,
        "model.feed_forward.kind": "gelu",
        "model.feed_forward.bias": True,
    },
    "grouped": {"model.attention.num_heads": 8, "model.attention.num_kv_heads": 2, "model.attention.qk_norm": True},
    "multi_query_wide_heads": {"model.attention.num_kv_heads": 1, "model.attention.head_dim": 48},
    "swiglu_with_biases": {"model.feed_forward.bias": True, "model.attention.bias": True, "model.norm": "layer"},
}


def settled(make_config, words):
    return make_config({"model.vocab_size": 300, "model.num_layers": 2, **words}).model


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_are_those_of_the_transformer(make_config, variant: str) -> None:
    model = settled(make_config, VARIANTS[variant])
    with torch.device("meta"):
        real = Transformer(model, PRECISION_TABLES["fp32"], "reference")
    assert parameter_shapes(model) == {name: tuple(parameter.shape) for name, parameter in real.named_parameters()}
    assert list(parameter_shapes(model)) == [name for name, _ in real.named_parameters()]
    assert num_parameters(model) == sum(parameter.numel() for parameter in real.parameters())


def test_shapes_by_hand(make_config) -> None:
    model = settled(
        make_config,
        {
            "model.dim": 64,
            "model.num_layers": 1,
            "model.attention.num_heads": 4,
            "model.attention.num_kv_heads": 2,
            "model.attention.head_dim": 24,
            "model.feed_forward.hidden_dim": 96,
        },
    )
    assert parameter_shapes(model) == {
        "embed.weight": (300, 64),
        "blocks.0.attention_norm.weight": (64,),
        "blocks.0.attention.q.weight": (96, 64),
        "blocks.0.attention.k.weight": (48, 64),
        "blocks.0.attention.v.weight": (48, 64),
        "blocks.0.attention.out.weight": (64, 96),
        "blocks.0.feed_forward_norm.weight": (64,),
        "blocks.0.feed_forward.gate.weight": (96, 64),
        "blocks.0.feed_forward.up.weight": (96, 64),
        "blocks.0.feed_forward.down.weight": (64, 96),
        "norm.weight": (64,),
        "head.weight": (300, 64),
    }


def test_a_tied_matrix_counts_once(make_config) -> None:
    tied, untied = (settled(make_config, {"model.tie_embeddings": flag}) for flag in (True, False))
    assert num_parameters(untied) - num_parameters(tied) == prod((300, 128))
    assert tied_parameters(tied) == (("embed.weight", "head.weight"),)
    assert tied_parameters(untied) == ()
