"""Causal attention: one interface, several backends; `plan/attention.py` is the table of what each can do.

`reference` is the definition, written out in fp32; every other backend is tested against it. A backend is chosen by name once, when
a model is built, and none stands in for another but in one case: `blocked` leaves decoding after a cache to `sdpa`.

Legend: B batch, T query positions, S key positions (S - T of them from a cache), H query heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from torch import Tensor

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.plugins import find
from llmtrain.ops.attention_flash import MODULES, flash_attention, load_flash_library, make_flash_mask
from llmtrain.ops.attention_flex import flex, make_flex_mask
from llmtrain.ops.attention_masks import AttentionDropout, AttentionFunction, MakeMask, MaskRequest, hidden_keys
from llmtrain.ops.attention_plugin import allowed_keys, plugin_attention
from llmtrain.ops.attention_sdpa import SdpaMask, make_sdpa_mask, sdpa_attention
from llmtrain.ops.blocked_attention import BlockedMask, blocked_attention
from llmtrain.ops.dropout import dropout
from llmtrain.ops.dtypes import at_least_fp32
from llmtrain.ops.random import Site
from llmtrain.plan.attention import ATTENTION, AUTO


class AttentionName(StrEnum):
    REFERENCE = "reference"
    SDPA = "sdpa"
    BLOCKED = "blocked"
    FLASH_ATTN = "flash_attn"
    FLEX = "flex"


@dataclass(frozen=True)
class AttentionBackend:
    """One way to compute attention."""

    name: str
    kernel: str
    make_mask: MakeMask
    """Made once a forward for each window and shared by all layers that have it."""
    function: AttentionFunction


def attention_backend(
    name: str, *, kernel: str = AUTO, dropout_probability: float = 0.0, options: Any = None
) -> AttentionBackend:
    """Build a backend and check that it can do what is asked.

    Args:
        options: those of a plugin; None = its defaults.

    Raises:
        ConfigError: unknown name or kernel, attention dropout on a backend without it, or a package that cannot be imported.
    """
    if (plugin := find("attention", name)) is not None:
        return AttentionBackend(name, kernel, allowed_keys, plugin_attention(plugin, options or plugin.plugin.options()))
    if name not in ATTENTION:
        raise ConfigError(
            Problem(f"attention.backend={name}", "no such attention backend", cure=f"one of {', '.join(ATTENTION)}")
        )
    row = ATTENTION[name]
    kernels = dict.fromkeys(way.name for way in row.kernels if way.name)
    if kernel != AUTO and kernel not in kernels:
        cure = f"attention.kernel={' or '.join((AUTO, *kernels))}"
        raise ConfigError(Problem(f"attention.kernel={kernel}", f"no kernel of attention.backend={name}", cure))
    if dropout_probability > 0 and not row.dropout:
        able = ", ".join(other for other, abilities in ATTENTION.items() if abilities.dropout)
        raise ConfigError(
            Problem(
                f"model.dropout.attention={dropout_probability}",
                f"attention.backend={name} cannot drop attention weights",
                cure=f"attention.backend={able}, or model.dropout.attention=0",
            )
        )
    return _build(AttentionName(name), kernel)


def _build(name: AttentionName, kernel: str) -> AttentionBackend:
    match name:
        case AttentionName.REFERENCE:
            return AttentionBackend(name, kernel, hidden_keys, reference_attention)
        case AttentionName.SDPA:
            return AttentionBackend(name, kernel, make_sdpa_mask, partial(sdpa_attention, kernel=kernel))
        case AttentionName.BLOCKED:
            return AttentionBackend(name, kernel, make_blocked_mask, blocked)
        case AttentionName.FLASH_ATTN:
            # Without a plan, which names the newest that runs here: the version most machines have.
            kernel = [*MODULES][-1] if kernel == AUTO else kernel
            function = partial(flash_attention, library=load_flash_library(kernel))
            return AttentionBackend(name, kernel, make_flash_mask, function)
        case AttentionName.FLEX:
            return AttentionBackend(name, kernel, make_flex_mask, flex)


def reference_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, drop: AttentionDropout) -> Tensor:
    """The definition: whole score matrices, at least fp32 throughout."""
    num_repeats = query.shape[1] // key.shape[1]
    key, value = (at_least_fp32(x).repeat_interleave(num_repeats, dim=1) for x in (key, value))  # [B, H, S, C]
    scores = (at_least_fp32(query) / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)  # [B, H, T, S]
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)  # [B, H, T, S]
    if drop.key is not None and drop.probability > 0:
        by_position = weights.transpose(1, 2)  # [B, T, H, S]
        weights = dropout(by_position, drop.probability, drop.key, drop.layer, Site.ATTENTION).transpose(1, 2)
    return (weights @ value).to(query.dtype)  # [B, H, T, C]


def make_blocked_mask(request: MaskRequest) -> BlockedMask | SdpaMask:
    """Document ids and window as they are, or after a cache what `sdpa` takes."""
    if request.num_queries != request.num_keys:
        return make_sdpa_mask(request)
    return BlockedMask.of(request.document_ids, request.window)


def blocked(query: Tensor, key: Tensor, value: Tensor, mask: BlockedMask | SdpaMask, drop: AttentionDropout) -> Tensor:
    """Batched matmuls over cache-sized blocks; decoding after a cache, which has no blocks to gain from, goes to `sdpa`."""
    if isinstance(mask, SdpaMask):
        return sdpa_attention(query, key, value, mask, drop)
    return blocked_attention(query, key, value, mask)
