"""A kernel of sdpa that is named is the one torch runs, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.attention import attend, documents, heads

from llmtrain.config.errors import ConfigError
from llmtrain.dist.torch_private import TorchDispatchMode
from llmtrain.ops.attention import attention_backend
from llmtrain.plan.attention import ATTENTION

HERE = [way.name for way in ATTENTION["sdpa"].on("cpu")]
ELSEWHERE = sorted({way.name for way in ATTENTION["sdpa"].kernels} - set(HERE))
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Operations(TorchDispatchMode):
    """Names of the operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_queries", [1, 4, 9])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_named_kernel_is_the_one_that_runs(
    kernel: str, dtype: torch.dtype, packed: bool, window: int | None, num_queries: int, kv_heads: int
) -> None:
    if packed and num_queries < 9:
        pytest.skip("cached decoding reads one document per row")
    inputs = [heads(count, length).to(dtype) for count, length in ((4, num_queries), (kv_heads, 9), (kv_heads, 9))]
    tensors = [tensor.requires_grad_() for tensor in inputs]
    ids = documents(2, 4, 5) if packed else None
    with Operations() as operations:
        attend(attention_backend("sdpa", kernel=kernel), *tensors, document_ids=ids, window=window).sum().backward()
    assert (FLASH in operations.names) == (kernel == "flash")
    assert ("bmm" in operations.names) == (kernel == "math")


@pytest.mark.parametrize("kernel", ELSEWHERE)
@pytest.mark.filterwarnings("ignore")
def test_a_kernel_that_torch_cannot_run_is_an_error(kernel: str) -> None:
    """Past the plan, which refuses it on a CPU: torch itself does not fall back, and its error becomes one that says what to do."""
    with pytest.raises(ConfigError) as caught:
        attend(attention_backend("sdpa", kernel=kernel), heads(4, 9), heads(2, 9), heads(2, 9))
    (problem,) = caught.value.problems
    assert problem.what == f"attention.backend=sdpa attention.kernel={kernel}"
    assert "cpu, float32, 9 queries, 9 keys, 8 channels, without a mask" in problem.rule
    assert problem.cure == "attention.kernel=auto"


def test_other_errors_of_torch_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="must match|size|shape"):
        attend(attention_backend("sdpa", kernel="math"), heads(4, 9), heads(4, 9, head_dim=4), heads(4, 9))
