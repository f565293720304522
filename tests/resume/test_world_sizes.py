"""A run that goes on with another number of ranks: the same samples in the same order, and the same training to rounding."""

import pytest
from helpers.rank_jobs import assert_same_run
from helpers.runs import records, run_words, saved

from llmtrain.config.errors import ExitCode

STEPS, ROWS = 12, 8
WORDS = (
    f"train.steps={STEPS}",
    f"accumulation.global_batch_size={ROWS}",
    "accumulation.micro_batch_size=2",
    "attention=reference",
    "data.packing=document",
    "data.sequence_length=38",
    "model.dropout.residual=0.1",
    "train.eval_every=4",
    "train.eval_tokens=96",
    "checkpoint.every=0",
    "optimizer.eps=1e-5",
)


@pytest.fixture(scope="module")
def calm(ranks, text, runs):
    """Undisturbed runs by number of ranks: (folder, what the ranks told)."""
    made = {}

    def of(size):
        if size not in made:
            training = ranks.train(run_words(text, runs, f"calm-{size}", *WORDS), size)
            assert training.code == ExitCode.DONE
            made[size] = (runs / f"calm-{size}", training)
        return made[size]

    return of


def assert_close(ours, theirs):
    mine, other = records(ours), records(theirs)
    assert [(r["step"], r["tokens"], r["lr"]) for r in mine] == [(r["step"], r["tokens"], r["lr"]) for r in other]
    for name in ("loss", "grad_norm", "val_loss"):
        ours_of, theirs_of = ([r[name] for r in rs if name in r] for rs in (mine, other))
        assert ours_of == pytest.approx(theirs_of, rel=1e-5), name
    mine, other = saved(ours), saved(theirs)
    assert mine.step == other.step == STEPS and mine.state == other.state
    for name, tensor in other.tensors.items():
        apart = (mine.tensors[name].double() - tensor.double()).norm().item()
        assert apart <= 1e-5 * max(tensor.double().norm().item(), 1e-12), name


@pytest.mark.parametrize(
    "legs",
    [
        ((1, 2), (2, 2), (4, 2), (1, 2)),
        ((4, 1), (1, 8), (2, 4)),
        ((2, 1), (2, 4)),
    ],
    ids=["1-2-4-1", "4-1-2", "2-2-other-cut"],
)
def test_b27_other_numbers_of_ranks_read_on_where_the_last_stopped(ranks, calm, text, runs, legs):
    """A leg is (ranks, rows of a micro-batch)."""
    folder, undisturbed = calm(1)
    name = "legs-" + "-".join(f"{size}x{rows}" for size, rows in legs)
    reads = []
    for number, (size, rows) in enumerate(legs, 1):
        stop = STEPS * number // len(legs)
        words = run_words(text, runs, name, *WORDS, f"accumulation.micro_batch_size={rows}", f"train.stop_after={stop}")
        training = ranks.train(words, size)
        assert training.code == ExitCode.DONE and saved(runs / name).step == stop
        if number > 1:
            assert f"going on from step {STEPS * (number - 1) // len(legs)}" in training.printed
            assert all(told.before == training.ranks[0].before for told in training.ranks)
        reads += training.reads
    assert reads == undisturbed.reads, "no sample twice, none missed, none in another place"
    assert_close(runs / name, folder)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("k", [1, 4, 11])
def test_b25_b45_same_number_of_ranks_goes_on_to_the_bit(ranks, calm, text, runs, size, k):
    folder, undisturbed = calm(size)
    name = f"stopped-{size}-{k}"
    first = ranks.train(run_words(text, runs, name, *WORDS, f"train.stop_after={k}"), size)
    second = ranks.train(run_words(text, runs, name, *WORDS), size)
    assert first.code == second.code == ExitCode.DONE
    assert first.reads + second.reads == undisturbed.reads
    assert_same_run(runs / name, folder)


def test_finished_run_says_so_on_every_rank(ranks, calm, text, runs):
    calm(2)
    training = ranks.train(run_words(text, runs, "calm-2", *WORDS), 2)
    assert training.code == ExitCode.DONE and "is finished" in training.printed
    assert not training.reads


def test_batch_that_the_ranks_cannot_share_is_refused_by_name(ranks, text, runs):
    training = ranks.train(run_words(text, runs, "three", *WORDS), 3)
    assert training.code == ExitCode.CONFIG
    assert "global_batch_size" in training.ranks[0].error and "3" in training.ranks[0].error
    assert not (runs / "three").exists()
