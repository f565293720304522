"""Names and shapes of every parameter, worked out from the model's config alone: what a plan counts before a tensor is made.

Legend: D dim, V vocabulary, P positions, H query heads, K key/value heads, C channels of a head, F inner feed-forward width.
"""

from __future__ import annotations

from math import prod

from llmtrain.config.typed import FeedForwardKind, ModelConfig, NormKind, PositionKind

Shape = tuple[int, ...]


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shape of each parameter by name, in the order of the Transformer's `named_parameters`; a tied tensor appears once.

    `model.vocab_size` must be settled.
    """
    assert model.vocab_size is not None, "the vocabulary is settled by make_plan first"
    shapes: dict[str, Shape] = {"embed.weight": (model.vocab_size, model.dim)}  # [V, D]
    if model.position is PositionKind.LEARNED:
        shapes["position_embed.weight"] = (model.max_positions, model.dim)  # [P, D]
    for layer in range(model.num_layers):
        shapes.update({f"blocks.{layer}.{name}": shape for name, shape in block_shapes(model).items()})
    shapes.update(_norm("norm", model))
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, model.dim)  # [V, D]
    return shapes


def block_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shapes of one block's parameters, by name inside the block; every block has the same."""
    heads, inner, dim = model.attention, model.feed_forward, model.dim
    query_dim, kv_dim = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim  # H C, K C
    shapes = _norm("attention_norm", model)
    shapes.update(_linear("attention.q", query_dim, dim, heads.bias))
    shapes.update(_linear("attention.k", kv_dim, dim, heads.bias))
    shapes.update(_linear("attention.v", kv_dim, dim, heads.bias))
    if heads.qk_norm:
        shapes["attention.q_norm.weight"] = (heads.head_dim,)
        shapes["attention.k_norm.weight"] = (heads.head_dim,)
    shapes.update(_linear("attention.out", dim, query_dim, heads.output_bias))
    shapes.update(_norm("feed_forward_norm", model))
    if inner.kind is FeedForwardKind.SWIGLU:
        shapes.update(_linear("feed_forward.gate", inner.hidden_dim, dim, inner.bias))
    shapes.update(_linear("feed_forward.up", inner.hidden_dim, dim, inner.bias))
    shapes.update(_linear("feed_forward.down", dim, inner.hidden_dim, inner.bias))
    return shapes


def num_parameters(model: ModelConfig) -> int:
    """Trainable numbers of the model; a tied matrix counts once."""
    return sum(prod(shape) for shape in parameter_shapes(model).values())


def tied_parameters(model: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Sets of names that are one tensor; the first name of a set is the one under which it is stored."""
    return (("embed.weight", "head.weight"),) if model.tie_embeddings else ()


def _linear(name: str, out_dim: int, in_dim: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (out_dim, in_dim)}
    if bias:
        shapes[f"{name}.bias"] = (out_dim,)
    return shapes


def _norm(name: str, model: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (model.dim,)}
    if model.norm is NormKind.LAYER:
        shapes[f"{name}.bias"] = (model.dim,)
    return shapes
