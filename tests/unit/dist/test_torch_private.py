"""Each private name of torch still does what is relied on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmtrain.dist.torch_private import TorchDispatchMode


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_forward_and_backward() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with Recorder() as recorder:
        (weight @ weight).sum().backward()
    assert recorder.names.count("aten.mm.default") == 3
    torch.ones(2, 2).add_(1)
    assert "aten.add_.Tensor" not in recorder.names
