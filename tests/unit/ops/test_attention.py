"""Attention backends against a definition in loops, and against each other, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.models import relative_error
from torch import Tensor

from llmtrain.config.errors import ConfigError
from llmtrain.ops.attention import (
    ATTENTION_BACKENDS,
    AttentionDropout,
    AttentionName,
    attention_backend,
    availability,
    document_mask,
)
from llmtrain.ops.random import DropoutKey

NO_DROPOUT = AttentionDropout(0.0, None, 0)
BACKENDS = [name for name, backend in ATTENTION_BACKENDS.items() if "cpu" in backend.devices]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def heads(num_heads: int, length: int, *, batch_size: int = 2, head_dim: int = 8, seed: int = 0) -> Tensor:
    """[B, H, T, C], a view of [B, T, H, C] as the projections give it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, length, num_heads, head_dim, generator=generator).transpose(1, 2)


def documents(batch_size: int, *lengths: int) -> Tensor:
    row = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    return row.repeat(batch_size, 1)


def run(name: str, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None) -> Tensor:
    return ATTENTION_BACKENDS[AttentionName(name)].function(query, key, value, allowed, NO_DROPOUT)


def in_loops(query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None) -> Tensor:
    """Row by row, head by head, exponentials written out."""
    out = torch.zeros_like(query)
    repeats, offset = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for t in range(query.shape[2]):
                seen = [s for s in range(t + offset + 1) if document_ids is None or document_ids[b, s] == document_ids[b, t]]
                keys, values = key[b, h // repeats, seen], value[b, h // repeats, seen]
                weights = (keys @ query[b, h, t] / math.sqrt(query.shape[-1])).exp()
                out[b, h, t] = (weights / weights.sum()) @ values
    return out


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_values_are_the_definition(name: str, packed: bool, kv_heads: int) -> None:
    query, key, value = heads(4, 16), heads(kv_heads, 16, seed=1), heads(kv_heads, 16, seed=2)
    ids = documents(2, 5, 9, 2) if packed else None
    found = run(name, query, key, value, None if ids is None else document_mask(ids))
    assert relative_error(found, in_loops(query.double(), key.double(), value.double(), ids)) < 1e-6


LENGTHS = {"one token": (1,), "odd": (100,), "blocks": (128, 128), "more than two blocks": (37, 200, 63)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_values_and_gradients(name: str, dtype: torch.dtype, lengths: tuple[int, ...], packed: bool, kv_heads: int) -> None:
    length = sum(lengths)
    inputs = [heads(count, length, seed=seed).to(dtype) for seed, count in enumerate((6, kv_heads, kv_heads))]
    upstream = heads(6, length, seed=3).to(dtype)
    mask = document_mask(documents(2, *lengths)) if packed else None
    results = []
    for backend, exact in ((name, False), ("reference", True)):
        tensors = [(tensor.double() if exact else tensor.clone()).requires_grad_() for tensor in inputs]
        out = run(backend, *tensors, mask)
        assert out.dtype is tensors[0].dtype
        results.append([out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))])
    for what, found, expected in zip(("out", "query", "key", "value"), *results, strict=True):
        if expected.norm() < 1e-9:  # one key: the weights are 1 and query and key have no gradient
            assert found.norm() < 1e-3 * upstream.norm()
        else:
            assert relative_error(found, expected) < TOLERANCE[dtype], what


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_last_query_sits_at_last_key(name: str, num_queries: int, num_keys: int) -> None:
    """The mask's corner: after a cache, causal means the bottom right one."""
    query, key, value = heads(4, num_keys), heads(2, num_keys, seed=1), heads(2, num_keys, seed=2)
    whole = run("reference", query, key, value)
    torch.testing.assert_close(
        run(name, query[:, :, -num_queries:], key, value), whole[:, :, -num_queries:], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_b30_documents_do_not_see_each_other(name: str) -> None:
    mask = document_mask(documents(2, 5, 9, 2))
    first = [heads(4, 16, seed=seed).contiguous() for seed in range(3)]
    second = [tensor.clone() for tensor in first]
    for tensor in second:
        tensor[:, :, :5] = torch.randn(2, 4, 5, 8) * 100
    out_first, out_second = run(name, *first, mask), run(name, *second, mask)
    assert torch.equal(out_first[:, :, 5:], out_second[:, :, 5:])
    assert not torch.equal(out_first[:, :, :5], out_second[:, :, :5])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("where", ["left", "right", "whole row"])
def test_b49_padding_reaches_nobody(name: str, where: str) -> None:
    """Padding of any size; that of NaN is ended at the embedding, see the test of the model."""
    ids = documents(2, 7, 6)
    padding = {"left": ids == 0, "right": ids == 1, "whole row": (ids >= 0) & (torch.arange(2) == 1)[:, None]}[where]
    allowed, hidden = document_mask(ids.masked_fill(padding, -1)), padding[:, None, :, None]
    upstream = heads(4, 13, seed=3).masked_fill(hidden, 0.0)
    results = []
    for filling in (0.0, 1e15):
        tensors = [heads(4, 13, seed=seed).masked_fill(hidden, filling).requires_grad_() for seed in range(3)]
        out = run(name, *tensors, allowed)
        results.append([out, *torch.autograd.grad(out, tensors, upstream)])
    for clean, dirty in zip(*results, strict=True):
        assert dirty.isfinite().all()
        assert torch.equal(clean.masked_select(~hidden), dirty.masked_select(~hidden))
    for gradient in results[1][1:]:
        assert (gradient.masked_select(hidden) == 0).all()


def test_dropped_weights_of_reference() -> None:
    """With values that tell the keys apart the output shows the weights: each is 0 or the undropped one over 1 - p."""
    length = 12
    query, key = heads(2, length, head_dim=length), heads(2, length, head_dim=length, seed=1)
    value = torch.eye(length).expand(2, 2, length, length)
    backend = ATTENTION_BACKENDS[AttentionName.REFERENCE]
    dropout_key = DropoutKey(seed=0, update=0, samples=torch.tensor([4, 9]))
    plain = backend.function(query, key, value, None, NO_DROPOUT)
    dropped = backend.function(query, key, value, None, AttentionDropout(0.25, dropout_key, layer=1))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.75)
    possible = plain != 0
    assert 0.15 < (~kept & possible).sum() / possible.sum() < 0.35
    for other in (kept[0, 1], kept[1, 0]):  # another head, another sample
        assert not torch.equal(kept[0, 0], other)


def test_document_mask_is_causal_within_a_document() -> None:
    allowed = document_mask(torch.tensor([[0, 0, 1, 1, -1]]))
    assert allowed[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_what_a_backend_cannot_do_is_refused() -> None:
    for name in ATTENTION_BACKENDS:
        attention_backend(name)
    attention_backend("reference", dropout_probability=0.1)
    for name in ("sdpa", "blocked"):
        with pytest.raises(ConfigError, match=rf"attention.backend={name} cannot drop(.|\n)*attention.backend=reference"):
            attention_backend(name, dropout_probability=0.1)
    with pytest.raises(ConfigError, match="attention.backend=flash(.|\n)*reference, sdpa"):
        attention_backend("flash")


def test_availability_gives_reasons() -> None:
    assert all(state.available for state in availability("cpu").values())
    on_cuda = availability("cuda")
    assert on_cuda["reference"].available and on_cuda["sdpa"].available
    assert not on_cuda["blocked"].available and "cpu" in on_cuda["blocked"].reason
