"""Self-attention with grouped key-value heads.

Legend: B batch, T positions, S key positions (T unless a cache holds more), D channels, H query heads, G key-value heads,
C channels of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from llmtrain.config.typed import ModelConfig
from llmtrain.model.context import ForwardContext
from llmtrain.model.layers import Linear, RMSNorm
from llmtrain.ops.attention import AttentionBackend, AttentionDropout
from llmtrain.ops.dtypes import DTYPES
from llmtrain.ops.rotary import apply_rotary
from llmtrain.plan.precision import PrecisionTable


class Attention(nn.Module):
    """Project to heads, turn queries and keys by their positions, attend, project back (Ainslie et al. 2023 for G < H)."""

    def __init__(
        self, config: ModelConfig, precision: PrecisionTable, layer: int, backend: AttentionBackend, residual_std: float
    ) -> None:
        super().__init__()
        heads, self.layer, self.matmul = config.attention, layer, DTYPES[precision.matmul]
        self.head_dim, self.dropout_probability = heads.head_dim, config.dropout.attention
        self.backend, self.window = backend, heads.window(layer)

        def project(num_heads: int) -> Linear:
            width = num_heads * heads.head_dim
            return Linear(config.dim, width, bias=heads.bias, std=config.init_std, dtype=self.matmul)

        self.q, self.k, self.v = project(heads.num_heads), project(heads.num_kv_heads), project(heads.num_kv_heads)
        self.q_norm = RMSNorm(heads.head_dim, eps=config.norm_eps, dtype=DTYPES[precision.rotary]) if heads.qk_norm else None
        self.k_norm = RMSNorm(heads.head_dim, eps=config.norm_eps, dtype=DTYPES[precision.rotary]) if heads.qk_norm else None
        width = heads.num_heads * heads.head_dim
        self.out = Linear(width, config.dim, bias=heads.output_bias, std=residual_std, dtype=self.matmul)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        query = self._place(self._heads(self.q(x)), self.q_norm, context)  # [B, H, T, C]
        key = self._place(self._heads(self.k(x)), self.k_norm, context)  # [B, G, T, C]
        value = self._heads(self.v(x)).transpose(1, 2)  # [B, G, T, C]
        if context.cache is not None:
            key, value = context.cache.extend(self.layer, key, value)  # [B, G, S, C]
        drop = AttentionDropout(self.dropout_probability, context.dropout_key, self.layer)
        mixed = self.backend.function(query, key, value, context.masks[self.window], drop)  # [B, H, T, C]
        return self.out(mixed.transpose(1, 2).flatten(2))  # [B, T, D]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, T, H, C]

    def _place(self, x: Tensor, norm: RMSNorm | None, context: ForwardContext) -> Tensor:
        """Normalise the channels of each head, if asked, and tell the position."""
        if norm is not None:
            x = norm(x)
        if context.rotary is not None:
            x = apply_rotary(x, context.rotary, self.matmul)
        return x.to(self.matmul).transpose(1, 2)  # [B, H, T, C]
