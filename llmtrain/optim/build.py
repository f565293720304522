"""Optimizers by name of parameter: built over groups, stepped with an explicit learning rate, saved and loaded by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from llmtrain.config.typed import OptimizerConfig
from llmtrain.optim.groups import decay_groups
from llmtrain.plan.plan import Availability

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps per parameter; `step` is the number of updates its bias correction counts."""


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) over named parameters.

    State exists from the start (zeros), so what is saved after any number of updates, also after none, has the same names.
    """

    def __init__(self, inner: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> None:
        self._inner = inner
        self._parameters = dict(parameters)
        for parameter in self._parameters.values():
            inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, lr: float) -> None:
        """Make one update with learning rate `lr` from the gradients the parameters hold."""
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._inner.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every moment and step count as `<moment>/<parameter name>`; the tensors themselves, not copies."""
        return {
            f"{moment}/{name}": self._inner.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
        }


def build_optimizer(config: OptimizerConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """AdamW over the decayed and the undecayed parameters; the fused kernel where the device has one (CPU and CUDA do)."""
    named = dict(named_parameters)
    groups = [
        {"params": list(group.parameters), "weight_decay": config.weight_decay if group.decayed else 0.0}
        for group in decay_groups(named.items())
        if group.parameters
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in named.values())
    inner = torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=not fused,
    )
    return Optimizer(inner, named)


def availability() -> dict[str, Availability]:
    """Optimizer kinds that can be used here."""
    return {"adamw": Availability(True)}
