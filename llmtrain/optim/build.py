"""Optimizers by name of parameter: built over groups, stepped with an explicit learning rate, saved and loaded by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.plugins import build, find
from llmtrain.config.typed import AdamWConfig, OptimizerConfig, PluginOptimizer
from llmtrain.optim.groups import decay_groups
from llmtrain.plan.plan import Availability

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps per parameter; `step` is the number of updates its bias correction counts."""


class Optimizer(Protocol):
    """What an engine needs of an update rule.

    State exists from the start, so what is saved after any number of updates, also after none, has the same names.
    """

    def step(self, lr: float) -> None:
        """Make one update with learning rate `lr` from the gradients the parameters hold."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a resume needs as `<what>/<parameter name>`; the tensors themselves, not copies."""
        ...


@dataclass(frozen=True)
class PluginGroup:
    """Parameters, by name, that share one weight decay; what an optimizer of a plugin is built over."""

    parameters: Mapping[str, nn.Parameter]
    weight_decay: float


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) over named parameters; moments begin as zeros."""

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
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()

    def zero_grad(self) -> None:
        self._inner.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        return {
            f"{moment}/{name}": self._inner.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
        }


def build_optimizer(config: OptimizerConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """The configured update rule over the decayed and the undecayed parameters.

    Raises:
        ConfigError: a plugin that cannot be used, or made something that is no optimizer.
    """
    named = dict(named_parameters)
    return _from_plugin(config, named) if isinstance(config, PluginOptimizer) else _adamw(config, named)


def _from_plugin(config: PluginOptimizer, named: Mapping[str, nn.Parameter]) -> Optimizer:
    plugin = find("optimizer", config.kind)
    assert plugin is not None, "the config was frozen with this plugin installed"
    names = {parameter: name for name, parameter in named.items()}
    groups = [
        PluginGroup(
            {names[parameter]: parameter for parameter in group.parameters}, config.weight_decay if group.decayed else 0.0
        )
        for group in decay_groups(named.items())
    ]
    optimizer: Optimizer = build(plugin, config.options, groups)
    missing = [name for name in ("step", "zero_grad", "state") if not callable(getattr(optimizer, name, None))]
    if missing:
        rule = f"{plugin.package} made a {type(optimizer).__name__} without {', '.join(missing)}"
        raise ConfigError(Problem(f"optimizer.kind={config.kind}", rule, "an optimizer as docs/plugins.md describes it"))
    return optimizer


def _adamw(config: AdamWConfig, named: Mapping[str, nn.Parameter]) -> AdamW:
    """The fused kernel where the device has one (CPU and CUDA do)."""
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
    return AdamW(inner, named)


def availability() -> dict[str, Availability]:
    """Optimizer kinds that can be used here."""
    return {"adamw": Availability(True)}
