"""Work of one token, by the convention that every MFU figure of this program uses.

Counted: the matrix products of forward and backward (backward = twice forward), the head included. Not counted: the embedding
look-up, norms, activations, the optimizer, and whatever recompute does again. Attention is two products of T × T scores per
*query* head (grouped key/value heads make the projections smaller, not the scores); a causal mask halves them exactly. In a layer
with a window of w keys, shorter than the sequence, a token meets w keys, or causally w - w²/2T, the mean over a sequence.
"""

from __future__ import annotations

from math import prod

from llmtrain.config.typed import ModelConfig
from llmtrain.plan.shapes import block_shapes

FORWARD_AND_BACKWARD = 3
"""A product's backward is two products of its size."""


def flops_per_token(model: ModelConfig, sequence_length: int, causal: bool) -> float:
    """Matmul FLOPs of forward and backward for one token of a sequence of `sequence_length` tokens.

    Args:
        model: the shape; `vocab_size` must be settled.
        sequence_length: tokens T that attend to each other.
        causal: count attention at half (what a causal model needs) instead of whole (what several peers print).
    """
    forward = 2 * matmul_parameters(model) + attention_flops_per_token(model, sequence_length, causal)
    return FORWARD_AND_BACKWARD * forward


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that multiply every token: all matrices of the blocks and the head, tied or not."""
    assert model.vocab_size is not None, "the vocabulary is settled by make_plan first"
    block = sum(prod(shape) for shape in block_shapes(model).values() if len(shape) == 2)
    return model.num_layers * block + model.vocab_size * model.dim


def attention_flops_per_token(model: ModelConfig, sequence_length: int, causal: bool) -> float:
    """Forward FLOPs of Q K^T and P V over all layers for one token: 2 products × 2 FLOPs × keys × (query heads × channels)."""
    heads = model.attention
    keys = sum(keys_per_token(window, sequence_length, causal) for window in model.layer_windows)
    return 4 * heads.num_heads * heads.head_dim * keys


def keys_per_token(window: int | None, sequence_length: int, causal: bool) -> float:
    """Keys that a token of a sequence meets in a layer, as the convention counts them.

    Args:
        window: keys that a query sees at most; None = all.
        sequence_length: tokens T.
        causal: without it every query is counted as if it had the most keys that any has.
    """
    reach = sequence_length if window is None else min(window, sequence_length)
    return reach - reach**2 / (2 * sequence_length) if causal else float(reach)
