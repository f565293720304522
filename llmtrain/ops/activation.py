"""Activations of the feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020, SwiGLU)."""
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form of GPT-2 (Hendrycks and Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")
