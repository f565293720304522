"""FLOPs per token: the worked figures of B59, and torch's own counter on the real model."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmtrain.model.transformer import Transformer
from llmtrain.plan.flops import flops_per_token, keys_per_token
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.precision import PRECISION_TABLES

SMALL = {
    "model.dim": 64,
    "model.num_layers": 2,
    "model.vocab_size": 128,
    "model.attention.num_heads": 4,
    "model.attention.num_kv_heads": 1,
    "model.attention.head_dim": 16,
    "model.feed_forward.hidden_dim": 128,
}
VARIANTS = {
    "mha": {"model.attention.num_kv_heads": 4},
    "gqa": {"model.attention.num_kv_heads": 2},
    "mqa": {},
    "tied": {"model.tie_embeddings": True},
    "gpt2": {
        "model.attention.num_kv_heads": 4,
        "model.feed_forward.kind": "gelu",
        "model.position": "learned",
        "model.norm": "layer",
        "model.attention.bias": True,
        "model.feed_forward.bias": True,
    },
    "wide_heads": {"model.attention.head_dim": 24},
}


def test_b59_worked_figures(make_config) -> None:
    model = make_config(SMALL).model
    assert flops_per_token(model, 64, causal=False) == 6 * 77_824 + 98_304 == 565_248
    assert flops_per_token(model, 64, causal=True) == 516_096


@pytest.mark.parametrize("variant", VARIANTS)
def test_b59_equals_torchs_counter(make_config, variant: str) -> None:
    batch, length = 2, 64
    model = make_config(SMALL | VARIANTS[variant] | {"data.sequence_length": length}).model
    transformer = Transformer(model, PRECISION_TABLES["fp32"], "reference")
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(model.vocab_size, (batch, length))
    with FlopCounterMode(display=False) as counter:
        hidden = transformer(tokens)
        torch.nn.functional.linear(hidden, transformer.head_weight).sum().backward()
    assert counter.get_total_flops() == batch * length * flops_per_token(model, length, causal=False)


def test_b59_tying_changes_nothing(make_config) -> None:
    tied, untied = (make_config(SMALL | {"model.tie_embeddings": flag}).model for flag in (True, False))
    assert flops_per_token(tied, 64, causal=True) == flops_per_token(untied, 64, causal=True)


def test_b59_how_the_step_is_run_changes_nothing(make_config, make_machine) -> None:
    base = make_plan(make_config(), make_machine())
    words = {"recompute.kind": "full", "accumulation.micro_batch_size": 2, "loss.kind": "chunked", "precision.kind": "fp32"}
    other = make_plan(make_config(words), make_machine(world_size=2, world_source="launch.nproc"))
    assert other.flops_per_token == base.flops_per_token
    assert other.flops_per_token_full_attention == base.flops_per_token_full_attention


@pytest.mark.parametrize("length", [1, 8, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 64, 100])
def test_b59_a_window_counts_the_keys_it_leaves(window: int | None, length: int) -> None:
    """Counted one by one; the convention has a token's own key half, as halving a whole T × T matrix does."""
    reach = length if window is None else min(window, length)
    counted = sum(min(place + 1, reach) for place in range(length)) / length
    assert keys_per_token(window, length, causal=True) + reach / (2 * length) == pytest.approx(counted)
    assert keys_per_token(window, length, causal=False) == reach


def test_b59_windows_of_the_layers_add_up(make_config) -> None:
    words = {"model.num_layers": 4, "model.attention.window": 16, "model.attention.window_pattern": "SSL"}
    model = make_config(SMALL | words).model
    per_key = 3 * 4 * 4 * 16  # forward and backward, two products of 2 FLOPs, 4 heads of 16 channels
    whole, halved = (flops_per_token(model, 64, causal=causal) for causal in (False, True))
    matrices = whole - per_key * (16 + 16 + 64 + 16)
    assert halved - matrices == per_key * (3 * (16 - 16**2 / 128) + 32)
    assert matrices == flops_per_token(make_config(SMALL | {"model.num_layers": 4}).model, 64, causal=False) - per_key * 4 * 64
