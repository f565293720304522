"""The global gradient norm and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def global_norm(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of all gradients as one vector, in fp32 (0-d tensor); `norm_type` is 2 or inf. NaN and inf show in the result."""
    return torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients], norm_type)


def clip_by_norm(gradients: Iterable[Tensor], norm: float, max_norm: float | None) -> None:
    """Scale gradients whose global norm is `norm` so that it becomes min(norm, max_norm); None leaves them alone.

    Source: Pascanu et al. 2013, algorithm 1.
    """
    if max_norm is None or norm <= max_norm:
        return
    scale = max_norm / norm
    for gradient in gradients:
        gradient.mul_(scale)
