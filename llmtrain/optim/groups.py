"""Which parameters are decayed: matrices and embeddings (two or more dimensions) are, gains and biases are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share one weight decay."""

    decayed: bool
    parameters: tuple[nn.Parameter, ...]


def decay_groups(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[ParameterGroup, ParameterGroup]:
    """Split parameters into (decayed, not decayed) by their number of dimensions, every one in exactly one group.

    The rule looks at the tensor and not at names or module classes, so wrappers and renames cannot change it. A weight that is used
    twice (tied) must be given once.
    """
    named = list(named_parameters)
    assert len({id(parameter) for _, parameter in named}) == len(named), "a parameter was given twice"
    assert len({name for name, _ in named}) == len(named), "two parameters have one name"
    return _group(named, decayed=True), _group(named, decayed=False)


def _group(named: list[tuple[str, nn.Parameter]], *, decayed: bool) -> ParameterGroup:
    return ParameterGroup(decayed, tuple(parameter for _, parameter in named if (parameter.ndim >= 2) is decayed))
