"""Output head and cross-entropy together, as one sum over tokens, so that a backend may avoid ever holding all logits.

Legend: N tokens, D channels of the residual stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.plugins import build, find
from llmtrain.config.typed import ChunkedLoss, LossConfig, PluginLoss, ReferenceLoss
from llmtrain.ops.dtypes import DTYPES
from llmtrain.plan.precision import PrecisionTable

IGNORE_INDEX = -100
"""Target of a position that is not scored."""

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def build_loss(loss: LossConfig, precision: PrecisionTable) -> LossFunction:
    """Choose the loss backend.

    Returns:
        function of (hidden [N, D], head_weight [V, D], targets [N] int64) that gives the SUM of -log p(target) over the
        targets that are not IGNORE_INDEX, an fp32 scalar; 0 when all are ignored. Ignored rows of hidden may hold anything,
        even NaN: they reach neither the loss nor a gradient.
    """
    matmul, logits = DTYPES[precision.matmul], DTYPES[precision.logits]
    if isinstance(loss, PluginLoss):
        return _from_plugin(loss)
    if isinstance(loss, ChunkedLoss):
        return partial(chunked_cross_entropy, matmul=matmul, logits=logits, chunk_size=loss.chunk_size)
    return partial(reference_cross_entropy, matmul=matmul, logits=logits)


def build_score(loss: LossConfig, precision: PrecisionTable) -> LossFunction:
    """What validation text is scored with: the same sum, also where a plugin trains on something else."""
    return build_loss(ReferenceLoss() if isinstance(loss, PluginLoss) else loss, precision)


def _from_plugin(loss: PluginLoss) -> LossFunction:
    plugin = find("loss", loss.kind)
    assert plugin is not None, "the config was frozen with this plugin installed"
    function: LossFunction = build(plugin, loss.options)
    if not callable(function):
        rule = f"{plugin.package} made a {type(function).__name__} and not a function"
        raise ConfigError(Problem(f"loss.kind={loss.kind}", rule, "a function as docs/plugins.md describes it"))
    return function


def reference_cross_entropy(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, *, matmul: torch.dtype, logits: torch.dtype
) -> Tensor:
    """The definition: all logits at once, log-softmax of them in fp32."""
    hidden = hidden.masked_fill((targets == IGNORE_INDEX)[:, None], 0.0)
    scores = F.linear(hidden.to(matmul), head_weight.to(matmul)).to(logits)  # [N, V]
    return F.cross_entropy(scores.float(), targets, reduction="sum", ignore_index=IGNORE_INDEX)


def chunked_cross_entropy(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, *, matmul: torch.dtype, logits: torch.dtype, chunk_size: int
) -> Tensor:
    """The same sum with the logits of `chunk_size` tokens alive at a time, in forward and in backward.

    The gradient of a sum is known up to one factor as soon as the logits are, so forward computes it and forgets the logits
    (the idea of Liger Kernel's fused linear cross-entropy, Hsu et al. 2024).
    """
    if not torch.is_grad_enabled():
        # A parameter says that it needs a gradient even where none is recorded.
        hidden, head_weight = hidden.detach(), head_weight.detach()
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, head_weight, targets, matmul, logits, chunk_size)
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        matmul: torch.dtype,
        logits: torch.dtype,
        chunk_size: int,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight = head_weight.to(matmul)  # [V, D]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None  # [N, D]
        grad_weight = torch.zeros_like(head_weight) if needs_weight else None  # [V, D]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            scored = (targets[chunk] != IGNORE_INDEX)[:, None]  # [n, 1]
            inputs = hidden[chunk].to(matmul).masked_fill(~scored, 0.0)  # [n, D]
            target = targets[chunk, None].masked_fill(~scored, 0)  # [n, 1]
            weights = scored.float()  # [n, 1]
            log_probabilities = F.linear(inputs, weight).to(logits).float().log_softmax(dim=-1)  # [n, V]
            total -= (log_probabilities.gather(1, target) * weights).sum()
            if not (needs_hidden or needs_weight):
                continue
            # The gradient of -log softmax(z)[target] is softmax(z), less one at the target.
            grad_scores = log_probabilities.exp_().scatter_add_(1, target, -torch.ones_like(weights))
            grad_scores = grad_scores.mul_(weights).to(logits).to(matmul)  # [n, V]
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_scores @ weight
            if grad_weight is not None:
                grad_weight += grad_scores.t() @ inputs
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if gradient is None else gradient * grad_total for gradient in ctx.saved_tensors)
        return *gradients, None, None, None, None
