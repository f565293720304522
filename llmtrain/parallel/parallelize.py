"""The one ordered recipe that turns a plain model into the one a plan asks for."""

from __future__ import annotations

from llmtrain.model.transformer import Transformer
from llmtrain.parallel.recompute import apply_recompute
from llmtrain.plan.plan import Plan


def parallelize(model: Transformer, plan: Plan) -> None:
    """Apply what the plan says to a model on the meta device, in place.

    The order is fixed: stages, tensor and sequence, context, recompute, compile, shard. On one process only recompute has work.
    """
    apply_recompute(model, plan.recompute)
