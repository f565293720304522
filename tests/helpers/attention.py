"""Attention written out in loops, and a stand-in for the FlashAttention packages made from what their documentation promises."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmtrain.ops.attention import AttentionBackend, AttentionName, attention_backend
from llmtrain.ops.attention_flash import FlashLibrary, flash_attention, make_flash_mask
from llmtrain.ops.attention_masks import AttentionDropout, MaskRequest
from llmtrain.plan.attention import ATTENTION

NO_DROPOUT = AttentionDropout(0.0, None, 0)


def heads(num_heads: int, length: int, *, batch_size: int = 2, head_dim: int = 8, seed: int = 0) -> Tensor:
    """[B, H, T, C], a view of [B, T, H, C] as the projections give it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, length, num_heads, head_dim, generator=generator).transpose(1, 2)


def documents(batch_size: int, *lengths: int) -> Tensor:
    """[B, T]: the same documents in every row."""
    row = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    return row.repeat(batch_size, 1)


def attend(
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    document_ids: Tensor | None = None,
    window: int | None = None,
    drop: AttentionDropout = NO_DROPOUT,
) -> Tensor:
    """Mask and attention as the model calls them."""
    mask = backend.make_mask(
        MaskRequest(document_ids, window, query.shape[2], key.shape[2], device=query.device, dtype=query.dtype)
    )
    return backend.function(query, key, value, mask, drop)


def in_loops(query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None, window: int | None = None) -> Tensor:
    """Row by row, head by head, exponentials written out."""
    out = torch.zeros_like(query)
    repeats, offset = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    for b in range(query.shape[0]):
        for t in range(query.shape[2]):
            place = t + offset
            seen = [s for s in range(place + 1) if document_ids is None or document_ids[b, s] == document_ids[b, place]]
            seen = [s for s in seen if window is None or place - s < window]
            for h in range(query.shape[1]):
                keys, values = key[b, h // repeats, seen], value[b, h // repeats, seen]
                weights = (keys @ query[b, h, t] / math.sqrt(query.shape[-1])).exp()
                out[b, h, t] = (weights / weights.sum()) @ values
    return out


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int], **_: Any) -> Tensor:
    """[B, T, H, C] → [B, T, H, C]: query i sees keys i + S - T - left to i + S - T + right; -1 = no end; causal = right is 0."""
    (length, num_heads, width), num_keys = q.shape[1:], k.shape[1]
    left, right = window_size[0], 0 if causal else window_size[1]
    distance = torch.arange(num_keys)[None, :] - (torch.arange(length)[:, None] + num_keys - length)  # key - query
    seen = (distance >= -left if left >= 0 else torch.tensor(True)) & (distance <= right if right >= 0 else torch.tensor(True))
    k, v = (x.repeat_interleave(num_heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bthc,bshc->bhts", q.float(), k.float()) / math.sqrt(width)
    return torch.einsum("bhts,bshc->bthc", scores.masked_fill(~seen, -math.inf).softmax(-1), v.float()).to(q.dtype)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> tuple[Tensor, None]:
    """[sum T, H, C]: one sequence after the other; with statistics, as some versions return them."""
    assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32 and int(cu_seqlens_q[-1]) == len(q)
    ends = cu_seqlens_q.tolist()
    assert max(stop - start for start, stop in zip(ends, ends[1:], strict=False)) == max_seqlen_q == max_seqlen_k
    pieces = [
        flash_attn_func(*(x[start:stop][None] for x in (q, k, v)), **options)[0]
        for start, stop in zip(ends, ends[1:], strict=False)
    ]
    return torch.cat(pieces), None


STAND_IN = FlashLibrary(flash_attn_func, flash_attn_varlen_func)


def build_here(name: str, kernel: str) -> AttentionBackend:
    """A backend that runs on this CPU; `flash_attn` with the stand-in."""
    if name == "flash_attn":
        function = partial(flash_attention, library=STAND_IN)
        return AttentionBackend(AttentionName.FLASH_ATTN, kernel, make_flash_mask, function)
    return attention_backend(name, kernel=kernel)


HERE = [(name, way.name or "auto") for name, row in ATTENTION.items() for way in row.on("cpu")]
HERE += [("sdpa", "auto"), ("flash_attn", "stand-in")]
"""Backend and kernel, everything that runs on a CPU."""
TRAINED_HERE = [(name, kernel) for name, kernel in HERE if name != "flex"]
