"""Gradients of whole copies: sent early, sent once, kept where they are sent from, and the same in a process that goes on."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.group import Group, grouped, single
from helpers.tiny import MACHINE, VOCAB_SIZE, config_of, cut, rows
from torch import Tensor

from llmtrain.config.errors import PlanError
from llmtrain.config.typed import DdpConfig
from llmtrain.dist.collectives import GroupCollectives
from llmtrain.metrics.memory import NoLedger
from llmtrain.parallel.data import bucket_sizes
from llmtrain.plan.make_plan import make_plan
from llmtrain.train.assemble import build_engine
from llmtrain.train.engine_native import NativeEngine

SMALL_BUCKETS = {
    "parallelism.bucket_mib": 0.02,
    "parallelism.first_bucket_mib": 0.004,
    "accumulation.global_batch_size": 12,
    "accumulation.micro_batch_size": 1,
}
WAYS: dict[str, dict[str, Any]] = {
    "inside": {},
    "beside": {"parallelism.gradient_as_bucket_view": False},
    "static": {"parallelism.static_graph": True},
    "bf16": {"parallelism.compression": "bf16"},
}


def cold_engine_in(world: Group, keys: dict[str, Any]) -> NativeEngine:
    config = config_of(SMALL_BUCKETS | keys)
    plan = make_plan(config, replace(MACHINE, world_size=world.size), vocab_size=VOCAB_SIZE)
    return build_engine(config, plan, NoLedger(), world)  # type: ignore[arg-type]


def engine_in(world: Group, keys: dict[str, Any]) -> NativeEngine:
    engine = cold_engine_in(world, keys)
    engine.warm_up(rows(1, 24, "padded", seed=0))
    return engine


def step(world: Group, engine: NativeEngine, update: int, num_rows: int = 12) -> Any:
    """One update of rows that depend on its number, cut into micro-batches of one row."""
    batch = rows(num_rows, 24, "padded", seed=update)
    share = num_rows // world.size
    own = cut(batch, 1)[world.rank * share : (world.rank + 1) * share]
    return engine.train_step(update, own, batch.num_targets)


class Events:
    """What happens in a backward, in order: gradients that are ready, and buckets that are sent."""

    def __init__(self, engine: NativeEngine, collectives: Any) -> None:
        self.seen: list[str] = []
        for name, parameter in engine.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.seen.append(name))
        plain = collectives.average_bucket

        def average_bucket(sent: Tensor, finish: Any) -> Any:
            self.seen.append(f"sent {sent.nbytes}")
            return plain(sent, finish)

        collectives.average_bucket = average_bucket


def events_of_updates(place: Any, folder: str, keys: dict[str, Any], num_rows: int) -> list[list[str]]:
    """Events of the warm-up and of updates 1 to 3."""
    with grouped(place, folder) as world:
        engine = cold_engine_in(world, {"model.num_layers": 4} | keys)
        events = Events(engine, world.collectives)
        engine.warm_up(rows(1, 24, "padded", seed=0))
        found = [events.seen]
        for update in (1, 2, 3):
            events.seen = []
            step(world, engine, update, num_rows)
            found.append(events.seen)
        return found


@pytest.mark.parametrize("way", WAYS)
def test_the_first_bucket_is_sent_before_half_of_backward_is_done(ranks, tmp_path, way: str) -> None:
    """Also in the first update of a process, and with a static graph: the warm-up has seen the order of backward."""
    for updates in ranks.run(events_of_updates, 2, str(tmp_path), WAYS[way], 2):
        for update in (1, 3):
            seen = updates[update]
            num_gradients = len([event for event in seen if not event.startswith("sent")])
            backward = seen[-_length_of_last_backward(seen) :]
            ready_before = next(index for index, event in enumerate(backward) if event.startswith("sent"))
            num_parameters = len({event for event in seen if not event.startswith("sent")})
            assert ready_before < num_parameters / 2, (update, backward)
            head = VOCAB_SIZE * 32 * (2 if way == "bf16" else 4)
            assert backward[ready_before] == f"sent {head}", "the first bucket is full with the first gradient"
            assert num_gradients == num_parameters, "one micro-batch"


@pytest.mark.parametrize("way", WAYS)
def test_the_buckets_of_every_update_are_those_the_warm_up_ended_with(ranks, tmp_path, way: str) -> None:
    for updates in ranks.run(events_of_updates, 2, str(tmp_path), WAYS[way], 2):
        warm_up, *trained = updates
        assert warm_up.count("head.weight") == (3 if way == "static" else 2), "passes"
        assert [warm_up[-_length_of_last_backward(warm_up) :]] * 3 == trained


def _length_of_last_backward(seen: list[str]) -> int:
    """Events from the last time that the head's gradient was ready, which is the first of a backward."""
    return seen[::-1].index("head.weight") + 1


@pytest.mark.parametrize("way", WAYS)
def test_only_the_last_micro_batch_sends_and_every_byte_once(ranks, tmp_path, way: str) -> None:
    for updates in ranks.run(events_of_updates, 2, str(tmp_path), WAYS[way], 6):
        seen = updates[3]
        first_sent = next(index for index, event in enumerate(seen) if event.startswith("sent"))
        assert seen[:first_sent].count("head.weight") == 3, "three micro-batches, and no bucket before the last"
        assert seen.count("embed.weight") == 3
        sent = sum(int(event.split()[1]) for event in seen if event.startswith("sent"))
        elements = sum(p.numel() for p in engine_in(single(), {"model.num_layers": 4}).model.parameters())
        assert sent == elements * (2 if way == "bf16" else 4)


def where_gradients_live(place: Any, folder: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Storages of gradients after a backward, and of the buckets; and what building and training warned of."""
    with grouped(place, folder) as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_in(world, keys)
        collectives = world.collectives
        assert isinstance(collectives, GroupCollectives)
        plain, buckets, found = collectives.average_bucket, set(), []
        names = [name for name, _ in engine.model.named_parameters()]

        def average_bucket(sent: Tensor, finish: Any) -> Any:
            buckets.add(sent.untyped_storage().data_ptr())
            return plain(sent, finish)

        def keep_places(lr: float) -> None:
            found.append({p.grad.untyped_storage().data_ptr() for p in engine.model.parameters()})

        collectives.average_bucket = average_bucket  # type: ignore[method-assign]
        engine._optimizer.step = keep_places  # type: ignore[method-assign]
        before = [parameter.clone() for parameter in engine.model.parameters()]
        for update in (1, 2, 3):
            buckets.clear()
            step(world, engine, update)
        return {
            "inside": [places == buckets for places in found[1:]],
            "names": names,
            "same": all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True)),
            "warnings": [str(warning.message) for warning in caught],
        }


@pytest.mark.parametrize("way", ["inside", "beside", "static"])
def test_gradients_live_inside_the_buckets_or_beside_them(ranks, tmp_path, way: str) -> None:
    names = [name for name, _ in engine_in(single(), {}).model.named_parameters()]
    for found in ranks.run(where_gradients_live, 2, str(tmp_path), WAYS[way]):
        assert found["inside"] == [way != "beside"] * 2
        assert found["names"] == names, "no wrapper shows in a checkpoint"
        assert found["same"], "the warm-up changes no weight"
        assert found["warnings"] == []


def interrupted(place: Any, folder: str, keys: dict[str, Any]) -> tuple[list[Any], list[Any], bool]:
    """Three updates, and the last two of them again by an engine that has the state after the first."""
    with grouped(place, folder) as world:
        engine, later = engine_in(world, keys), engine_in(world, keys)
        results = [step(world, engine, 1)]
        saved = {name: tensor.clone() for name, tensor in engine.state().items()}
        results += [step(world, engine, update) for update in (2, 3)]
        later.load_state(saved)
        again = [step(world, later, update) for update in (2, 3)]
        ends = engine.state(), later.state()
        return results[1:], again, all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_goes_on_sums_in_the_same_order(ranks, tmp_path, way: str) -> None:
    """Three ranks: a sum of three numbers depends on its order, which depends on where in a bucket they are."""
    outcomes = ranks.run(interrupted, 3, str(tmp_path), WAYS[way])
    for results, again, same in outcomes:
        assert results == again == outcomes[0][0]
        assert same


def ddp(first: float, bucket: float) -> DdpConfig:
    return DdpConfig(bucket, first, gradient_as_bucket_view=True, static_graph=False, compression="none")


def test_bucket_sizes_reach_torch_or_are_refused() -> None:
    assert bucket_sizes(ddp(0.5, 8.0), {"bucket_cap_mb_list", "bucket_cap_mb"}) == {"bucket_cap_mb_list": [0.5, 8.0]}
    assert bucket_sizes(ddp(1.0, 25.0), {"bucket_cap_mb"}) == {}
    assert bucket_sizes(ddp(8.0, 8.0), {"bucket_cap_mb"}) == {"bucket_cap_mb": 8.0}
    with pytest.raises(PlanError, match="parallelism.first_bucket_mib=0.5"):
        bucket_sizes(ddp(0.5, 8.0), {"bucket_cap_mb"})
