"""Leaf modules: linear, embedding and norm layers with fp32 master weights that compute in the dtypes of a precision table.

A leaf says in `initial` how each of its parameters starts; its constructor leaves them unset (often on the meta device), and
`model/init.py` fills them.

Legend: D, E input and output channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.config.typed import ModelConfig, NormKind
from llmtrain.ops.norm import layer_norm, rms_norm


@dataclass(frozen=True)
class Normal:
    """Start from a normal distribution of mean zero."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Start with every element equal."""

    value: float


Initial = Normal | Constant


class Linear(nn.Module):
    """x weightᵀ + bias, in `dtype`; autograd's cast gives gradients back in the dtype of the master weight."""

    def __init__(self, in_dim: int, out_dim: int, *, bias: bool, std: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))  # [E, D]
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None  # [E]
        self.dtype = dtype
        self.initial: dict[str, Initial] = {"weight": Normal(std), "bias": Constant(0.0)}

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return F.linear(x.to(self.dtype), self.weight.to(self.dtype), bias)  # [..., E]


class Embedding(nn.Module):
    """Rows of a table, in the dtype of the table: the caller adds before it rounds."""

    def __init__(self, num_rows: int, dim: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, dim))  # [rows, D]
        self.initial: dict[str, Initial] = {"weight": Normal(std)}

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)  # [..., D]


class RMSNorm(nn.Module):
    """Scale to unit root mean square; gives `dtype`."""

    def __init__(self, dim: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))  # [D]
        self.eps, self.dtype = eps, dtype
        self.initial: dict[str, Initial] = {"weight": Constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.dtype)  # [..., D]


class LayerNorm(nn.Module):
    """Scale to zero mean and unit variance; gives `dtype`."""

    def __init__(self, dim: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))  # [D]
        self.bias = nn.Parameter(torch.empty(dim))  # [D]
        self.eps, self.dtype = eps, dtype
        self.initial: dict[str, Initial] = {"weight": Constant(1.0), "bias": Constant(0.0)}

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.dtype)  # [..., D]


def build_norm(config: ModelConfig, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    """The norm in front of a sublayer or of the head; `dtype` is what that one multiplies in."""
    kind = RMSNorm if config.norm is NormKind.RMS else LayerNorm
    return kind(config.dim, eps=config.norm_eps, dtype=dtype)
