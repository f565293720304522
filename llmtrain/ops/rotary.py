"""Rotary position embedding (Su et al. 2021): pairs of channels of a query or key are turned by an angle that grows with position.

Channel i of the first half is paired with channel i of the second half, the layout of Llama checkpoints. Nothing is stored: the
angles are computed from integer positions in fp64 in every forward, so no cast of the model can round them.

Texts longer than a model was trained on need slower turns. Every known way keeps a share w of a pair's frequency and divides the
rest by the factor of the stretch: frequency · (w + (1 - w) / factor). They differ in w alone.

Legend: B batch (or 1), T positions, H heads, C channels of a head, L positions before the stretch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.config.typed import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from llmtrain.ops.dtypes import at_least_fp32


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of the angles of some positions, shared by all layers and heads."""

    cos: Tensor
    """[B, T, 1, C] fp32, the angles of the pairs twice over"""
    sin: Tensor
    """[B, T, 1, C / 2] fp32"""


def rotary_table(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> RotaryTable:
    """cos and sin of position · frequency of each channel pair; YaRN scales both, which scales queries and keys.

    Args:
        positions: [B, T] or [1, T] integers.
    """
    device = positions.device
    # Apple's GPU has no fp64: its angles are made on the host.
    exact = torch.device("cpu") if device.type == "mps" else device
    frequencies = rotary_frequencies(head_dim, theta, scaling, exact)  # [C / 2]
    angles = positions.to(exact)[:, :, None, None].double() * frequencies  # [B, T, 1, C / 2]
    scale = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    cos, sin = (angles.cos() * scale).float().to(device), (angles.sin() * scale).float().to(device)
    return RotaryTable(cos.repeat(1, 1, 1, 2), sin)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | str | None = None
) -> Tensor:
    """Radians by which one position turns each channel pair: theta^(-2i / head_dim), stretched; [C / 2] fp64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim  # [C / 2]
    frequencies: Tensor = theta**-exponents
    if scaling is None:
        return frequencies
    kept = _share_kept(frequencies, theta, scaling)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _share_kept(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """w of the module's docstring for each channel pair, [C / 2] fp64.

    linear (Chen et al. 2023): 0. llama3 (Llama 3.1): rises with the turns that a pair makes over L positions. yarn (Peng et al. 2023):
    falls with the pair's number; the paper's ramp runs over turns, but the authors' code and all checkpoints have this one, with
    borders at whole pairs.
    """
    if isinstance(scaling, LinearScaling):
        return torch.zeros_like(frequencies)
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # [C / 2]
        return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    num_pairs = len(frequencies)

    def pair_with(turns: float) -> float:
        return num_pairs * math.log(scaling.original_max_positions / (2 * math.pi * turns)) / math.log(theta)

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), 2 * num_pairs - 1)
    ramp = (torch.arange(num_pairs, dtype=torch.float64, device=frequencies.device) - first) / max(last - first, 0.001)
    return 1.0 - ramp.clamp(0.0, 1.0)


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
