"""Attention by torch's FlexAttention: a function says which keys are visible, blocks without any are skipped.

On CUDA it is compiled to one kernel. On a CPU it is run as it is, which writes out all scores and has no backward: good for evaluation
and generation.

Legend: B batch, T query positions, S key positions, H query heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from llmtrain.ops.attention_masks import AttentionDropout, MaskRequest


def make_flex_mask(request: MaskRequest) -> BlockMask:
    """Blocks of 128 queries and 128 keys: empty, full, or to be masked element by element."""
    ids, window, first = request.document_ids, request.window, request.num_keys - request.num_queries

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query + first
        if window is not None:
            seen = seen & (query + first - key < window)
        return seen if ids is None else seen & (ids[row, query] == ids[row, key])

    num_rows = None if ids is None else ids.shape[0]
    return create_block_mask(
        visible,
        num_rows,
        None,
        request.num_queries,
        request.num_keys,
        device=request.device,
        _compile=request.device.type == "cuda",
    )


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, drop: AttentionDropout) -> Tensor:
    """One kernel on CUDA, plain operations on a CPU."""
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        mixed: Tensor = _compiled()(query, key, value, block_mask=mask, enable_gqa=grouped)
        return mixed
    with warnings.catch_warnings():
        # The plan has said so: uncompiled is what a CPU gets.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        mixed = flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)
    return mixed


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)
