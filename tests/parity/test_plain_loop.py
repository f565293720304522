"""Five updates of the engine are those of a plain loop, however the batch is cut and whichever backends run it."""

import itertools
import math

import pytest
import torch
from helpers.plain_loop import PlainAdamW, llama, mean_loss
from helpers.tiny import VOCAB_SIZE, config_of, cut, plan_of, rows

from llmtrain.dist.ranks import alone
from llmtrain.metrics.memory import NoLedger
from llmtrain.train.assemble import build_engine

UPDATES, ROWS, LENGTH = 5, 8, 24
PACKINGS = ("concat", "document", "padded")
ATTENTION = ("reference", "sdpa", "blocked")
EPS = 1e-5
"""Adam divides by |g| + eps: at the usual 1e-8 an element whose gradient is rounding noise (5e-9 beside a mean of 3e-3 here) makes a
full step in a direction of its own in any implementation. With 1e-5 what is compared is the arithmetic and not that noise."""
SETTINGS = {
    "schedule.kind": "constant",
    "schedule.warmup_steps": 0,
    "optimizer.lr": 1e-3,
    "optimizer.clip_norm": 1.0,
    "optimizer.eps": EPS,
}
GRADIENT_FLOOR = 1e-3


def batches(packing):
    return [rows(ROWS, LENGTH, packing, seed=100 + update) for update in range(UPDATES)]


def train(keys, packing, micro_batch_size=ROWS):
    """(losses, norms, weights before, weights after) of five updates of ours."""
    config = config_of(SETTINGS | keys)
    engine = build_engine(config, plan_of(config), NoLedger(), alone())
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    results = [
        engine.train_step(k, cut(batch, micro_batch_size), batch.num_targets) for k, batch in enumerate(batches(packing), 1)
    ]
    after = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return [r.loss for r in results], [r.grad_norm for r in results], before, after


def plain(packing, before, dtype):
    """The same five updates by the plain loop from the same weights."""
    optimizer = PlainAdamW(
        {name: w.to(dtype) for name, w in before.items()}, weight_decay=0.1, betas=(0.9, 0.95), eps=EPS, clip=1.0
    )
    trace = []
    for batch in batches(packing):
        positions = torch.arange(LENGTH).repeat(ROWS, 1) if batch.positions is None else batch.positions
        documents = torch.zeros_like(positions) if batch.document_ids is None else batch.document_ids

        def loss(weights, batch=batch, positions=positions, documents=documents):
            logits = llama(weights, batch.tokens, positions, documents, layers=2, heads=4, eps=1e-5)
            return mean_loss(logits, batch.targets)

        trace.append(optimizer.update(loss, 1e-3))
    return [loss for loss, _ in trace], [norm for _, norm in trace], optimizer.weights


@pytest.fixture(scope="module", params=PACKINGS)
def reference(request):
    """Our fp32 reference path for a packing: whole batch, no recompute, reference attention and loss."""
    return request.param, train({"data.packing": request.param}, request.param)


def test_reference_path_is_the_plain_loop(reference):
    packing, (losses, norms, before, after) = reference
    assert abs(losses[0] - math.log(VOCAB_SIZE)) < 0.1
    for dtype in (torch.float32, torch.float64):
        plain_losses, plain_norms, weights = plain(packing, before, dtype)
        assert losses == pytest.approx(plain_losses, rel=1e-6)
        assert norms == pytest.approx(plain_norms, rel=1e-5)
        for name, weight in after.items():
            assert (weight - weights[name]).abs().max().item() < 1e-6, (name, dtype)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("micro_batch_size", [8, 4, 2, 1])
def test_b01_every_cut_and_backend_equals_the_reference_path(reference, micro_batch_size, recompute):
    packing, (losses, norms, before, after) = reference
    for attention, loss in itertools.product(ATTENTION, ("reference", "chunked")):
        keys = {
            "data.packing": packing,
            "recompute.kind": recompute,
            "attention.backend": attention,
            "loss.kind": loss,
            "loss.chunk_size": 17 if loss == "chunked" else None,
            "accumulation.micro_batch_size": micro_batch_size,
        }
        ours = train(keys, packing, micro_batch_size)
        assert ours[0] == pytest.approx(losses, rel=1e-5), keys
        assert ours[1] == pytest.approx(norms, rel=1e-5), keys
        for name, weight in ours[3].items():
            moved = (after[name] - before[name]).norm()
            assert (weight - after[name]).norm() <= 1e-4 * moved, (name, keys)


def gradients(keys, packing, micro_batch_size=ROWS, dtype=None):
    """Gradients of the first update, without the optimizer."""
    config = config_of(SETTINGS | keys | {"data.packing": packing})
    engine = build_engine(config, plan_of(config), NoLedger(), alone())
    batch = batches(packing)[0]
    engine._forward_backward.run(cut(batch, micro_batch_size), seed=0, update=1, num_targets=batch.num_targets)
    return {name: p.grad.double() for name, p in engine.model.named_parameters()}


def distances(ours, true):
    """Per-parameter error of gradients as DESIGN promise 1 defines it."""
    total = math.sqrt(sum(g.pow(2).sum().item() for g in true.values()))
    elements = sum(g.numel() for g in true.values())
    result = {}
    for name, g in true.items():
        floor = GRADIENT_FLOOR * total * math.sqrt(g.numel() / elements)
        result[name] = (ours[name] - g).norm().item() / max(g.norm().item(), floor)
    return result


@pytest.mark.parametrize("packing", PACKINGS)
def test_bf16_is_as_near_to_fp32_on_every_path(packing):
    """DESIGN promise 2: no path is more than 1.5 times as far from fp32 as the plain bf16 one, and none farther than 5e-2."""
    true = gradients({}, packing)
    base = distances(gradients({"precision.kind": "bf16"}, packing), true)
    assert 1e-4 < max(base.values()) < 5e-2
    paths = itertools.product((8, 2), ("none", "full", "selective"), ATTENTION, ("reference", "chunked"))
    for micro_batch_size, recompute, attention, loss in paths:
        keys = {
            "precision.kind": "bf16",
            "recompute.kind": recompute,
            "attention.backend": attention,
            "loss.kind": loss,
            "accumulation.micro_batch_size": micro_batch_size,
        }
        ours = distances(gradients(keys, packing, micro_batch_size), true)
        for name, distance in ours.items():
            assert distance <= max(1.5 * base[name], 1e-3) and distance <= 5e-2, (name, distance, base[name], keys)


def test_b01_worked_value_and_planted_mean_of_means():
    """Sums (2, 1 target) and (90, 9 targets): 9.2, and the two wrong denominators are seen by the tests above."""
    assert (2 + 90) / (1 + 9) == 9.2
    config = config_of(SETTINGS | {"data.packing": "padded", "accumulation.micro_batch_size": 1})
    engine = build_engine(config, plan_of(config), NoLedger(), alone())
    batch = batches("padded")[0]
    parts = cut(batch, 1)
    means = [engine.evaluate([part], lambda: False).loss for part in parts]
    result = engine.train_step(1, parts, sum(part.num_targets for part in parts))
    weighted = sum(mean * part.num_targets for mean, part in zip(means, parts, strict=True)) / batch.num_targets
    assert result.loss == pytest.approx(weighted, rel=1e-6)
    assert abs(result.loss - sum(means) / len(means)) > 1e-4 * result.loss
