"""The forecast of a rank that keeps a whole copy, against what the storage ledger measures on two ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.group import grouped
from helpers.tiny import MACHINE, config_of, rows

from llmtrain.config.typed_data import Packing
from llmtrain.metrics.memory import MemorySummary, StorageLedger
from llmtrain.parallel.data import ReplicatedGradients
from llmtrain.plan.activations import Workload
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.memory import forecast_memory, instants
from llmtrain.plan.plan import Plan
from llmtrain.train.assemble import build_engine

VOCAB_SIZE, LENGTH = 256, 32
WIDE = {
    "model.dim": 256,
    "model.num_layers": 4,
    "data.sequence_length": LENGTH,
    "parallelism.bucket_mib": 1.0,
    "parallelism.first_bucket_mib": 0.25,
    "train.steps": 3,
}
"""Weights and gradients are nearly all of its memory: with something on its way the highest instant is at the end of backward."""
LONG = WIDE | {"model.dim": 64, "data.sequence_length": 256}
"""Activations are more than half of its memory: the highest instant is at the beginning of backward."""
BEHIND_SECONDS = 0.4
"""Rank 1 comes so much later to backward that nothing that rank 0 has sent has arrived when its backward is done."""


def settled(keys: dict[str, Any], num_microbatches: int) -> tuple[Any, Plan, Workload]:
    config = config_of(keys | {"accumulation.global_batch_size": 4 * num_microbatches, "accumulation.micro_batch_size": 2})
    plan = make_plan(config, replace(MACHINE, world_size=2), vocab_size=VOCAB_SIZE)
    return (
        config,
        plan,
        Workload(
            model=plan.model,
            precision=plan.precision,
            micro_batch_size=plan.batch.micro_batch_size,
            num_microbatches=plan.batch.num_microbatches,
            sequence_length=plan.batch.sequence_length,
            loss=plan.loss,
            recompute=plan.recompute,
            attention_backend=plan.attention_backend,
            document_mask=config.data.packing is not Packing.CONCAT,
            ddp=config.parallelism.ddp,
        ),
    )


def hold_back(seconds: float) -> None:
    """Every update of this process begins so much later; the rank is a process of its own and ends with the test."""
    plain = ReplicatedGradients.begin_update

    def begin_update(gradients: ReplicatedGradients) -> None:
        time.sleep(seconds)
        plain(gradients)

    ReplicatedGradients.begin_update = begin_update  # type: ignore[method-assign]


def measured(place: Any, folder: str, keys: dict[str, Any], num_microbatches: int) -> list[MemorySummary]:
    """Updates 1 to 3 under the ledger."""
    config, plan, work = settled(keys, num_microbatches)
    hold_back(BEHIND_SECONDS * place.rank)
    with grouped(place, folder) as world:
        ledger = StorageLedger(torch.device("cpu"))
        engine = build_engine(config, plan, ledger, world)  # type: ignore[arg-type]
        engine.warm_up(rows(2, work.sequence_length, "concat", seed=0))
        found = []
        for update in (1, 2, 3):
            with ledger.window():
                batches = [rows(2, work.sequence_length, "concat", seed=update) for _ in range(num_microbatches)]
                engine.train_step(update, batches, 2 * num_microbatches * 2 * work.sequence_length)
                del batches
            summary = ledger.summary()
            assert summary is not None
            found.append(summary)
        return found


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("view", [True, False], ids=["inside", "beside"])
@pytest.mark.parametrize("shape", ["wide", "long"])
def test_the_forecast_of_two_ranks_is_what_is_measured(
    ranks, tmp_path, shape: str, view: bool, compression: str, num_microbatches: int
) -> None:
    """Within 3 % on the rank from which everything is still on its way, in every update and also in the first of a process."""
    keys = {"wide": WIDE, "long": LONG}[shape] | {
        "data.packing": "concat",
        "parallelism.gradient_as_bucket_view": view,
        "parallelism.compression": compression,
    }
    _, _, work = settled(keys, num_microbatches)
    forecast = forecast_memory(work)
    name = max(instants(work), key=lambda name: instants(work)[name].total)
    if compression == "bf16":
        assert name.startswith(("first", "embedding") if shape == "wide" else "last"), "all is on its way, or nothing"
    for summary in ranks.run(measured, 2, str(tmp_path), keys, num_microbatches)[0]:
        assert summary.peak_bytes == pytest.approx(forecast.total, rel=0.03), (name, forecast, summary.at_peak)


def test_each_way_to_send_costs_what_it_says() -> None:
    config, plan, work = settled(WIDE, 2)
    ddp, parameters = config.parallelism.ddp, plan.num_parameters

    def gradients(**changes: Any) -> int:
        return instants(replace(work, **changes))["embedding backward"].grads

    assert gradients() == gradients(ddp=None) == gradients(num_microbatches=1) == 4 * parameters
    assert gradients(ddp=replace(ddp, gradient_as_bucket_view=False)) == 8 * parameters
    assert gradients(ddp=replace(ddp, compression="bf16")) == 6 * parameters
