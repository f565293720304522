"""Every attention backend and kernel that this CUDA device has, against the reference, gradients included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.attention import attend, documents, heads
from helpers.models import relative_error
from torch import Tensor

from llmtrain.dist.devices import cuda_capability
from llmtrain.dist.torch_private import TorchDispatchMode
from llmtrain.ops.attention import attention_backend
from llmtrain.ops.dtypes import DTYPES
from llmtrain.plan.attention import ATTENTION, AUTO, Use, refusal
from llmtrain.train.machine import attention_packages

pytestmark = pytest.mark.gpu

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
FUSED = {
    "flash": "_scaled_dot_product_flash_attention",
    "memory_efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
}


def kernels() -> Iterator[tuple[str, str, str]]:
    """Backend, kernel and dtype of every row of the table for CUDA."""
    for name, row in ATTENTION.items():
        for way in row.on("cuda"):
            yield from ((name, way.name or AUTO, dtype) for dtype in way.dtypes)


every_kernel = pytest.mark.parametrize(("name", "kernel", "dtype"), list(kernels()))


def require(name: str, kernel: str, dtype: str, **asked: Any) -> None:
    """Skip what the plan would refuse here, with its reason."""
    use = Use("cuda", dtype, capability=cuda_capability("cuda"), packages=attention_packages(), training=True, **asked)
    reason = refusal(name, kernel, use)
    if reason:
        pytest.skip(f"{name} {kernel} {dtype}: {reason}")


def inputs(num_queries: int, num_keys: int, kv_heads: int, dtype: str) -> list[Tensor]:
    shapes = ((8, num_queries), (kv_heads, num_keys), (kv_heads, num_keys))
    made = [heads(count, length, head_dim=64, seed=seed) for seed, (count, length) in enumerate(shapes)]
    return [tensor.to("cuda", DTYPES[dtype]).requires_grad_() for tensor in made]


@every_kernel
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_values_and_gradients(name: str, kernel: str, dtype: str, packed: bool, window: int | None, kv_heads: int) -> None:
    require(name, kernel, dtype, documents=packed, windows=window is not None)
    ids = documents(2, 37, 200, 63).cuda() if packed else None
    upstream, results = heads(8, 300, head_dim=64, seed=9).to("cuda", DTYPES[dtype]), []
    for backend in (attention_backend("reference"), attention_backend(name, kernel=kernel)):
        tensors = inputs(300, 300, kv_heads, dtype)
        out = attend(backend, *tensors, document_ids=ids, window=window)
        results.append([out, *torch.autograd.grad(out, tensors, upstream)])
    for what, expected, found in zip(("out", "query", "key", "value"), *results, strict=True):
        if expected.norm() < 1e-2 * upstream.norm():  # one key: the weights are 1 and query and key have no gradient
            assert found.norm() < 2e-2 * upstream.norm(), what
        else:
            assert relative_error(found, expected) < TOLERANCE[dtype], what


@every_kernel
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_queries", [1, 24])
@torch.no_grad()
def test_last_query_sits_at_last_key(name: str, kernel: str, dtype: str, window: int | None, num_queries: int) -> None:
    require(name, kernel, dtype, windows=window is not None or num_queries > 1)
    tensors = inputs(num_queries, 64, 2, dtype)
    expected, found = (
        attend(backend, *tensors, window=window)
        for backend in (attention_backend("reference"), attention_backend(name, kernel=kernel))
    )
    assert relative_error(found, expected) < TOLERANCE[dtype]


@every_kernel
@torch.no_grad()
def test_b30_documents_do_not_see_each_other(name: str, kernel: str, dtype: str) -> None:
    require(name, kernel, dtype, documents=True)
    ids, first = documents(2, 5, 20, 7).cuda(), inputs(32, 32, 2, dtype)
    second = [tensor.clone() for tensor in first]
    for tensor in second:
        tensor[:, :, :5] = 7.0
    out_first, out_second = (attend(attention_backend(name, kernel=kernel), *x, document_ids=ids) for x in (first, second))
    assert torch.equal(out_first[:, :, 5:], out_second[:, :, 5:])


class Operations(TorchDispatchMode):
    """Names of the operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", FUSED)
def test_the_named_kernel_of_sdpa_is_the_one_that_runs(kernel: str) -> None:
    require("sdpa", kernel, "bf16")
    with Operations() as operations:
        attend(attention_backend("sdpa", kernel=kernel), *inputs(64, 64, 2, "bf16"))
    assert operations.names & set(FUSED.values()) == {FUSED[kernel]}


def test_a_long_window_needs_no_square_of_memory() -> None:
    """FlashAttention and flex at 32768 tokens: a bf16 mask alone would be 2 GiB."""
    for name in ("flash_attn", "flex"):
        if refusal(name, AUTO, Use("cuda", training=True, capability=cuda_capability("cuda"), packages=attention_packages())):
            continue
        tensors = [torch.randn(1, 32768, 2, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(attention_backend(name), *tensors, window=1024)
        assert torch.cuda.max_memory_allocated() - before < 2**29
