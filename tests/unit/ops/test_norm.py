"""RMSNorm and LayerNorm against their formulas in fp64, gradients included."""

from __future__ import annotations

import pytest
import torch
from helpers.models import relative_error
from torch import Tensor

from llmtrain.ops.norm import layer_norm, rms_norm

EPS = 1e-5


def rms_formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def layer_formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def ours(kind: str, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    return rms_norm(x, weight, EPS, dtype) if kind == "rms" else layer_norm(x, weight, bias, EPS, dtype)


FORMULAS = {"rms": rms_formula, "layer": layer_formula}


def operands(scale: float) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(3, 5, 48, generator=generator) * scale + 0.3 * scale, torch.randn(3, 5, 48, generator=generator)
    weight, bias = torch.randn(48, generator=generator), torch.randn(48, generator=generator)
    return x, weight, bias, grad


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_value_and_gradients(kind: str, scale: float, dtype: torch.dtype, tolerance: float) -> None:
    x, weight, bias, grad = operands(scale)
    x, grad = x.to(dtype), grad.to(dtype)
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = ours(kind, *inputs, dtype)
    expected = FORMULAS[kind](*exact)
    assert y.dtype is dtype
    assert relative_error(y, expected) < tolerance
    y.backward(grad)
    expected.backward(grad.double())
    for name, found, reference in zip(("x", "weight", "bias"), inputs, exact, strict=True):
        if reference.grad is None:  # RMSNorm has no bias
            continue
        assert found.grad is not None and found.grad.dtype is found.dtype
        # Gradients of parameters are sums in fp32 whatever the dtype of the input.
        assert relative_error(found.grad, reference.grad) < (tolerance if name == "x" else 2e-6), name


@pytest.mark.parametrize("kind", FORMULAS)
def test_gradients_agree_with_differences(kind: str) -> None:
    inputs = [tensor.double().requires_grad_() for tensor in operands(1.0)[:3]]
    used = inputs[:2] if kind == "rms" else inputs

    def norm(*tensors: Tensor) -> Tensor:
        return ours(kind, tensors[0][:1, :2], tensors[1], tensors[-1], torch.float64)

    assert torch.autograd.gradcheck(norm, used)


@pytest.mark.parametrize("kind", FORMULAS)
def test_zeros_stay_finite(kind: str) -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    y = ours(kind, x, torch.ones(8), torch.zeros(8), torch.float32)
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert torch.equal(y, torch.zeros(2, 8))


@pytest.mark.parametrize("kind", FORMULAS)
def test_backward_keeps_the_input_and_a_number_or_two_per_position(kind: str) -> None:
    saved: list[Tensor] = []
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.ones(64, requires_grad=True), torch.zeros(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        ours(kind, x, weight, bias, torch.bfloat16)
    large = [tensor for tensor in saved if tensor.numel() >= x.numel()]
    assert [tensor.data_ptr() for tensor in large] == [x.data_ptr()]
