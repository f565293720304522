"""Named operations: composed forwards that recompute policies, ledgers and profilers see as one operation with one result.

torch finds an operation by a registered name, so defining one registers it; nothing runs until it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("llmtrain", "FRAGMENT")


def named_operation(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a kernel for all devices under `llmtrain::<name>`.

    The operation has no gradient of its own: it is called inside the forward of an autograd function.

    Args:
        signature: name, arguments and results in torch's schema language.

    Returns:
        decorator that puts the operation (a `torch._ops.OpOverload`) in the place of its kernel.
    """
    name = signature.partition("(")[0]

    def register(kernel: Callable[..., Any]) -> Any:
        _LIBRARY.define(signature)
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        return getattr(torch.ops.llmtrain, name).default

    return register
