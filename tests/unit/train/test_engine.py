"""The native engine: its start, its master weights, its strict loading."""

from dataclasses import replace

import pytest
import torch
from helpers.group import single
from helpers.tiny import config_of, plan_of, rows

from llmtrain.config.errors import StorageError
from llmtrain.metrics.memory import NoLedger
from llmtrain.train.assemble import build_engine

RECOMPUTE = ("none", "full", "selective")


def engine_with(**keys):
    config = config_of({key.replace("__", "."): value for key, value in keys.items()})
    return build_engine(config, plan_of(config), NoLedger(), single())


def step(engine, number=1):
    batch = rows(8, 24, "concat", seed=number)
    return engine.train_step(number, [batch], batch.num_targets)


def test_b20_initial_weights_depend_on_seed_and_name_alone():
    first = engine_with().state()
    torch.manual_seed(123)
    torch.rand(1000)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads % 2 + 1)
    second = engine_with(recompute__kind="full", attention__backend="sdpa", precision__kind="bf16").state()
    torch.set_num_threads(threads)
    other = engine_with(run__seed=1).state()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    drawn = [name for name in first if name.startswith("model/") and "norm" not in name]
    assert drawn and not any(torch.equal(first[name], other[name]) for name in drawn)
    values = torch.cat([first[name].flatten()[:64] for name in drawn])
    assert values.unique().numel() == values.numel(), "no two parameters share their numbers"


def test_b46_bf16_training_moves_weights_as_far_as_fp32():
    """From 1.0 with unit gradients, AdamW at 1e-3, 100 updates: 0.9; in bf16 weights each such update would round away."""
    keys = {"optimizer__lr": 1e-3, "optimizer__clip_norm": None, "optimizer__weight_decay": 0.0, "schedule__kind": "constant"}
    for precision in ("fp32", "bf16"):
        engine = engine_with(precision__kind=precision, schedule__warmup_steps=0, train__steps=100, **keys)

        class Ones:
            def run(self, microbatches, *, seed, update, num_targets, model=engine.model):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                return torch.tensor(1.0)

        engine._forward_backward = Ones()
        for number in range(1, 101):
            step(engine, number)
        weight = engine.state()["model/norm.weight"]
        assert weight.dtype == torch.float32
        assert torch.allclose(weight, torch.full_like(weight, 0.9), atol=1e-5), precision


def test_b46_low_bits_of_master_weights_survive_a_resume():
    engine, twin = engine_with(precision__kind="bf16"), engine_with(precision__kind="bf16")
    step(engine)
    weights = engine.state()["model/head.weight"]
    assert not torch.equal(weights, weights.bfloat16().float())
    twin.load_state({name: tensor.clone() for name, tensor in engine.state().items()})
    for number in (2, 3):
        assert step(engine, number) == step(twin, number)
    for name, tensor in engine.state().items():
        assert torch.equal(tensor, twin.state()[name]), name


@pytest.mark.parametrize("saved_by", RECOMPUTE)
@pytest.mark.parametrize("loaded_by", RECOMPUTE)
def test_b43_names_are_the_same_under_every_recompute(saved_by, loaded_by):
    source, target = engine_with(recompute__kind=saved_by), engine_with(recompute__kind=loaded_by, run__seed=5)
    before = step(source)
    step(source, 2)
    target.load_state({name: tensor.clone() for name, tensor in source.state().items()})
    assert step(source, 3).loss == pytest.approx(step(target, 3).loss, rel=1e-6)
    assert before.loss > 0


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda t: t.pop("model/head.weight"), ["missing", "model/head.weight"]),
        (lambda t: t.update({"model/extra.weight": torch.zeros(2)}), ["not wanted", "model/extra.weight"]),
        (lambda t: t.update({"model/norm.weight": torch.zeros(31)}), ["shape", "model/norm.weight", "[31]", "[32]"]),
        (lambda t: t.update({"model/norm.weight": torch.zeros(32, dtype=torch.bfloat16)}), ["dtype", "bfloat16"]),
        (
            lambda t: t.update({"model/_orig_mod.head.weight": t.pop("model/head.weight")}),
            ["missing", "not wanted", "_orig_mod"],
        ),
        (lambda t: t.pop("optimizer/exp_avg/embed.weight"), ["missing", "optimizer/exp_avg/embed.weight"]),
    ],
)
def test_b43_anything_that_does_not_match_is_refused_and_nothing_is_loaded(spoil, words):
    engine = engine_with()
    before = {name: tensor.clone() for name, tensor in engine.state().items()}
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    spoil(tensors)
    with pytest.raises(StorageError) as caught:
        engine.load_state(tensors)
    for word in words:
        assert word in str(caught.value)
    for name, tensor in engine.state().items():
        assert torch.equal(tensor, before[name]), name


def test_b07_the_logged_norm_is_that_before_clipping_and_the_update_is_clipped():
    free, tight = engine_with(optimizer__clip_norm=None), engine_with(optimizer__clip_norm=0.01)
    first, second = step(free), step(tight)
    assert first.grad_norm == second.grad_norm > 0.01
    moments = [engine.state()["optimizer/exp_avg/head.weight"] for engine in (free, tight)]
    assert torch.allclose(moments[1], moments[0] * (0.01 / first.grad_norm), rtol=1e-5, atol=0)


def test_a_batch_without_targets_changes_the_weights_only_by_decay():
    engine = engine_with()
    batch = rows(8, 24, "concat")
    batch.targets.fill_(-100)
    result = engine.train_step(1, [batch], 0)
    assert result.loss == 0.0 and result.grad_norm == 0.0 and not result.skipped


@pytest.mark.parametrize("tied", [False, True])
def test_b14_an_engine_is_only_built_with_the_ties_of_its_plan(tied):
    config = config_of({"model.tie_embeddings": tied})
    plan = plan_of(config)
    build_engine(config, plan, NoLedger(), single())
    with pytest.raises(AssertionError, match="ties"):
        build_engine(config, replace(plan, tied=() if tied else (("embed.weight", "head.weight"),)), NoLedger(), single())
