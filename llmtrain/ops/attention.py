"""Causal attention: one interface, several backends, a table of what each can do.

`reference` is the definition, written out in fp32; every other backend is tested against it. A backend is chosen by name once, when
a model is built, and none stands in for another but in one case: `blocked` leaves decoding after a cache to `sdpa`.

Legend: B batch, T query positions, S key positions (S - T of them from a cache), H query heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.ops.blocked_attention import blocked_attention
from llmtrain.ops.dropout import dropout
from llmtrain.ops.dtypes import at_least_fp32
from llmtrain.ops.random import DropoutKey, Site
from llmtrain.plan.plan import Availability


class AttentionName(StrEnum):
    REFERENCE = "reference"
    SDPA = "sdpa"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention weights in one layer."""

    probability: float
    key: DropoutKey | None
    layer: int


AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionDropout], Tensor]
"""(query [B, H, T, C], key [B, G, S, C], value [B, G, S, C], allowed, drop) → softmax(query keyᵀ / sqrt(C)) value, [B, H, T, C] in the
dtype of query, with a causal mask (Vaswani et al. 2017, eq. 1). Query head h reads key-value head h // (H / G). The last query sits
at the last key, so S > T means that the first S - T keys come from a cache. `allowed` is None when a row is one document, else what
`document_mask` gives, and S == T."""


@dataclass(frozen=True)
class AttentionBackend:
    """One way to compute attention, and what it can do."""

    name: AttentionName
    function: AttentionFunction
    supports_dropout: bool
    devices: frozenset[str]


def document_mask(document_ids: Tensor) -> Tensor:
    """Which keys a query may see when a row holds several documents; made once per forward, shared by all layers.

    Args:
        document_ids: [B, T] integers, equal within a document and different between the documents of a row.

    Returns:
        [B, 1, T, T] bool: key at or before the query and in the same document. A query always sees itself, so there is no row
        without a key, which softmax would make NaN.
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]  # [B, 1, T, T]
    return same.tril_()


def reference_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, drop: AttentionDropout) -> Tensor:
    """The definition: whole score matrices, at least fp32 throughout."""
    num_repeats = query.shape[1] // key.shape[1]
    key, value = (at_least_fp32(x).repeat_interleave(num_repeats, dim=1) for x in (key, value))  # [B, H, S, C]
    scores = (at_least_fp32(query) / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)  # [B, H, T, S]
    if allowed is None:
        allowed = causal_mask(query.shape[-2], key.shape[-2], query.device)
    weights = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1)  # [B, H, T, S]
    if drop.key is not None and drop.probability > 0:
        by_position = weights.transpose(1, 2)  # [B, T, H, S]
        weights = dropout(by_position, drop.probability, drop.key, drop.layer, Site.ATTENTION).transpose(1, 2)
    return (weights @ value).to(query.dtype)  # [B, H, T, C]


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, drop: AttentionDropout) -> Tensor:
    """torch's fused kernels (FlashAttention, Dao et al. 2022); score matrices never exist in whole."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    is_causal = allowed is None and num_queries == num_keys
    if allowed is None and not is_causal and num_queries > 1:
        # torch aligns is_causal with the first key; after a cache the last query belongs to the last key.
        allowed = causal_mask(num_queries, num_keys, query.device)
    num_repeats = query.shape[1] // key.shape[1]
    if num_repeats > 1 and query.is_cuda and (allowed is not None or query.dtype is torch.float32):
        # Flash takes neither a mask nor fp32, the memory-efficient kernel no grouped heads: torch would write out all scores.
        key, value = (x.repeat_interleave(num_repeats, dim=1) for x in (key, value))  # [B, H, S, C]
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=is_causal, enable_gqa=grouped)


def blocked(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, drop: AttentionDropout) -> Tensor:
    """Batched matmuls over cache-sized blocks; decoding after a cache, which has no blocks to gain from, goes to `sdpa`."""
    if query.shape[-2] != key.shape[-2]:
        return sdpa_attention(query, key, value, allowed, drop)
    return blocked_attention(query, key, value, allowed)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[T, S] bool, True where the key is at or before the query, the last query being at the last key."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril_(num_keys - num_queries)


ATTENTION_BACKENDS: Mapping[AttentionName, AttentionBackend] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            AttentionBackend(AttentionName.REFERENCE, reference_attention, True, frozenset({"cpu", "cuda"})),
            AttentionBackend(AttentionName.SDPA, sdpa_attention, False, frozenset({"cpu", "cuda"})),
            AttentionBackend(AttentionName.BLOCKED, blocked, False, frozenset({"cpu"})),
        )
    }
)


def attention_backend(name: str, *, dropout_probability: float = 0.0) -> AttentionBackend:
    """Look up a backend and check that it can do what is asked.

    Raises:
        ConfigError: unknown name, or attention dropout on a backend without it.
    """
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(
            Problem(f"attention.backend={name}", "no such attention backend", cure=f"one of {', '.join(ATTENTION_BACKENDS)}")
        )
    backend = ATTENTION_BACKENDS[AttentionName(name)]
    if dropout_probability > 0 and not backend.supports_dropout:
        able = ", ".join(other.name for other in ATTENTION_BACKENDS.values() if other.supports_dropout)
        raise ConfigError(
            Problem(
                f"model.dropout.attention={dropout_probability}",
                f"attention.backend={name} cannot drop attention weights",
                cure=f"attention.backend={able}, or model.dropout.attention=0",
            )
        )
    return backend


def availability(device: str) -> dict[str, Availability]:
    """Which backends run on a device type (`cpu`, `cuda`), and why not where not."""
    return {
        backend.name.value: Availability(True)
        if device in backend.devices
        else Availability(False, f"runs on {', '.join(sorted(backend.devices))}, not on {device}")
        for backend in ATTENTION_BACKENDS.values()
    }
