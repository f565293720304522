"""Attention backends against a definition in loops, and against each other, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.attention import HERE, TRAINED_HERE, attend, build_here, documents, heads, in_loops
from helpers.models import relative_error
from torch import Tensor

from llmtrain.config.errors import ConfigError
from llmtrain.ops.attention import AttentionDropout, AttentionName, attention_backend
from llmtrain.ops.attention_masks import MaskRequest, hidden_keys
from llmtrain.ops.random import DropoutKey
from llmtrain.plan.attention import ATTENTION

REFERENCE = attention_backend("reference")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
every_backend = pytest.mark.parametrize(("name", "kernel"), HERE)
every_trained_backend = pytest.mark.parametrize(("name", "kernel"), TRAINED_HERE)


def test_the_table_and_the_names_are_the_same() -> None:
    assert [name.value for name in AttentionName] == list(ATTENTION)


@every_backend
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 16, 99])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_values_are_the_definition(name: str, kernel: str, packed: bool, window: int | None, kv_heads: int) -> None:
    query, key, value = heads(4, 16), heads(kv_heads, 16, seed=1), heads(kv_heads, 16, seed=2)
    ids = documents(2, 5, 9, 2) if packed else None
    found = attend(build_here(name, kernel), query, key, value, document_ids=ids, window=window)
    assert found.shape == query.shape
    assert relative_error(found, in_loops(query.double(), key.double(), value.double(), ids, window)) < 1e-6


LENGTHS = {"one token": (1,), "odd": (100,), "blocks": (128, 128), "more than two blocks": (37, 200, 63)}


@every_trained_backend
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 50, 130])
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_values_and_gradients(
    name: str, kernel: str, dtype: torch.dtype, lengths: tuple[int, ...], packed: bool, window: int | None, kv_heads: int
) -> None:
    length = sum(lengths)
    inputs = [heads(count, length, seed=seed).to(dtype) for seed, count in enumerate((6, kv_heads, kv_heads))]
    upstream = heads(6, length, seed=3).to(dtype)
    ids = documents(2, *lengths) if packed else None
    results = []
    for backend, exact in ((build_here(name, kernel), False), (REFERENCE, True)):
        tensors = [(tensor.double() if exact else tensor.clone()).requires_grad_() for tensor in inputs]
        out = attend(backend, *tensors, document_ids=ids, window=window)
        assert out.dtype is tensors[0].dtype
        results.append([out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))])
    for what, found, expected in zip(("out", "query", "key", "value"), *results, strict=True):
        if expected.norm() < 1e-9:  # one key: the weights are 1 and query and key have no gradient
            assert found.norm() < 1e-3 * upstream.norm()
        else:
            assert relative_error(found, expected) < TOLERANCE[dtype], what


@every_backend
@pytest.mark.parametrize("window", [None, 1, 3, 8, 9])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
@torch.no_grad()
def test_last_query_sits_at_last_key(name: str, kernel: str, window: int | None, num_queries: int, num_keys: int) -> None:
    """The mask's corner: after a cache, causal means the bottom right one, and a window ends at the key of its query."""
    query, key, value = heads(4, num_keys), heads(2, num_keys, seed=1), heads(2, num_keys, seed=2)
    whole = in_loops(query.double(), key.double(), value.double(), None, window).float()
    found = attend(build_here(name, kernel), query[:, :, -num_queries:], key, value, window=window)
    torch.testing.assert_close(found, whole[:, :, -num_queries:], rtol=1e-5, atol=1e-6)


@every_backend
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "window"), [(24, 1), (24, 5), (300, 128), (300, 129), (300, 7)])
@torch.no_grad()
def test_a_window_is_its_own_key_and_those_before(name: str, kernel: str, packed: bool, length: int, window: int) -> None:
    """Exactly w keys, the query's own included: the last one outside may hold anything, the first one inside matters."""
    backend, query, place = build_here(name, kernel), heads(2, length, batch_size=1), length - 3
    ids = torch.zeros(1, length, dtype=torch.long) if packed else None
    key, value = heads(2, length, batch_size=1, seed=1), heads(2, length, batch_size=1, seed=2)

    def with_other_keys(stop: int) -> Tensor:
        others = torch.arange(length)[None, None, :, None] <= stop
        keys, values = key.masked_fill(others, 3.0), value.masked_fill(others, -100.0)
        return attend(backend, query, keys, values, document_ids=ids, window=window)[:, :, place]

    untouched = attend(backend, query, key, value, document_ids=ids, window=window)[:, :, place]
    assert torch.equal(with_other_keys(place - window), untouched)
    assert not torch.equal(with_other_keys(place - window + 1), untouched)


@every_backend
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_b30_documents_do_not_see_each_other(name: str, kernel: str, window: int | None) -> None:
    backend = build_here(name, kernel)
    ids = torch.cat([documents(1, 5, 9, 2), documents(1, 5, 1, 10)])
    first = [heads(4, 16, seed=seed).contiguous() for seed in range(3)]
    second = [tensor.clone() for tensor in first]
    for tensor in second:
        tensor[:, :, :5] = torch.randn(2, 4, 5, 8) * 100
    out_first, out_second = (attend(backend, *tensors, document_ids=ids, window=window) for tensors in (first, second))
    assert torch.equal(out_first[:, :, 5:], out_second[:, :, 5:])
    assert not torch.equal(out_first[:, :, :5], out_second[:, :, :5])


PADDING = {
    "left": lambda ids: ids == 0,
    "right": lambda ids: ids == 1,
    "whole row": lambda ids: (ids >= 0) & (torch.arange(2) == 1)[:, None],
}


@every_backend
@pytest.mark.parametrize("where", PADDING)
@pytest.mark.parametrize("window", [None, 1, 3])
def test_b49_padding_reaches_nobody(name: str, kernel: str, where: str, window: int | None) -> None:
    """Padding of any size; that of NaN is ended at the embedding, see the test of the model."""
    ids = documents(2, 7, 6)
    padding = PADDING[where](ids)
    ids, hidden = ids.masked_fill(padding, -1), padding[:, None, :, None]
    upstream = heads(4, 13, seed=3).masked_fill(hidden, 0.0)
    results = []
    for filling in (0.0, 1e15):
        tensors = [heads(4, 13, seed=seed).masked_fill(hidden, filling) for seed in range(3)]
        if name == "flex":  # no backward on a CPU
            results.append([attend(build_here(name, kernel), *tensors, document_ids=ids, window=window)])
            continue
        tensors = [tensor.requires_grad_() for tensor in tensors]
        out = attend(build_here(name, kernel), *tensors, document_ids=ids, window=window)
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
    dropout_key = DropoutKey(seed=0, update=0, samples=torch.tensor([4, 9]))
    plain = attend(REFERENCE, query, key, value)
    dropped = attend(REFERENCE, query, key, value, drop=AttentionDropout(0.25, dropout_key, layer=1))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.75)
    possible = plain != 0
    assert 0.15 < (~kept & possible).sum() / possible.sum() < 0.35
    for other in (kept[0, 1], kept[1, 0]):  # another head, another sample
        assert not torch.equal(kept[0, 0], other)


def request(document_ids: Tensor | None, window: int | None, num_queries: int, num_keys: int) -> MaskRequest:
    return MaskRequest(document_ids, window, num_queries, num_keys, torch.device("cpu"), torch.float32)


def test_hidden_keys_written_out() -> None:
    ids = torch.tensor([[0, 0, 0, 1, -1]])
    assert (~hidden_keys(request(ids, None, 5, 5)))[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert (~hidden_keys(request(ids, 2, 5, 5)))[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert (~hidden_keys(request(None, 3, 2, 5))).int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("name", ["reference", "sdpa", "flex"])
def test_masks_are_not_made_where_none_is_needed(name: str) -> None:
    """Only flex and the reference look at every pair in plain causal rows."""
    mask = attention_backend(name).make_mask(request(None, None, 8, 8))
    assert (name == "sdpa") == (getattr(mask, "scores", mask) is None)


def test_what_a_backend_cannot_do_is_refused() -> None:
    for name, kernel in (("reference", "auto"), ("sdpa", "math"), ("blocked", "auto"), ("flex", "auto")):
        built = attention_backend(name, kernel=kernel)
        assert (built.name, built.kernel) == (name, kernel)
    attention_backend("reference", dropout_probability=0.1)
    for name in ("sdpa", "blocked", "flex", "flash_attn"):
        with pytest.raises(ConfigError, match=rf"attention.backend={name} cannot drop(.|\n)*attention.backend=reference"):
            attention_backend(name, dropout_probability=0.1)
    with pytest.raises(ConfigError, match="attention.backend=flash(.|\n)*reference, sdpa"):
        attention_backend("flash")
    with pytest.raises(ConfigError, match="attention.kernel=fa2(.|\n)*flash or math"):
        attention_backend("sdpa", kernel="fa2")


@pytest.mark.parametrize(("window", "scores"), [(None, 1024 * (1024 + 128) // 2), (64, 1024 * (128 + 63)), (1, 1024 * 128)])
def test_blocked_leaves_out_keys_outside_the_window(monkeypatch: pytest.MonkeyPatch, window: int | None, scores: int) -> None:
    """Scores that are computed at all: half of T × T, or T × (the block and the window before it)."""
    counted = []
    multiply = torch.baddbmm

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        counted.append(multiply(*args, **kwargs))
        return counted[-1]

    monkeypatch.setattr(torch, "baddbmm", counting)
    attend(attention_backend("blocked"), *(heads(1, 1024, batch_size=1, seed=seed) for seed in range(3)), window=window)
    found = sum(tensor.numel() for tensor in counted)
    assert found <= scores and found > 0.85 * scores
