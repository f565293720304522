"""RMSNorm and LayerNorm with fp32 arithmetic on a residual stream of any dtype.

Written as autograd functions for memory: what backward needs is the input in its own dtype and one or two numbers per position,
where the composed form would keep several fp32 copies of the input.

Legend: D channels, normalised over; `...` positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.ops.dtypes import at_least_fp32
from llmtrain.ops.library import named_operation


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Returns:
        [..., D] in `dtype`.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps, dtype)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension (Ba, Kiros and Hinton 2016).

    Returns:
        [..., D] in `dtype`.
    """
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps, dtype)
    return y


@named_operation("rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)")
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The value of `rms_norm` [..., D] and 1 / root mean square [..., 1] as one operation."""
    wide = at_least_fp32(x)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [..., 1]
    scale = norm.square().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
    return (wide * scale).mul_(weight).to(dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y: Tensor
        y, scale = rms_norm_forward(x, weight, eps, dtype)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """With n = x · scale: dweight = Σ dy · n, dx = scale · (dy · weight - n · mean(dy · weight · n))."""
        x, weight, scale = ctx.saved_tensors
        grad_y, normed = at_least_fp32(grad_y), at_least_fp32(x) * scale  # [..., D]
        products = (grad_y * normed).flatten(0, -2)  # [positions, D]
        grad_weight = products.sum(0)  # [D]
        means = torch.mv(products, weight).div_(-x.shape[-1]).view(scale.shape)  # [..., 1]
        grad_x = normed.mul_(means).addcmul_(grad_y, weight).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y, mean, scale = torch.native_layer_norm(at_least_fp32(x), weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            at_least_fp32(grad_y), at_least_fp32(x), weight.shape, mean, scale, weight, bias, [True, True, True]
        )
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None
