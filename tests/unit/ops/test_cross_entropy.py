"""Loss backends against F.cross_entropy in fp64, gradients included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models import relative_error
from torch import Tensor

from llmtrain.config.typed import ChunkedLoss, LossConfig, ReferenceLoss
from llmtrain.dist.torch_private import TorchDispatchMode
from llmtrain.ops.cross_entropy import IGNORE_INDEX, LossFunction, build_loss
from llmtrain.plan.precision import PRECISION_TABLES

LOSSES: dict[str, LossConfig] = {"reference": ReferenceLoss(), "chunked": ChunkedLoss(7), "one chunk": ChunkedLoss(1000)}


@pytest.fixture(params=LOSSES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def loss_of(kind: str, precision: str = "fp32") -> LossFunction:
    return build_loss(LOSSES[kind], PRECISION_TABLES[precision])


def operands(num_tokens: int = 30, dim: int = 16, vocab: int = 50, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(num_tokens, dim, generator=generator), torch.randn(vocab, dim, generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    targets[::4] = IGNORE_INDEX
    return hidden, weight, targets


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 5e-3)])
def test_value_and_gradients(kind: str, precision: str, tolerance: float) -> None:
    hidden, weight, targets = operands()
    tensors = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    loss = loss_of(kind, precision)(*tensors, targets)
    expected = F.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    assert loss.dtype is torch.float32 and loss.shape == ()
    assert relative_error(loss, expected) < tolerance
    (loss / 22).backward()
    (expected / 22).backward()
    for found, reference in zip(tensors, exact, strict=True):
        assert found.grad is not None and found.grad.dtype is torch.float32
        assert relative_error(found.grad, reference.grad) < tolerance


@pytest.mark.parametrize("scale", [1.0, 10.0, 40.0])
def test_b48_bf16_logits_lose_nothing_more(kind: str, scale: float) -> None:
    """The head is the identity, so the hidden states are the logits, in bf16 exactly."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(4 * 32, 128, generator=generator) * scale).bfloat16()
    targets = torch.randint(0, 128, (4 * 32,), generator=generator)
    hidden, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = loss_of(kind, "bf16")(hidden, torch.eye(128), targets)
    expected = F.cross_entropy(exact, targets, reduction="sum")
    assert relative_error(loss, expected) < 1e-5
    loss.backward()
    expected.backward()
    assert hidden.grad is not None and exact.grad is not None
    # Half a step of bf16, or of a probability near one in fp32.
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=2**-8, atol=2e-7)


def test_b48_losses_of_similar_batches_are_told_apart(kind: str) -> None:
    loss = loss_of(kind, "bf16")
    hidden, weight, targets = operands(64, 16, 300)
    values = {loss(hidden * (1 + 1e-3 * step), weight, targets).item() for step in range(60)}
    assert len(values) > 50


def test_hand_value(kind: str) -> None:
    loss = loss_of(kind)(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.eye(4), torch.tensor([3]))
    assert abs(loss.item() - 0.44019) < 5e-6


def test_uniform_logits_give_the_log_of_the_vocabulary(kind: str) -> None:
    loss = loss_of(kind)(torch.zeros(9, 8), torch.randn(77, 8), torch.arange(9))
    assert abs(loss.item() - 9 * math.log(77)) < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_scored_is_zero_with_zero_gradients(kind: str, precision: str) -> None:
    hidden, weight, targets = operands()
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = loss_of(kind, precision)(*tensors, torch.full_like(targets, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert all(tensor.grad is not None and (tensor.grad == 0).all() for tensor in tensors)


@pytest.mark.parametrize("poison", [1e30, math.inf, math.nan])
def test_b49_what_ignored_rows_hold_reaches_nobody(kind: str, poison: float) -> None:
    hidden, weight, targets = operands()
    results = []
    for filling in (0.0, poison):
        filled = hidden.masked_fill((targets == IGNORE_INDEX)[:, None], filling).requires_grad_()
        head = weight.clone().requires_grad_()
        loss = loss_of(kind)(filled, head, targets)
        results.append([loss, *torch.autograd.grad(loss, (filled, head))])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)


def test_value_without_gradients(kind: str) -> None:
    hidden, weight, targets = operands()
    expected = loss_of(kind)(hidden.clone().requires_grad_(), weight, targets)
    with torch.no_grad():
        assert torch.equal(loss_of(kind)(hidden, weight, targets), expected.detach())


def test_only_what_is_asked_for_gets_a_gradient(kind: str) -> None:
    hidden, weight, targets = operands()
    weight.requires_grad_()
    loss_of(kind)(hidden, weight, targets).backward()
    assert hidden.grad is None and weight.grad is not None


def test_tied_weight_gets_both_gradients(kind: str) -> None:
    tokens, targets = torch.arange(8), torch.arange(1, 9)
    table = torch.randn(20, 6, requires_grad=True)
    exact = table.detach().double().requires_grad_()
    loss_of(kind)(F.embedding(tokens, table).tanh(), table, targets).backward()
    F.cross_entropy(F.embedding(tokens, exact).tanh() @ exact.T, targets, reduction="sum").backward()
    assert relative_error(table.grad, exact.grad) < 1e-6


def test_gradients_may_be_asked_for_twice(kind: str) -> None:
    hidden, weight, targets = operands()
    hidden.requires_grad_()
    loss = loss_of(kind)(hidden, weight, targets) * 3
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


class _Largest(TorchDispatchMode):
    """Elements of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple) else (result,)
        sizes = [tensor.numel() for tensor in results if isinstance(tensor, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_chunked_never_holds_whole_logits(precision: str) -> None:
    hidden, weight, targets = (
        torch.randn(96, 8, requires_grad=True),
        torch.randn(200, 8, requires_grad=True),
        torch.randint(0, 200, (96,)),
    )
    with _Largest() as largest:
        build_loss(ChunkedLoss(16), PRECISION_TABLES[precision])(hidden, weight, targets).backward()
    assert largest.num_elements == 16 * 200
    with _Largest() as largest:
        build_loss(ReferenceLoss(), PRECISION_TABLES[precision])(hidden, weight, targets).backward()
    assert largest.num_elements == 96 * 200


def test_chunks_sum_weight_gradients_in_fp32() -> None:
    """4096 equal tokens: sums in bf16 would stop growing once a token is less than half a step of the sum."""
    hidden, weight = torch.full((4096, 4), 0.5), torch.zeros(8, 4, requires_grad=True)
    build_loss(ChunkedLoss(1), PRECISION_TABLES["bf16"])(hidden, weight, torch.zeros(4096, dtype=torch.long)).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[1], torch.full((4,), 4096 * 0.5 / 8), rtol=1e-6, atol=0)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_without_gradients_none_is_made() -> None:
    """One product a chunk, not three; a parameter wants a gradient whether or not any is recorded."""
    hidden, weight, targets = operands(28)
    parameter = torch.nn.Parameter(weight)
    counts = {}
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded), Products() as products:
            loss_of("chunked")(hidden.requires_grad_(), parameter, targets)
        counts[recorded] = products.count
    assert counts == {False: 4, True: 12}
