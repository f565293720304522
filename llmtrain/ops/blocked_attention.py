"""Causal attention as batched matmuls over blocks of queries that stay in the processor's cache.

For CPUs. torch's fused CPU kernel multiplies small tiles with a general matmul routine and reaches a fraction of what large batched
products do, most of all in bf16 and for short sequences. Here a block of queries meets all keys before its end in one batched
product, or with a window the keys that one of its queries sees; scores are made again in backward, so as with FlashAttention (Dao
et al. 2022) the memory kept is linear in T. Nothing is ever T × T: documents are compared a block at a time.

Scores and their softmax are fp32, as in fused kernels; the other products are in the dtype of the query.

Legend: B batch, b sequences of a chunk, T positions, Q queries of a block, S keys of a block, W keys of the largest block, H query
heads, G key-value heads, R = H / G, C channels of a head. Rows of a matmul are the R heads of a group times Q queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.ops.library import named_operation

QUERIES_PER_BLOCK = 128
SCORES_PER_BLOCK = 2**20
"""Scores alive at once: 4 MiB. Both numbers are the best of those tried on a Zen 5 CPU at lengths 64 to 2048."""


@dataclass(frozen=True)
class BlockedMask:
    """What hides keys besides causality."""

    document_ids: Tensor | None
    """[B, T] int32; a query sees the keys with its own id. None = all."""
    window: int | None
    """Keys a query sees, its own included; None = all."""

    @classmethod
    def of(cls, document_ids: Tensor | None, window: int | None) -> BlockedMask:
        """With ids of a width that compares fast."""
        return cls(None if document_ids is None else document_ids.to(torch.int32), window)


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockedMask) -> Tensor:
    """softmax(query keyᵀ / sqrt(C)) value over the keys at or before a query that the mask lets it see.

    Args:
        query: [B, H, T, C].
        key, value: [B, G, T, C].

    Returns:
        [B, H, T, C], laid out as [B, T, H, C].
    """
    mixed: Tensor = _BlockedAttention.apply(query, key, value, mask.document_ids, mask.window)
    return mixed


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None, window: int | None) -> Tensor:
        mixed: Tensor = blocked_attention_forward(query, key, value, document_ids, window)
        ctx.save_for_backward(query, key, value, document_ids, mixed)
        ctx.window = window
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mixed: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, document_ids, mixed = ctx.saved_tensors
        grads = _backward(grad_mixed, query, key, value, BlockedMask(document_ids, ctx.window), mixed)
        return *grads, None, None


@dataclass(frozen=True)
class _Block:
    """One block of queries of one chunk of sequences."""

    sequences: slice
    queries: slice
    keys: slice
    bias: Tensor
    """[R Q, S]: 0 where the key is at or before the query and in its window, else -inf."""


def _blocks(query: Tensor, key: Tensor, window: int | None) -> Iterator[list[_Block]]:
    """The blocks of one chunk of sequences after the other."""
    batch_size, num_heads, length, _ = query.shape
    repeats, step = num_heads // key.shape[1], min(QUERIES_PER_BLOCK, length)
    before = length if window is None else window - 1  # keys that the first query of a block sees besides its own
    width = min(length, before + step)  # W
    # Counted from its last key, the mask of every block is the same; the rest of the queries has its lower end.
    bias = query.new_full((step, width), -math.inf, dtype=torch.float32).triu_(width - step + 1)  # [Q, W]
    if window is not None:
        bias += torch.full_like(bias, -math.inf).tril_(width - step - window)
    ends = [*range(step, length, step), length]
    starts = [max(0, place * step - before) for place in range(len(ends))]
    whole_bias, rest_bias = bias.repeat(repeats, 1), bias[len(ends) * step - length :].repeat(repeats, 1)  # [R Q, W]
    chunk = max(1, SCORES_PER_BLOCK // (num_heads * step * width))
    for first in range(0, batch_size, chunk):
        yield [
            _Block(
                sequences=slice(first, first + chunk),
                queries=slice(place * step, end),
                keys=slice(start, end),
                bias=(rest_bias if end == length else whole_bias)[:, width - (end - start) :],
            )
            for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]


def _weights(query: Tensor, key_rows: Tensor, document_ids: Tensor | None, block: _Block) -> tuple[Tensor, Tensor]:
    """The queries of a block as matmul rows [b G, R Q, C], and their attention weights [b G, R Q, S]."""
    queries = _group(query[block.sequences, :, block.queries], key_rows)  # [b G, R Q, C]
    keys = key_rows[:, block.keys].float().transpose(1, 2)  # [b G, C, S]
    scores = torch.baddbmm(block.bias, queries.float(), keys, alpha=1 / math.sqrt(query.shape[-1]))  # [b G, R Q, S]
    if document_ids is not None:
        of_queries = document_ids[block.sequences, None, block.queries, None]  # [b, 1, Q, 1]
        of_keys = document_ids[block.sequences, None, None, block.keys]  # [b, 1, 1, S]
        shape = torch.broadcast_shapes(of_queries.shape, of_keys.shape)
        hidden = torch.ne(of_queries, of_keys, out=scores.new_empty(shape))  # [b, 1, Q, S]
        # Adding is several times faster on a CPU than filling by a boolean mask.
        scores.view(hidden.shape[0], -1, *hidden.shape[2:]).add_(hidden, alpha=torch.finfo(scores.dtype).min)
    return queries, scores.softmax(dim=-1).to(query.dtype)


def _group(x: Tensor, key_rows: Tensor) -> Tensor:
    """[b, H, Q, C] → [b G, R Q, C]: the heads of a group become rows that multiply the same keys."""
    return x.reshape(key_rows.shape[0], -1, x.shape[-1])


@named_operation("blocked_attention(Tensor query, Tensor key, Tensor value, Tensor? document_ids, int? window) -> Tensor")
def blocked_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None, window: int | None
) -> Tensor:
    """The value of `blocked_attention` as one operation."""
    mixed = _empty_like(query)  # [B, H, T, C]
    for chunk in _blocks(query, key, window):
        key_rows, value_rows = (x[chunk[0].sequences].flatten(0, 1) for x in (key, value))  # [b G, T, C]
        for block in chunk:
            _, weights = _weights(query, key_rows, document_ids, block)  # [b G, R Q, S]
            target = mixed[block.sequences, :, block.queries]  # [b, H, Q, C]
            target.copy_(torch.bmm(weights, value_rows[:, block.keys]).view(target.shape))
    return mixed


def _backward(
    grad_mixed: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: BlockedMask, mixed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    With weights P = softmax(S) and their gradient dP, dS = P · (dP - Σ dP · P), and that sum over keys is the product of output
    and its gradient, known without the weights (Dao et al. 2022, appendix B.2).
    """
    grad_query, grad_key, grad_value = (_empty_like(x) for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1])
    weighted_sums = torch.linalg.vecdot(mixed.float(), grad_mixed.float()).to(query.dtype).unsqueeze(-1)  # [B, H, T, 1]
    for chunk in _blocks(query, key, mask.window):
        sequences = chunk[0].sequences
        key_rows, value_rows = (x[sequences].flatten(0, 1) for x in (key, value))  # [b G, T, C]
        # Sums over the blocks of queries, in fp32 as every gradient sum.
        key_sums, value_sums = (torch.zeros_like(key_rows, dtype=torch.float32) for _ in range(2))
        for block in chunk:
            queries, weights = _weights(query, key_rows, mask.document_ids, block)  # [b G, R Q, C], [b G, R Q, S]
            grads = _group(grad_mixed[sequences, :, block.queries], key_rows)  # [b G, R Q, C]
            value_sums[:, block.keys] += torch.bmm(weights.transpose(1, 2), grads)
            grad_scores = torch.bmm(grads, value_rows[:, block.keys].transpose(1, 2))  # [b G, R Q, S]
            grad_scores.sub_(_group(weighted_sums[sequences, :, block.queries], key_rows)).mul_(weights)
            target = grad_query[sequences, :, block.queries]  # [b, H, Q, C]
            target.copy_(torch.bmm(grad_scores, key_rows[:, block.keys]).mul_(scale).view(target.shape))
            key_sums[:, block.keys] += torch.bmm(grad_scores.transpose(1, 2), queries)
        for target, sums in ((grad_key, key_sums.mul_(scale)), (grad_value, value_sums)):
            target[sequences] = sums.view_as(target[sequences])
    return grad_query, grad_key, grad_value


def _empty_like(x: Tensor) -> Tensor:
    """Like x [B, H, T, C], laid out as [B, T, H, C]: the order in which the projections read and write heads."""
    batch_size, num_heads, length, width = x.shape
    return x.new_empty(batch_size, length, num_heads, width).transpose(1, 2)
