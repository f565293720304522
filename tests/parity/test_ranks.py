"""1, 2 and 4 ranks are one process: samples, losses, norms and weights, however the batch is cut and the documents are packed."""

import json
from collections import Counter

import pytest
import torch
from helpers.observers import Place, engine_of
from helpers.rank_faults import DrawNumbers, FlipLowestBit, PoisonGradient
from helpers.runs import records, run_words, saved, write_text

from llmtrain.config.errors import ExitCode

STEPS, ROWS = 6, 8
WORDS = (
    f"train.steps={STEPS}",
    f"accumulation.global_batch_size={ROWS}",
    "attention=reference",
    "schedule.kind=linear",
    "schedule.warmup_steps=2",
    "checkpoint.every=0",
    # At the usual 1e-8 an element whose gradient is rounding noise makes a full step in a direction of its own.
    "optimizer.eps=1e-5",
)
PACKINGS = ("concat", "document", "padded")
CUTS = [(1, 2), (1, 1), (2, 4), (2, 2), (2, 1), (4, 2), (4, 1)]
"""Ranks, rows of a micro-batch: from one to eight micro-batches on a rank."""


@pytest.fixture(scope="module")
def whole(ranks, text, runs):
    """By packing: one process with the whole batch at once, and the weights it began with."""
    made = {}

    def of(packing):
        if packing not in made:
            words = run_words(
                text, runs, f"whole-{packing}", *WORDS, f"data.packing={packing}", "accumulation.micro_batch_size=8"
            )
            training = ranks.train(words, 1)
            assert training.code == ExitCode.DONE
            engine, _, _ = engine_of(Place(text, runs), words)
            first = {f"model/{name}": p.detach().clone() for name, p in engine.model.named_parameters()}
            made[packing] = (runs / f"whole-{packing}", training, first)
        return made[packing]

    return of


def assert_close_training(ours, theirs, first):
    """Records to 1e-5, final weights to 1e-4 of the way that they have come."""
    mine, other = records(ours), records(theirs)
    assert [record["step"] for record in mine] == [record["step"] for record in other] == list(range(1, len(mine) + 1))
    for name in ("tokens", "lr", "skipped"):
        assert [record.get(name) for record in mine] == [record.get(name) for record in other], name
    for name in ("loss", "grad_norm"):
        assert [record[name] for record in mine] == pytest.approx([record[name] for record in other], rel=1e-5), name
    mine, other = saved(ours), saved(theirs)
    assert mine.step == other.step and mine.state == other.state
    assert list(mine.tensors) == list(other.tensors)
    for name, start in first.items():
        moved = (other.tensors[name] - start).norm().item()
        apart = (mine.tensors[name] - other.tensors[name]).norm().item()
        assert moved > 0 and apart <= 1e-4 * moved, (name, apart / moved)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("size, micro_batch_size", CUTS)
def test_b02_b10_b27_b58_ranks_and_cuts_of_the_batch_do_not_show(ranks, whole, text, runs, packing, size, micro_batch_size):
    folder, reference, first = whole(packing)
    name = f"{packing}-{size}-{micro_batch_size}"
    words = run_words(text, runs, name, *WORDS, f"data.packing={packing}", f"accumulation.micro_batch_size={micro_batch_size}")
    training = ranks.train(words, size)
    assert training.code == ExitCode.DONE
    assert training.reads == reference.reads, "every sample once, the same tokens in the same order"
    assert {len(told.reads) for told in training.ranks} == {STEPS * ROWS // size}
    assert_close_training(runs / name, folder, first)
    assert all(told.after == training.ranks[0].after for told in training.ranks), "replicas are equal to the bit"


def test_b59_tokens_of_all_ranks_count_once(ranks, text, runs):
    words = run_words(text, runs, "rates", *WORDS)
    assert ranks.train(words, 2).code == ExitCode.DONE
    lines = [json.loads(line) for line in (runs / "rates" / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((runs / "rates" / "plan.json").read_text())
    for line in lines:
        tokens = line["tokens_per_second"] * line["step_seconds"]
        assert tokens == pytest.approx(plan["batch"]["tokens_per_step"], rel=1e-9)
        assert line["exposed_comm_seconds"] > 0


@pytest.mark.parametrize("packing", ["document", "padded"])
def test_b02_ranks_had_unequal_numbers_of_targets(ranks, whole, text, runs, packing):
    """Without this the test above could not tell a mean of means from the mean over all tokens."""
    reads = whole(packing)[1].reads
    for size in (2, 4):
        part = ROWS // size
        counts = [sum(read.num_targets for read in reads[first : first + part]) for first in range(0, len(reads), part)]
        unequal = [max(counts[k : k + size]) / min(counts[k : k + size]) for k in range(0, len(counts), size)]
        assert max(unequal) > 1.02, (size, unequal)


def test_b20_replicas_begin_equal_for_every_number_of_ranks(ranks, whole, text, runs):
    reference = whole("concat")[1].ranks[0].before
    for size in (2, 4):
        words = run_words(text, runs, f"first-{size}", *WORDS, "train.stop_after=1", "accumulation.micro_batch_size=2")
        training = ranks.train(words, size, plants=[DrawNumbers(0)])
        assert [told.before for told in training.ranks] == [reference] * size


def test_b20_replicas_that_differ_are_refused(ranks, text, runs):
    words = run_words(text, runs, "differ", *WORDS, "accumulation.micro_batch_size=2")
    training = ranks.train(words, 2, plants=[FlipLowestBit(1, "blocks.1.feed_forward.up.weight")])
    assert {told.code for told in training.ranks} == {int(ExitCode.NUMERICS)}
    told = " ".join(told.error for told in training.ranks)
    assert "blocks.1.feed_forward.up.weight" in told and "rank 1" in told or "ranks 0" in told, told


@pytest.mark.parametrize("rank", [0, 1])
def test_b10_update_that_one_rank_cannot_make_is_skipped_by_all(ranks, text, runs, rank):
    words = [*WORDS, "accumulation.micro_batch_size=2"]
    alone = ranks.train(run_words(text, runs, f"skip-alone-{rank}", *words), 1, plants=[PoisonGradient(0, 3)])
    training = ranks.train(run_words(text, runs, f"skip-{rank}", *words), 2, plants=[PoisonGradient(rank, 3)])
    assert alone.code == training.code == ExitCode.DONE
    assert [record.get("skipped", 0) for record in records(runs / f"skip-{rank}")] == [0, 0, 1, 0, 0, 0]
    assert training.reads == alone.reads and len(alone.reads) == (STEPS + 1) * ROWS
    first = {name: torch.zeros_like(t) for name, t in saved(runs / f"skip-{rank}").tensors.items() if name.startswith("model/")}
    assert_close_training(runs / f"skip-{rank}", runs / f"skip-alone-{rank}", first)


def test_b29_an_epoch_has_every_row_once_for_every_number_of_ranks(ranks, text, runs):
    orders = []
    for size in (1, 2, 3):
        words = run_words(
            text,
            runs,
            f"epochs-{size}",
            *WORDS,
            "data.packing=padded",
            "data.sequence_length=64",
            "accumulation.global_batch_size=6",
            "accumulation.micro_batch_size=2" if size != 2 else "accumulation.micro_batch_size=1",
            "train.steps=19",
        )
        training = ranks.train(words, size)
        assert training.code == ExitCode.DONE
        orders.append([read.tokens for read in training.reads])
    assert orders[0] == orders[1] == orders[2]
    rows = len(set(orders[0]))
    assert rows >= 30 and len(orders[0]) > 3 * rows
    epochs = [orders[0][k * rows : (k + 1) * rows] for k in range(3)]
    assert all(Counter(epoch) == Counter(set(orders[0])) for epoch in epochs), "every row once in each epoch"
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("eval_tokens", [24, 24 * 7, 24 * 1000])
def test_b53_evaluation_is_the_same_for_every_number_of_ranks(ranks, tmp_path, eval_tokens):
    """With one row, which leaves all ranks but one without any; with seven; with all of them."""
    train_text = write_text(tmp_path / "train")
    validation = write_text(tmp_path / "validation", 7, seed=3, bytes_per_document=60)
    told = []
    for size, micro_batch_size in ((1, 12), (1, 1), (1, 3), (2, 3), (3, 2), (4, 3)):
        words = run_words(
            train_text,
            tmp_path,
            f"{size}-{micro_batch_size}",
            *WORDS,
            f"data.validation_path={validation}",
            "data.packing=document",
            "accumulation.global_batch_size=12",
            f"accumulation.micro_batch_size={micro_batch_size}",
            "train.steps=3",
            "train.eval_every=1",
            f"train.eval_tokens={eval_tokens}",
        )
        assert ranks.train(words, size).code == ExitCode.DONE
        told.append([record["val_loss"] for record in records(tmp_path / f"{size}-{micro_batch_size}")])
    for values in told[1:]:
        assert values == pytest.approx(told[0], rel=1e-6)


def test_b53_evaluation_leaves_a_training_on_two_ranks_untouched(ranks, text, runs):
    words = [*WORDS, "accumulation.micro_batch_size=2", "model.dropout.residual=0.1", "train.eval_tokens=96"]
    always = ranks.train(run_words(text, runs, "always", *words, "train.eval_every=1"), 2)
    never = ranks.train(run_words(text, runs, "never", *words, "train.eval_every=0"), 2)
    assert always.ranks[0].after == never.ranks[0].after and always.ranks[1].after == never.ranks[1].after
