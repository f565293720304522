"""Rotary position embedding (Su et al. 2021): pairs of channels of a query or key are turned by an angle that grows with position.

Channel i of the first half is paired with channel i of the second half, the layout of Llama checkpoints. Nothing is stored: the
angles are computed from integer positions in fp64 in every forward, so no cast of the model can round them.

Legend: B batch (or 1), T positions, H heads, C channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.ops.dtypes import at_least_fp32


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of the angles of some positions, shared by all layers and heads."""

    cos: Tensor
    """[B, T, 1, C] fp32, the angles of the pairs twice over"""
    sin: Tensor
    """[B, T, 1, C / 2] fp32"""


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> RotaryTable:
    """Angles position · theta^(-2i / head_dim) of channel pair i.

    Args:
        positions: [B, T] or [1, T] integers.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim  # [C / 2]
    angles = positions[:, :, None, None].double() * theta**-exponents  # [B, T, 1, C / 2]
    return RotaryTable(angles.cos().float().repeat(1, 1, 1, 2), angles.sin().float())


def apply_rotary(x: Tensor, table: RotaryTable, dtype: torch.dtype) -> Tensor:
    """Turn every channel pair of x [B, T, H, C] in fp32; the result is in `dtype`."""
    y: Tensor = _Rotate.apply(x, table.cos, table.sin, dtype)
    return y


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the opposite rotation, so nothing but the table is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate(x, cos, sin, dtype, direction=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad_y, cos, sin, ctx.dtype, direction=-1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, direction: int) -> Tensor:
    """(a, b) → (a cos - b sin, b cos + a sin) for the halves a and b of the channels; the other way round for direction -1."""
    wide = at_least_fp32(x)
    first, second = wide.chunk(2, dim=-1)  # [B, T, H, C / 2]
    turned = wide * cos  # [B, T, H, C]
    turned_first, turned_second = turned.chunk(2, dim=-1)
    turned_first.addcmul_(second, sin, value=-direction)
    turned_second.addcmul_(first, sin, value=direction)
    return turned.to(dtype)
