"""Initial weights: each parameter is a pure function of (seed, its name, its global shape), whatever order, rank or device builds it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from llmtrain.model.layers import Constant, Initial, Normal
from llmtrain.model.transformer import Transformer
from llmtrain.ops.attention import attention_backend
from llmtrain.plan.plan import Plan


def build_on_meta(plan: Plan) -> Transformer:
    """Build the planned model without memory for its parameters; `materialize` or a checkpoint gives them values."""
    attention = attention_backend(
        plan.attention_backend,
        kernel=plan.attention_kernel,
        dropout_probability=plan.model.dropout.attention,
        options=plan.attention_options,
    )
    with torch.device("meta"):
        return Transformer(plan.model, plan.precision, attention)


def materialize(model: nn.Module, *, seed: int, device: torch.device | str) -> None:
    """Put a new parameter with its initial value, fp32 on `device`, in the place of every parameter.

    A model built on the meta device and one built directly get bit-equal tensors. Parameters that were one tensor are one tensor
    again, drawn under the first of their names.

    Raises:
        AssertionError: a parameter that no layer says how to start, or a tensor left without memory.
    """
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for name, owner, attribute, parameter in _parameters(model):
        if parameter not in fresh:
            value = draw(seed, name, tuple(parameter.shape), _initial(owner, attribute, name))
            fresh[parameter] = nn.Parameter(value.to(device), requires_grad=parameter.requires_grad)
        setattr(owner, attribute, fresh[parameter])
    unset = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not unset, f"left without values: {', '.join(unset)}"


def draw(seed: int, name: str, shape: tuple[int, ...], initial: Initial) -> Tensor:
    """The whole initial tensor of one parameter, fp32 on the CPU."""
    if isinstance(initial, Constant):
        return torch.full(shape, initial.value, device="cpu")
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.empty(shape, device="cpu").normal_(0.0, initial.std, generator=generator)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every place that holds a parameter: full name, owner, attribute, parameter; tied ones come once per place."""
    for prefix, owner in model.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            yield f"{prefix}.{attribute}" if prefix else attribute, owner, attribute, parameter


def _initial(owner: nn.Module, attribute: str, name: str) -> Initial:
    initial = getattr(owner, "initial", {}).get(attribute)
    assert isinstance(initial, Normal | Constant), f"no layer says how {name} starts"
    return initial
