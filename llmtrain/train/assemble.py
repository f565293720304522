"""From a plan to an engine: model, loss and optimizer put together in their fixed order."""

from __future__ import annotations

import torch
from torch import nn

from llmtrain.config.typed import Config
from llmtrain.dist.ranks import World
from llmtrain.metrics.memory import Ledger
from llmtrain.model.init import build_on_meta, materialize
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import build_loss, build_score
from llmtrain.optim.build import build_optimizer
from llmtrain.parallel.parallelize import parallelize, share_gradients
from llmtrain.plan.plan import Plan
from llmtrain.train.engine_native import NativeEngine
from llmtrain.train.forward_backward import PlainForwardBackward


def build_engine(config: Config, plan: Plan, ledger: Ledger, world: World) -> NativeEngine:
    """An engine with initial weights: model → optimizer → gradients over ranks. The ranks of `world` are connected by now."""
    device = torch.device(plan.device)
    assert world.collectives.size == plan.degrees.dp_replicate, "the plan is that of another number of ranks"
    model = build_model(plan, seed=config.run.seed)
    ledger.watch(model)
    optimizer = build_optimizer(config.optimizer, model.named_parameters())
    ledger.adopt(optimizer.state().values(), "optimizer")
    gradients = share_gradients(
        model, config.parallelism.ddp, world.collectives, lambda bucket: ledger.adopt((bucket,), "grads")
    )
    loss = build_loss(plan.loss, plan.precision)
    return NativeEngine(
        model=model,
        score=build_score(plan.loss, plan.precision),
        forward_backward=PlainForwardBackward(model, loss, ledger, gradients, world.position),
        optimizer=optimizer,
        schedule=plan.schedule,
        clip_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
        device=device,
        collectives=world.collectives,
        position=world.position,
    )


def build_model(plan: Plan, *, seed: int) -> Transformer:
    """The planned model with initial weights on its device: meta model → parallelise → values. Ties stay ties."""
    model = build_on_meta(plan)
    parallelize(model, plan)
    assert _ties(model) == plan.tied, f"the model ties {_ties(model)}, the plan {plan.tied}"
    materialize(model, seed=seed, device=torch.device(plan.device))
    return model


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Sets of names that are one parameter, in the order of the model."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(tuple(several) for several in names.values() if len(several) > 1)
