"""Recompute changes what is kept and nothing else."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.models import DROPOUT, GPT2_LIKE, LLAMA_LIKE, WINDOWED, build, gradients, random_tokens
from torch import Tensor

from llmtrain.config.typed import ModelConfig, RecomputeConfig, RecomputeKind, ReferenceLoss
from llmtrain.dist.torch_private import TorchDispatchMode
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.ops.random import DropoutKey
from llmtrain.parallel.recompute import OPERATION_FAMILIES, apply_recompute

FAMILIES = tuple(OPERATION_FAMILIES)
NONE = RecomputeConfig(RecomputeKind.NONE, ())
FULL = RecomputeConfig(RecomputeKind.FULL, ())
MODES = {"full": FULL} | {
    "+".join(keep) or "nothing": RecomputeConfig(RecomputeKind.SELECTIVE, keep)
    for keep in ((), ("attention", "matmul"), *((family,) for family in FAMILIES), FAMILIES)
}
BACKENDS = ("reference", "sdpa", "blocked")


def model_of(config: ModelConfig, backend: str, precision: str) -> Transformer:
    """With dropout 0.5 everywhere the backend has it."""
    attention = DROPOUT.attention if backend == "reference" else 0.0
    return build(replace(config, dropout=replace(DROPOUT, attention=attention)), backend=backend, precision=precision)


def step(model: Transformer, recompute: RecomputeConfig) -> tuple[Tensor, dict[str, Any]]:
    """Loss and gradients of one batch of packed rows."""
    apply_recompute(model, recompute)
    tokens, key = random_tokens(3, 20), DropoutKey(seed=0, update=5, samples=torch.arange(30, 33))
    ids = (torch.arange(20) // 8).repeat(3, 1)
    hidden = model(tokens, document_ids=ids, dropout_key=key)
    loss = build_loss(ReferenceLoss(), model.precision)(hidden.flatten(0, 1), model.head_weight, random_tokens(60, seed=1))
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [LLAMA_LIKE, GPT2_LIKE, WINDOWED], ids=["llama", "gpt2", "windows"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_b18_gradients_are_bit_equal_under_dropout(mode: str, backend: str, config: ModelConfig, precision: str) -> None:
    model = model_of(config, backend, precision)
    loss, expected = step(model, NONE)
    state = torch.get_rng_state()
    recomputed_loss, found = step(model, MODES[mode])
    assert torch.equal(loss, recomputed_loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(torch.get_rng_state(), state)


class _Operations(TorchDispatchMode):
    """How often each operation ran, and which casts of matrices to bf16 are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.casts: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.counts[function] += 1
        if function is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16 and result.ndim == 2:
            self.casts.append(weakref.ref(result.untyped_storage()))
        return result

    def of(self, family: str) -> int:
        return sum(self.counts[operation] for operation in OPERATION_FAMILIES[family])


FAMILY_MODELS = [
    ("attention", "llama"),
    ("matmul", "llama"),
    ("matmul", "gpt2"),
    ("activation", "llama"),
    ("activation", "gpt2"),
]
FAMILY_MODELS += [("norm", "llama"), ("norm", "gpt2")]


@pytest.mark.parametrize(("family", "shape"), FAMILY_MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kept_family_is_not_computed_again(family: str, shape: str, backend: str) -> None:
    model = build({"llama": LLAMA_LIKE, "gpt2": GPT2_LIKE}[shape], backend=backend)
    counts = {}
    for name, recompute in (("none", NONE), ("keep", MODES[family]), ("full", FULL)):
        with _Operations() as operations:
            step(model, recompute)
        counts[name] = operations.of(family)
    assert counts["none"] == counts["keep"] < counts["full"]


def test_no_low_precision_weights_are_kept_for_backward() -> None:
    """Casts of weights are made again in backward, so between the passes only those of the head are alive."""
    model = build(LLAMA_LIKE, precision="bf16", backend="sdpa")
    alive = {}
    for name in ("none", "full", "attention+matmul"):
        apply_recompute(model, MODES.get(name, NONE))
        with _Operations() as operations:
            hidden = model(random_tokens(3, 20))
            alive[name] = sum(storage() is not None for storage in operations.casts)
        hidden.sum().backward()
    assert alive == {"none": 7 * LLAMA_LIKE.num_layers, "full": 0, "attention+matmul": 0}


@pytest.mark.parametrize("mode", MODES)
def test_names_stay(mode: str) -> None:
    model = build(LLAMA_LIKE)
    names = [name for name, _ in model.named_parameters()]
    apply_recompute(model, MODES[mode])
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names


def saved_bytes(model: Transformer, recompute: RecomputeConfig) -> int:
    """Bytes of storages that are alive after the forward and not before it."""
    apply_recompute(model, recompute)
    made: dict[int, weakref.ref[Any]] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    class Book(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, Tensor):
                    made[tensor.untyped_storage().data_ptr()] = weakref.ref(tensor.untyped_storage())
            return result

    with Book():
        hidden = model(random_tokens(4, 48))
        storages = [storage() for place, storage in made.items() if place not in weights]
        total = sum(storage.nbytes() for storage in storages if storage is not None)
    hidden.sum().backward()
    return total


def test_modes_keep_less_in_the_order_promised() -> None:
    model = build(replace(LLAMA_LIKE, num_layers=4), backend="sdpa")
    everything = RecomputeConfig(RecomputeKind.SELECTIVE, FAMILIES)
    full, selective, all_families, none = (
        saved_bytes(model, mode) for mode in (FULL, MODES["attention+matmul"], everything, NONE)
    )
    assert full < 0.35 * none and full < selective < 0.8 * none
    assert selective < all_families
