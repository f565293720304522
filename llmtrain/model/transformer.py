"""The decoder-only Transformer that llmtrain trains: GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023) and what lies between.

A plain single-device module. It may be built on the meta device; `model/init.py` gives the parameters their values. Precision is
the table's alone: fp32 master weights are cast where they are multiplied, and autocast is never used.

Legend: B batch, T positions, D channels of the residual stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.config.typed import ModelConfig, PositionKind
from llmtrain.model.block import Block
from llmtrain.model.cache import KVCache
from llmtrain.model.context import ForwardContext
from llmtrain.model.layers import Embedding, Linear, build_norm
from llmtrain.ops.attention import AttentionBackend, attention_backend
from llmtrain.ops.attention_masks import Mask, MaskRequest
from llmtrain.ops.dropout import dropout
from llmtrain.ops.dtypes import DTYPES
from llmtrain.ops.random import DropoutKey, Site
from llmtrain.ops.rotary import RotaryTable, rotary_table
from llmtrain.plan.precision import PrecisionTable


class Transformer(nn.Module):
    """Token ids in, hidden states out; the head is applied by `logits` or inside the loss.

    Args:
        config: shape, with `vocab_size` settled.
        precision: dtype of each kind of tensor.
        attention: a backend of `ops/attention.py` or its name; one by name that cannot do what `config` asks raises ConfigError.
    """

    def __init__(self, config: ModelConfig, precision: PrecisionTable, attention: AttentionBackend | str) -> None:
        super().__init__()
        assert config.vocab_size is not None, "the plan settles vocab_size before a model is built"
        self.config, self.precision = config, precision
        if isinstance(attention, str):
            attention = attention_backend(attention, dropout_probability=config.dropout.attention)
        self.attention = attention
        matmul = DTYPES[precision.matmul]
        learned = config.position is PositionKind.LEARNED
        self.embed = Embedding(config.vocab_size, config.dim, std=config.init_std)
        self.position_embed = Embedding(config.max_positions, config.dim, std=config.init_std) if learned else None
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, precision, layer, attention) for layer in range(config.num_layers)}
        )
        self.norm = build_norm(config, matmul)
        self.head = Linear(config.dim, config.vocab_size, bias=False, std=config.init_std, dtype=matmul)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.run_block: Callable[..., Tensor] = call_block

    @property
    def head_weight(self) -> nn.Parameter:
        """[V, D]; the embedding itself when tied."""
        return self.head.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: [B, T] int64.
            positions: [B, T] int64; None = counted from 0, or from the length of the cache.
            document_ids: [B, T] int64, negative = padding; None = each row is one document. Not together with a cache.
            dropout_key: None = no dropout. In evaluation mode nothing is dropped either way.
            cache: keys and values of earlier positions, extended by this call.

        Returns:
            [B, T, D] in the matmul dtype.
        """
        assert cache is None or document_ids is None, "cached decoding reads one document per row"
        if positions is None:
            first = 0 if cache is None else cache.length
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]  # [1, T]
        context = ForwardContext(
            rotary=self._rotary_table(positions),
            masks=self._masks(tokens, document_ids, 0 if cache is None else cache.length),
            dropout_key=dropout_key if self.training else None,
            cache=cache,
        )
        x = self._embed(tokens, positions, document_ids, context)  # [B, T, D]
        for block in self.blocks.values():
            x = self.run_block(block, x, context)  # [B, T, D]
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.norm(x)  # [B, T, D]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [..., V] in the logits dtype, from hidden states [..., D]."""
        return self.head(hidden).to(DTYPES[self.precision.logits])

    def _rotary_table(self, positions: Tensor) -> RotaryTable | None:
        if self.config.position is not PositionKind.ROTARY:
            return None
        return rotary_table(positions, self.config.attention.head_dim, self.config.rope_theta, self.config.rope_scaling)

    def _masks(self, tokens: Tensor, document_ids: Tensor | None, num_cached: int) -> dict[int | None, Mask]:
        """One mask for each window that reaches less than all keys, and one for all other layers."""
        num_queries, made = tokens.shape[1], {}
        for window in dict.fromkeys(self.config.layer_windows):
            shorter = window if window is not None and window < num_cached + num_queries else None
            if shorter not in made:
                made[shorter] = self.attention.make_mask(
                    MaskRequest(
                        document_ids=document_ids,
                        window=shorter,
                        num_queries=num_queries,
                        num_keys=num_cached + num_queries,
                        device=tokens.device,
                        dtype=DTYPES[self.precision.matmul],
                    )
                )
            made[window] = made[shorter]
        return made

    def _embed(self, tokens: Tensor, positions: Tensor, document_ids: Tensor | None, context: ForwardContext) -> Tensor:
        x = self.embed(tokens)  # [B, T, D]
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        x = dropout(x, self.config.dropout.embedding, context.dropout_key, 0, Site.EMBEDDING)
        if document_ids is not None:
            # Padding starts as zeros and sees padding only, so whatever its row holds, it reaches no other position and no gradient.
            x = x.masked_fill((document_ids < 0)[:, :, None], 0.0)
        return x.to(DTYPES[self.precision.residual])


def call_block(block: nn.Module, *args: Any) -> Tensor:
    """How a block is run unless `parallel/recompute.py` puts something else in `Transformer.run_block`."""
    x: Tensor = block(*args)
    return x
