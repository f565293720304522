"""Attention by torch's `scaled_dot_product_attention`, which has several kernels; one can be asked for by name.

Legend: B batch, T query positions, S key positions, H query heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.ops.attention_masks import AttentionDropout, MaskRequest, hidden_keys
from llmtrain.plan.attention import AUTO, repeats_groups

SDPA_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
NO_KERNEL = ("No viable backend", "No available kernel")
"""How torch begins when the kernels it may use cannot do what is asked (on a CPU, on CUDA)."""


@dataclass(frozen=True)
class SdpaMask:
    """What torch is told about visible keys."""

    scores: Tensor | None
    """[T, S] or [B, 1, T, T], added to the scores: 0, or -inf where a key is hidden. None = nothing but `causal` hides keys."""
    causal: bool


def make_sdpa_mask(request: MaskRequest) -> SdpaMask:
    """Scores only where torch cannot do without: it aligns its own causal mask with the first key, not with the last."""
    plain = request.document_ids is None and request.window is None
    if plain and request.num_queries in (1, request.num_keys):
        return SdpaMask(None, causal=request.num_queries > 1)
    hidden = hidden_keys(request)
    scores = torch.zeros(hidden.shape, dtype=request.dtype, device=request.device)
    return SdpaMask(scores.masked_fill_(hidden, -math.inf), causal=False)


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: SdpaMask, drop: AttentionDropout, *, kernel: str = AUTO
) -> Tensor:
    """torch's fused kernels (FlashAttention, Dao et al. 2022); score matrices never exist in whole, but for `math`.

    Raises:
        ConfigError: torch cannot run the named kernel on these tensors; it is never replaced by another.
    """
    num_repeats = query.shape[1] // key.shape[1]
    masked, dtype = mask.scores is not None, "fp32" if query.dtype is torch.float32 else "bf16"
    if num_repeats > 1 and repeats_groups(device=query.device.type, masked=masked, dtype=dtype, kernel=kernel):
        key, value = (x.repeat_interleave(num_repeats, dim=1) for x in (key, value))  # [B, H, S, C]
    grouped = query.shape[1] != key.shape[1]
    try:
        with nullcontext() if kernel == AUTO else sdpa_kernel(SDPA_KERNELS[kernel]):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask.scores, is_causal=mask.causal, enable_gqa=grouped
            )
    except RuntimeError as error:
        if kernel == AUTO or not str(error).startswith(NO_KERNEL):
            raise
        raise ConfigError(_cannot_run(kernel, query, key, mask)) from error


def _cannot_run(kernel: str, query: Tensor, key: Tensor, mask: SdpaMask) -> Problem:
    masked = "with" if mask.scores is not None else "without"
    dtype = str(query.dtype).removeprefix("torch.")
    rule = (
        f"torch {torch.__version__} cannot run it here: {query.device.type}, {dtype}, {query.shape[2]} queries, {key.shape[2]} keys, "
        f"{query.shape[-1]} channels, {masked} a mask; torch's warnings above say what is missing"
    )
    return Problem(f"attention.backend=sdpa attention.kernel={kernel}", rule, "attention.kernel=auto")
