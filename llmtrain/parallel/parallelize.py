"""The one ordered recipe that turns a plain model into the one a plan asks for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from llmtrain.config.typed import DdpConfig
from llmtrain.dist.collectives import Collectives, GroupCollectives
from llmtrain.model.transformer import Transformer
from llmtrain.parallel.data import GradientSync, LocalGradients, ReplicatedGradients
from llmtrain.parallel.recompute import apply_recompute
from llmtrain.plan.plan import Plan


def parallelize(model: Transformer, plan: Plan) -> None:
    """Apply what the plan says to a model on the meta device, in place.

    The order is fixed: stages, tensor and sequence, context, recompute, compile, shard. Only recompute has work yet.
    """
    apply_recompute(model, plan.recompute)


def share_gradients(
    model: Transformer, ddp: DdpConfig, collectives: Collectives, book: Callable[[Tensor], None]
) -> GradientSync:
    """What makes the gradients of a model that has its values those of all ranks; copies of the model are equal already.

    Args:
        book: told of the memory that gradients are sent from.
    """
    if isinstance(collectives, GroupCollectives):
        return ReplicatedGradients(model, ddp, collectives, book)
    return LocalGradients(model)
