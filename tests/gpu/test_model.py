"""The model on a CUDA device: the same weights, masks, losses and gradients as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention import attend
from helpers.models import DROPOUT, LLAMA_LIKE, SHAPES, gradients, random_tokens, relative_error
from torch import Tensor

from llmtrain.config.typed import ChunkedLoss, LossConfig, ModelConfig, RecomputeConfig, RecomputeKind, ReferenceLoss
from llmtrain.dist.torch_private import TorchDispatchMode
from llmtrain.model.cache import KVCache
from llmtrain.model.init import materialize
from llmtrain.model.transformer import Transformer
from llmtrain.ops.attention import attention_backend
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.ops.random import DropoutKey, Site, uniform_lanes
from llmtrain.parallel.recompute import apply_recompute
from llmtrain.plan.precision import PRECISION_TABLES

pytestmark = pytest.mark.gpu

LOSSES: dict[str, LossConfig] = {"reference": ReferenceLoss(), "chunked": ChunkedLoss(11)}
RECOMPUTE = {
    "none": RecomputeConfig(RecomputeKind.NONE, ()),
    "full": RecomputeConfig(RecomputeKind.FULL, ()),
    "selective": RecomputeConfig(RecomputeKind.SELECTIVE, ("attention", "matmul")),
}


def model_on(device: str, config: ModelConfig, backend: str, precision: str = "fp32") -> Transformer:
    with torch.device("meta"):
        model = Transformer(config, PRECISION_TABLES[precision], backend)
    materialize(model, seed=0, device=device)
    return model


def step(model: Transformer, loss: LossConfig, *, packed: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    device = model.head_weight.device
    tokens, targets = random_tokens(3, 40).to(device), random_tokens(3, 40, seed=1).to(device)
    ids = (torch.arange(40, device=device) // 13).repeat(3, 1) if packed else None
    key = DropoutKey(seed=0, update=2, samples=torch.arange(3, device=device))
    hidden = model(tokens, document_ids=ids, dropout_key=key)
    value = build_loss(loss, model.precision)(hidden.flatten(0, 1), model.head_weight, targets.flatten())
    value.backward()
    return value.detach().cpu(), {name: gradient.cpu() for name, gradient in gradients(model).items()}


def test_initial_weights_are_those_of_the_cpu() -> None:
    there, here = (dict(model_on(device, LLAMA_LIKE, "sdpa").named_parameters()) for device in ("cuda", "cpu"))
    assert all(torch.equal(there[name].cpu(), here[name]) for name in here)


def test_random_numbers_are_those_of_the_cpu() -> None:
    lanes = [
        uniform_lanes(DropoutKey(5, 6, torch.arange(4, device=device)), 1, Site.FEED_FORWARD, 9, 33).cpu()
        for device in ("cuda", "cpu")
    ]
    assert torch.equal(*lanes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 5e-2)])
def test_step_is_that_of_the_cpu(shape: str, backend: str, loss: str, packed: bool, precision: str, tolerance: float) -> None:
    dropout = DROPOUT if backend == "reference" else replace(DROPOUT, attention=0.0)
    config = replace(SHAPES[shape], dropout=dropout)
    expected, expected_gradients = step(
        model_on("cpu", config, "reference" if backend == "reference" else "sdpa"), LOSSES[loss], packed=packed
    )
    found, found_gradients = step(model_on("cuda", config, backend, precision), LOSSES[loss], packed=packed)
    assert relative_error(found, expected) < tolerance
    for name, gradient in found_gradients.items():
        if not name.endswith("k.bias"):
            assert relative_error(gradient, expected_gradients[name]) < tolerance, name


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("precision", PRECISION_TABLES)
def test_b18_recompute_is_bit_equal(backend: str, mode: str, precision: str) -> None:
    dropout = DROPOUT if backend == "reference" else replace(DROPOUT, attention=0.0)
    model = model_on("cuda", replace(LLAMA_LIKE, dropout=dropout), backend, precision)
    results = []
    for recompute in (RECOMPUTE["none"], RECOMPUTE[mode]):
        apply_recompute(model, recompute)
        results.append(step(model, ReferenceLoss()))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(gradient, results[1][1][name]) for name, gradient in results[0][1].items())


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(backend: str) -> None:
    model, tokens = model_on("cuda", LLAMA_LIKE, backend), random_tokens(2, 20).cuda()
    cache = KVCache(model.config, model.precision, batch_size=2, capacity=20, device="cuda")
    parts = [model(tokens[:, start:stop], cache=cache) for start, stop in ((0, 7), (7, 8), (8, 15), (15, 20))]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-5, atol=1e-5)


class Operations(TorchDispatchMode):
    """Names of the operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_queries", [1, 24, 64])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_sdpa_never_writes_out_all_scores(dtype: torch.dtype, packed: bool, num_queries: int, kv_heads: int) -> None:
    """Grouped heads, masks and dtypes in every combination, after a cache too: always a fused kernel, forward and backward."""
    if packed and num_queries < 64:
        pytest.skip("cached decoding reads one document per row")
    query, key, value = (
        torch.randn(2, length, heads, 64, device="cuda").to(dtype).transpose(1, 2).requires_grad_()
        for heads, length in ((8, num_queries), (kv_heads, 64), (kv_heads, 64))
    )
    ids = (torch.arange(64, device="cuda") // 25).repeat(2, 1) if packed else None
    expected = attend(attention_backend("reference"), query, key, value, document_ids=ids)
    with Operations() as operations:
        found = attend(attention_backend("sdpa"), query, key, value, document_ids=ids)
        found.sum().backward()
    fused = {name for name in operations.names if name.startswith("_scaled_dot_product_") and name.endswith("_attention")}
    assert len(fused) == 1, operations.names
    assert not operations.names & {"bmm", "baddbmm", "_softmax", "_safe_softmax"}, operations.names
    assert relative_error(found, expected) < (1e-5 if dtype is torch.float32 else 2e-2)
