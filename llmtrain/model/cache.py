"""Keys and values of the tokens already read, so that decoding one more token costs one token.

Legend: B batch, G key-value heads, C channels of a head, T new positions, S cached positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.config.typed import ModelConfig
from llmtrain.ops.dtypes import DTYPES
from llmtrain.plan.precision import PrecisionTable


class KVCache:
    """Room for `capacity` positions in every layer, allocated once.

    Args:
        capacity: positions it can hold; writing more is a mistake of the caller.
    """

    def __init__(
        self, config: ModelConfig, precision: PrecisionTable, *, batch_size: int, capacity: int, device: torch.device | str
    ) -> None:
        heads = config.attention
        shape = (config.num_layers, batch_size, heads.num_kv_heads, capacity, heads.head_dim)
        self.keys = torch.empty(shape, dtype=DTYPES[precision.matmul], device=device)  # [layers, B, G, capacity, C]
        self.values = torch.empty_like(self.keys)
        self.capacity = capacity
        self.length = 0
        """Positions held; the same in all layers once a forward is over."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values [B, G, T, C] of one layer and return all it holds, [B, G, S, C] each."""
        end = self.length + key.shape[2]
        assert end <= self.capacity, f"a cache of {self.capacity} positions cannot hold {end}"
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, num_positions: int) -> None:
        """Count the positions that every layer has just appended."""
        self.length += num_positions

    def clear(self) -> None:
        """Forget everything, keep the room."""
        self.length = 0
