"""Which dtype each kind of tensor has, per precision option: the one table every layout, the docs and the planner read.

No autocast anywhere: autocast keeps other tensors in other dtypes than a sharded run does, so two layouts would train two models.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of one element of each dtype name used below."""


@dataclass(frozen=True)
class PrecisionTable:
    """dtype names ("fp32", "bf16") by role of a tensor."""

    weights: str
    """The parameters the optimizer updates (the master copy)."""
    matmul: str
    """Operands and results of linear layers and attention products."""
    residual: str
    """The stream between blocks, embedding output included."""
    norm: str
    """Statistics and arithmetic of RMSNorm and LayerNorm."""
    softmax: str
    rotary: str
    """Angles, sines and cosines, and the rotation itself."""
    logits: str
    """What the head's matmul gives to the loss."""
    loss: str
    """Log-softmax, its sums over tokens, micro-batches and ranks."""
    gradient: str
    """Accumulated gradients of the parameters."""
    reduction: str
    """Sums of gradients over ranks."""
    moments: str
    """Optimizer state."""


PRECISION_TABLES = {
    "fp32": PrecisionTable(
        weights="fp32",
        matmul="fp32",
        residual="fp32",
        norm="fp32",
        softmax="fp32",
        rotary="fp32",
        logits="fp32",
        loss="fp32",
        gradient="fp32",
        reduction="fp32",
        moments="fp32",
    ),
    "bf16": PrecisionTable(
        weights="fp32",
        matmul="bf16",
        residual="bf16",
        norm="fp32",
        softmax="fp32",
        rotary="fp32",
        logits="bf16",
        loss="fp32",
        gradient="fp32",
        reduction="fp32",
        moments="fp32",
    ),
}
