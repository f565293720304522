"""One transformer block: two sublayers, each normalised before and added to the residual stream after (pre-norm)."""

from __future__ import annotations

import math

from torch import Tensor, nn

from llmtrain.config.typed import ModelConfig
from llmtrain.model.attention import Attention
from llmtrain.model.context import ForwardContext
from llmtrain.model.feed_forward import FeedForward
from llmtrain.model.layers import build_norm
from llmtrain.ops.attention import AttentionBackend
from llmtrain.ops.dropout import dropout
from llmtrain.ops.dtypes import DTYPES
from llmtrain.ops.random import Site
from llmtrain.plan.precision import PrecisionTable


class Block(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, config: ModelConfig, precision: PrecisionTable, layer: int, attention: AttentionBackend) -> None:
        super().__init__()
        matmul = DTYPES[precision.matmul]
        # The stream sums 2 num_layers outputs; scaling each keeps its variance the same for any depth (GPT-2).
        residual_std = config.init_std / math.sqrt(2 * config.num_layers) if config.depth_scaled_init else config.init_std
        self.attention_norm = build_norm(config, matmul)
        self.attention = Attention(config, precision, layer, attention, residual_std)
        self.feed_forward_norm = build_norm(config, matmul)
        self.feed_forward = FeedForward(config, precision, layer, residual_std)
        self.layer, self.dropout_probability = layer, config.dropout.residual

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map the residual stream [B, T, D] to the next one, in its dtype."""
        attended = self.attention(self.attention_norm(x), context)  # [B, T, D]
        x = x + self._drop(attended, context, Site.ATTENTION_RESIDUAL).to(x.dtype)
        transformed = self.feed_forward(self.feed_forward_norm(x), context)  # [B, T, D]
        return x + self._drop(transformed, context, Site.FEED_FORWARD_RESIDUAL).to(x.dtype)

    def _drop(self, x: Tensor, context: ForwardContext, site: Site) -> Tensor:
        return dropout(x, self.dropout_probability, context.dropout_key, self.layer, site)
