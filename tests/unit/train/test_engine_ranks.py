"""The native engine on several ranks: one process in several pieces, to the last decision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.group import Group, grouped, single
from helpers.models import relative_error
from helpers.plain_loop import llama, mean_loss
from helpers.tiny import IGNORE, MACHINE, VOCAB_SIZE, config_of, cut, rows
from torch import Tensor

from llmtrain.data.loader import Batch, ValidationLoader
from llmtrain.data.packing import RowArrays
from llmtrain.metrics.memory import NoLedger
from llmtrain.plan.make_plan import make_plan
from llmtrain.train.assemble import build_engine
from llmtrain.train.engine_native import NativeEngine

LENGTH, ROWS = 24, 8
SMALL_BUCKETS = {"parallelism.bucket_mib": 0.02, "parallelism.first_bucket_mib": 0.004}
WAYS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small buckets": SMALL_BUCKETS,
    "beside buckets": SMALL_BUCKETS | {"parallelism.gradient_as_bucket_view": False},
    "static graph": SMALL_BUCKETS | {"parallelism.static_graph": True},
    "full recompute": SMALL_BUCKETS | {"recompute.kind": "full"},
    "selective recompute": SMALL_BUCKETS | {"recompute.kind": "selective", "attention.backend": "sdpa"},
    "tied": SMALL_BUCKETS | {"model.tie_embeddings": True},
    "chunked loss": SMALL_BUCKETS | {"loss.kind": "chunked", "loss.chunk_size": 17},
    "clipped": SMALL_BUCKETS | {"optimizer.clip_norm": 0.01},
}


def engine_in(world: Group, keys: dict[str, Any]) -> NativeEngine:
    config = config_of({"accumulation.micro_batch_size": 1, "optimizer.clip_norm": None} | keys)
    plan = make_plan(config, replace(MACHINE, world_size=world.size), vocab_size=VOCAB_SIZE)
    engine = build_engine(config, plan, NoLedger(), world)  # type: ignore[arg-type]
    engine.warm_up(rows(1, LENGTH, "document", seed=0))
    return engine


def unequal_rows(seed: int) -> Batch:
    """8 rows of documents, of which pairs have 1, 3, 5 and 7 targets: so has rank r of 4."""
    batch = rows(ROWS, LENGTH, "document", seed=seed)
    for row in range(ROWS):
        batch.targets[row, row // 2 + row % 2 :] = IGNORE  # of pair p: p and p + 1, where no document ends yet
    return batch


def share(world: Group, batch: Batch, micro_batch_size: int) -> list[Batch]:
    """The micro-batches of this rank."""
    whole = cut(batch, len(batch.tokens) // world.size)[world.rank]
    return cut(whole, micro_batch_size)


class Watched:
    """Keeps what the optimizer of an engine is given, and lets it step."""

    def __init__(self, engine: NativeEngine) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        plain: Callable[[float], None] = engine._optimizer.step

        def step(lr: float) -> None:
            self.gradients.append({name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None})
            plain(lr)

        engine._optimizer.step = step  # type: ignore[method-assign]


def two_updates(world: Group, keys: dict[str, Any], micro_batch_size: int) -> dict[str, Any]:
    engine = engine_in(world, keys | {"accumulation.micro_batch_size": micro_batch_size})
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    watched, results = Watched(engine), []
    for update in (1, 2):
        own = share(world, unequal_rows(update), micro_batch_size)
        (num_targets,) = world.collectives.sum_counts([sum(batch.num_targets for batch in own)])
        results.append(engine.train_step(update, own, num_targets))
    return {"results": results, "gradients": watched.gradients, "before": before, "after": engine.state()}


def all_ways(place: Any, folder: str, micro_batch_size: int) -> dict[str, dict[str, Any]]:
    with grouped(place, folder) as world:
        return {way: two_updates(world, keys, micro_batch_size) for way, keys in WAYS.items()}


def plain_gradient(before: dict[str, Tensor], tied: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the first update by one process with nothing of llmtrain in it, in fp64."""
    leaves = {name: weight.double().requires_grad_() for name, weight in before.items()}
    weights = leaves | ({"head.weight": leaves["embed.weight"]} if tied else {})
    batch = unequal_rows(1)
    logits = llama(weights, batch.tokens, batch.positions, batch.document_ids, layers=2, heads=4, eps=1e-5)
    loss = mean_loss(logits, batch.targets)
    return loss.item(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def norm_of(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(gradient.double().pow(2).sum().item() for gradient in gradients.values()))


@pytest.mark.parametrize(("size", "micro_batch_size"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_b02_ranks_with_unequal_targets_are_one_process(ranks, tmp_path, size: int, micro_batch_size: int) -> None:
    """Gradient, loss and norm to 1e-5 of a plain fp64 loop over the whole batch, and the same bits on every rank."""
    counts = [int((unequal_rows(1).targets[2 * rank : 2 * rank + 2] != IGNORE).sum()) for rank in range(4)]
    assert counts == [1, 3, 5, 7]
    outcomes = ranks.run(all_ways, size, str(tmp_path), micro_batch_size, timeout=120)
    for way in WAYS:
        first = outcomes[0][way]
        loss, gradients = plain_gradient(first["before"], way == "tied")
        result = first["results"][0]
        assert result.loss == pytest.approx(loss, rel=1e-5), way
        assert result.grad_norm == pytest.approx(norm_of(gradients), rel=1e-5), way
        scale = 0.01 / norm_of(gradients) if way == "clipped" else 1.0
        for name, gradient in gradients.items():
            assert relative_error(first["gradients"][0][name], gradient * scale) < 1e-5, (way, name)
        for other in outcomes[1:]:
            assert other[way]["results"] == first["results"], way
            for name, tensor in first["after"].items():
                assert torch.equal(other[way]["after"][name], tensor), (way, name)


def compressed(place: Any, folder: str) -> dict[str, Any]:
    with grouped(place, folder) as world:
        return two_updates(world, SMALL_BUCKETS | {"parallelism.compression": "bf16"}, 2)


def test_gradients_sent_as_bf16_are_rounded_and_equal_on_all_ranks(ranks, tmp_path) -> None:
    outcomes = ranks.run(compressed, 2, str(tmp_path))
    _, gradients = plain_gradient(outcomes[0]["before"], tied=False)
    errors = [relative_error(outcomes[0]["gradients"][0][name], gradient) for name, gradient in gradients.items()]
    assert 1e-4 < max(errors) < 2**-7, "bf16 keeps 8 bits"
    assert outcomes[1]["results"] == outcomes[0]["results"]
    for name, tensor in outcomes[0]["after"].items():
        assert torch.equal(outcomes[1]["after"][name], tensor), name


FAULTS = ("inf in a gradient", "nan in a gradient", "nan in the loss", "none")


def faulty(place: Any, folder: str, view: bool) -> list[tuple[Any, bool]]:
    """One update a fault on rank 1; results, and whether the saved state has changed."""
    with grouped(place, folder) as world:
        engine = engine_in(world, SMALL_BUCKETS | {"parallelism.gradient_as_bucket_view": view})
        plain_loss, told = engine._forward_backward._loss, []  # type: ignore[attr-defined]
        for update, fault in enumerate(FAULTS, 1):

            def spoilt(hidden: Tensor, *rest: Any, fault: str = fault) -> Tensor:
                if world.rank == 1 and "gradient" in fault:
                    factor = float(fault[:3])
                    hidden.register_hook(lambda gradient: gradient * factor)
                loss = plain_loss(hidden, *rest)
                return loss + (loss.detach() * float("nan")) * 0 if world.rank == 1 and fault == "nan in the loss" else loss

            engine._forward_backward._loss = spoilt  # type: ignore[attr-defined]
            before = {name: tensor.clone() for name, tensor in engine.state().items()}
            batch = unequal_rows(update)
            result = engine.train_step(update, share(world, batch, 1), batch.num_targets)
            assert all(parameter.grad is None for parameter in engine.model.parameters())
            told.append((result, all(torch.equal(before[name], tensor) for name, tensor in engine.state().items())))
        return told


@pytest.mark.parametrize("view", [True, False])
def test_b10_what_is_not_finite_on_one_rank_is_skipped_on_all(ranks, tmp_path, view: bool) -> None:
    outcomes = ranks.run(faulty, 2, str(tmp_path), view)
    for told in outcomes:
        assert [result.skipped for result, _ in told] == [True, True, True, False]
        assert [unchanged for _, unchanged in told] == [True, True, True, False]
    assert outcomes[0][-1] == outcomes[1][-1], "and the next update is as good as any"


class Documents:
    """Seven rows of unequal numbers of targets."""

    num_rows = 7

    @property
    def num_targets(self) -> int:
        return sum(range(3, 17, 2))

    def read(self, numbers: Any) -> RowArrays:
        batch = rows(self.num_rows, LENGTH, "concat", seed=9)
        for row in range(self.num_rows):
            batch.targets[row, 3 + 2 * row :] = IGNORE
        return RowArrays(batch.tokens[numbers].numpy(), batch.targets[numbers].numpy(), None, None)


def evaluated(place: Any, folder: str, num_rows: int) -> list[Any]:
    """Results for several batch sizes, and what a stop on the last rank does."""
    with grouped(place, folder) as world:
        engine = engine_in(world, {"accumulation.global_batch_size": 12})
        loader = ValidationLoader(Documents(), sequence_length=LENGTH, fingerprint="")

        def batches(batch_size: int) -> Any:
            return loader.batches(batch_size, num_rows * LENGTH, rank=world.rank, num_ranks=world.size)

        found: list[Any] = [engine.evaluate(batches(size), lambda: False) for size in (1, 3, 8)]
        # Some rank has a row of its own; with one row it is the last.
        asked = []

        def stop() -> bool:
            asked.append(True)
            return True

        found.append(engine.evaluate(batches(1), stop if world.rank == world.size - 1 else lambda: False))
        return [*found, len(asked), engine.model.training]


@pytest.mark.parametrize("num_rows", [7, 1])
def test_b53_validation_over_ranks_is_that_of_one_process(ranks, tmp_path, num_rows: int) -> None:
    """Every row once for 1 to 4 ranks and any batch size, also where ranks have none; a stop on one rank is one on all."""
    reference = None
    for size in (1, 2, 3, 4):
        (tmp_path / str(size)).mkdir()
        outcomes = ranks.run(evaluated, size, str(tmp_path / str(size)), num_rows, timeout=60)
        reference = reference or outcomes[0][0]
        assert reference.num_targets == sum(3 + 2 * row for row in range(num_rows))
        for rank, (*results, stopped, asked, training) in enumerate(outcomes):
            for result in results:
                assert result.num_targets == reference.num_targets
                assert result.loss == pytest.approx(reference.loss, rel=1e-6)
            assert results == outcomes[0][:3], "all ranks say the same"
            assert stopped is None and training
            assert asked == (rank == size - 1), "asked after its first batch and not again"


def test_evaluation_of_nothing_at_all_is_no_division_by_zero() -> None:
    engine = engine_in(single(), {})
    result = engine.evaluate([], lambda: False)
    assert result is not None and result.num_targets == 0 and result.loss == 0.0


def positions(place: Any, folder: str) -> list[tuple[str, int]]:
    with grouped(place, folder) as world:
        engine, seen = engine_in(world, SMALL_BUCKETS), []
        world.position.enter = lambda phase: seen.append((phase, world.position.microbatch))  # type: ignore[method-assign]
        batch = unequal_rows(1)
        for _ in range(2):
            seen.clear()
            engine.train_step(1, share(world, batch, 2), batch.num_targets)
        engine.evaluate([batch], lambda: False)
        return seen


def test_the_position_says_what_a_rank_is_at(ranks, tmp_path) -> None:
    passes = [(phase, index) for index in (0, 1) for phase in ("forward", "backward")]
    for seen in ranks.run(positions, 2, str(tmp_path)):
        phases = [entry for entry in seen if entry[0] != "warm-up"]
        assert phases == [*passes, ("reduce", 1), ("optimizer", 1), ("evaluate", 1)]
