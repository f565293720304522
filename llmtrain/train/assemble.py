"""From a plan to an engine: model, loss and optimizer put together in their fixed order."""

from __future__ import annotations

import torch

from llmtrain.config.typed import Config
from llmtrain.metrics.memory import Ledger
from llmtrain.model.init import build_on_meta, materialize
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.optim.build import build_optimizer
from llmtrain.parallel.parallelize import parallelize
from llmtrain.plan.plan import Plan
from llmtrain.train.engine_native import NativeEngine
from llmtrain.train.forward_backward import PlainForwardBackward


def build_engine(config: Config, plan: Plan, ledger: Ledger) -> NativeEngine:
    """An engine with initial weights: meta model → parallelise → values → optimizer."""
    device = torch.device(plan.device)
    model = build_on_meta(plan)
    parallelize(model, plan)
    materialize(model, seed=config.run.seed, device=device)
    ledger.watch(model)
    optimizer = build_optimizer(config.optimizer, model.named_parameters())
    ledger.adopt(optimizer.state().values(), "optimizer")
    loss = build_loss(plan.loss, plan.precision)
    return NativeEngine(
        model=model,
        loss=loss,
        forward_backward=PlainForwardBackward(model, loss, ledger),
        optimizer=optimizer,
        schedule=plan.schedule,
        clip_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
        device=device,
    )
