"""Which keys a query may see, and what the attention functions are given besides queries, keys and values.

A query sees the keys at or before it that are in its own document and within its window. It always sees itself, so no softmax is
taken over nothing, which would be NaN; padding is a document of its own.

Legend: B batch, T query positions, S key positions (S - T of them from a cache), H query heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.ops.random import DropoutKey


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention weights in one layer."""

    probability: float
    key: DropoutKey | None
    layer: int


@dataclass(frozen=True)
class MaskRequest:
    """What a mask has to say; the same for all layers with the same window."""

    document_ids: Tensor | None
    """[B, T] integers, equal within a document and different between the documents of a row, which follow each other; negative =
    padding. None = each row is one document. Only without a cache (S == T)."""
    window: int | None
    """Keys a query sees, its own included; None = all before it."""
    num_queries: int
    num_keys: int
    """The last query is at the last key."""
    device: torch.device
    dtype: torch.dtype
    """Of queries, keys and values."""


Mask = Any
"""What `AttentionBackend.make_mask` of the same backend made."""
MakeMask = Callable[[MaskRequest], Mask]
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Mask, AttentionDropout], Tensor]
"""(query [B, H, T, C], key [B, G, S, C], value [B, G, S, C], mask, drop) → softmax(query keyᵀ / sqrt(C)) value over the keys that the
mask lets a query see, [B, H, T, C] in the dtype of query (Vaswani et al. 2017, eq. 1). Query head h reads key-value head h // (H / G)."""


def hidden_keys(request: MaskRequest) -> Tensor:
    """[T, S], with documents [B, 1, T, T], bool: True where a query may not see a key."""
    first = request.num_keys - request.num_queries  # place of the first query among the keys
    if request.document_ids is None:
        seen = torch.ones(request.num_queries, request.num_keys, dtype=torch.bool, device=request.device)
    else:
        assert first == 0, "documents are only told apart without a cache"
        seen = request.document_ids[:, None, :, None] == request.document_ids[:, None, None, :]
    seen = seen.tril_(first)
    if request.window is not None:
        seen = seen.triu_(first - request.window + 1)
    return seen.logical_not_()
