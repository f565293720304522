"""Dropout: the share that is dropped, the scale, the gradient, and which mask is used where."""

from __future__ import annotations

import pytest
import torch

from llmtrain.ops.dropout import dropout
from llmtrain.ops.random import DropoutKey, Site

KEY = DropoutKey(seed=1, update=2, samples=torch.arange(16))


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_share_and_scale(probability: float) -> None:
    y = dropout(torch.ones(16, 64, 128), probability, KEY, 0, Site.FEED_FORWARD)
    dropped = (y == 0).double().mean()
    assert abs(dropped - probability) < 4 * (probability * (1 - probability) / y.numel()) ** 0.5 + 1 / 2**17
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - probability)), rtol=2e-4, atol=0)


def test_kept_share_times_scale_is_exactly_one() -> None:
    probability = 1 / 3  # not a multiple of 1 / 65536
    scale = dropout(torch.ones(16, 8, 8), probability, KEY, 0, Site.FEED_FORWARD).max().double()
    honoured = round(probability * 65536) / 65536
    assert abs(scale * (1 - honoured) - 1) < 1e-6


def test_gradient_passes_where_the_value_does() -> None:
    x = torch.randn(16, 8, 32, requires_grad=True)
    y = dropout(x, 0.5, KEY, 3, Site.EMBEDDING)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(y == 0, 0.0, 2.0))


@pytest.mark.parametrize(("probability", "key"), [(0.0, KEY), (0.5, None)])
def test_nothing_to_drop_costs_nothing(probability: float, key: DropoutKey | None) -> None:
    x = torch.randn(16, 4, 4)
    assert dropout(x, probability, key, 0, Site.EMBEDDING) is x


def test_scale_is_not_rounded_to_the_dtype() -> None:
    """1 / 0.9 in bf16 is 0.16 % off, for every element the same way."""
    x = torch.linspace(1, 2, 16 * 64 * 128).view(16, 64, 128).bfloat16()
    y = dropout(x, 0.1, KEY, 0, Site.FEED_FORWARD)
    kept = y != 0
    assert abs(y[kept].double().mean() / x[kept].double().mean() * 0.9 - 1) < 2e-4


def test_nothing_is_kept_for_backward() -> None:
    saved: list[torch.Tensor] = []
    x = torch.randn(16, 8, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        dropout(x, 0.5, KEY, 0, Site.EMBEDDING)
    assert saved == []


def test_dtype_and_trailing_dimensions_stay() -> None:
    x = torch.randn(16, 8, 4, 6, dtype=torch.bfloat16)
    y = dropout(x, 0.5, KEY, 0, Site.ATTENTION)
    assert y.dtype is torch.bfloat16 and y.shape == x.shape
    assert torch.equal(y == 0, dropout(x.flatten(2), 0.5, KEY, 0, Site.ATTENTION).view_as(y) == 0)


def test_sites_and_layers_have_masks_of_their_own() -> None:
    x = torch.ones(16, 8, 64)
    masks = [dropout(x, 0.5, KEY, layer, site) == 0 for layer in range(3) for site in Site]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert 0.4 < (first == second).double().mean() < 0.6
