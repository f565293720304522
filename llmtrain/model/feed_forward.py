"""The position-wise network of a block.

Legend: B batch, T positions, D channels, F inner channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from llmtrain.config.typed import FeedForwardKind, ModelConfig
from llmtrain.model.context import ForwardContext
from llmtrain.model.layers import Linear
from llmtrain.ops.activation import gelu, swiglu
from llmtrain.ops.dropout import dropout
from llmtrain.ops.dtypes import DTYPES
from llmtrain.ops.random import Site
from llmtrain.plan.precision import PrecisionTable


class FeedForward(nn.Module):
    """down(silu(gate x) · up x), or down(gelu(up x)) without a gate."""

    def __init__(self, config: ModelConfig, precision: PrecisionTable, layer: int, residual_std: float) -> None:
        super().__init__()
        shape, matmul = config.feed_forward, DTYPES[precision.matmul]
        self.layer, self.dropout_probability = layer, config.dropout.feed_forward

        def widen() -> Linear:
            return Linear(config.dim, shape.hidden_dim, bias=shape.bias, std=config.init_std, dtype=matmul)

        self.gate = widen() if shape.kind is FeedForwardKind.SWIGLU else None
        self.up = widen()
        self.down = Linear(shape.hidden_dim, config.dim, bias=shape.bias, std=residual_std, dtype=matmul)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        up = self.up(x)  # [B, T, F]
        inner = gelu(up) if self.gate is None else swiglu(self.gate(x), up)  # [B, T, F]
        inner = dropout(inner, self.dropout_probability, context.dropout_key, self.layer, Site.FEED_FORWARD)
        return self.down(inner)  # [B, T, D]
