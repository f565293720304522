"""Dropout (Srivastava et al. 2014) whose mask is a counter-based function of where it is applied; see `ops/random.py`.

Backward draws the mask again instead of keeping it: drawing costs about as much as reading a stored mask, and no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.ops.random import LANE_LEVELS, DropoutKey, Site, uniform_lanes


def dropout(x: Tensor, probability: float, key: DropoutKey | None, layer: int, site: Site) -> Tensor:
    """Zero each element with `probability` and scale the others so that the expectation stays.

    Args:
        x: [B, T, ...]; the trailing dimensions together are the channels.
        probability: in [0, 1); honoured to 1 / 65536, and the scale uses the probability as honoured.
        key: None = no dropout.

    Returns:
        [B, T, ...] in the dtype of x; x itself when there is nothing to drop.
    """
    level = round(probability * LANE_LEVELS)
    if key is None or level == 0:
        return x
    y: Tensor = _Dropout.apply(x, _Mask(level, key, layer, site))
    return y


@dataclass(frozen=True)
class _Mask:
    """Everything a mask depends on but the shape."""

    level: int
    """Of LANE_LEVELS equally likely values the lowest `level` mean dropped."""
    key: DropoutKey
    layer: int
    site: Site

    def apply(self, x: Tensor) -> Tensor:
        lanes = uniform_lanes(self.key, self.layer, self.site, x.shape[1], math.prod(x.shape[2:]))  # [B, T, C]
        # Compared into the dtype of x at once: selecting by a boolean mask is several times slower on a CPU.
        kept = torch.ge(lanes, self.level - LANE_LEVELS // 2, out=torch.empty_like(lanes, dtype=x.dtype))
        return (x * kept.view(x.shape)).mul_(LANE_LEVELS / (LANE_LEVELS - self.level))


class _Dropout(torch.autograd.Function):
    """A product with a constant, so the gradient is the same function as the value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: _Mask) -> Tensor:
        ctx.mask = mask
        return mask.apply(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        return ctx.mask.apply(grad_y), None
