"""Batch arithmetic: the legal table, the illegal one with its messages, and the micro-batch that `auto` picks."""

from __future__ import annotations

import pytest

from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.typed import AccumulationConfig
from llmtrain.plan.batch import largest_micro_batch, settle_batch
from llmtrain.plan.plan import Choice, MemoryForecast

MIB = 2**20


def settle(sequences=None, tokens=None, micro=None, *, length=256, ranks=1):
    asked = AccumulationConfig(sequences, tokens, micro)
    return settle_batch(asked, length, ranks, lambda per_rank: (per_rank, Choice("accumulation.micro_batch_size", "x", "y")))


def forecast(micro: int, count: int) -> MemoryForecast:
    return MemoryForecast(params=10 * MIB, grads=0, optimizer=0, activations=micro * MIB, loss=0, other=0)


@pytest.mark.parametrize(
    ("asked", "global_batch", "micro", "count"),
    [
        (dict(sequences=16, micro=16), 16, 16, 1),
        (dict(sequences=16, micro=1), 16, 1, 16),
        (dict(sequences=12, micro=4), 12, 4, 3),
        (dict(sequences=512, micro=16, ranks=4), 512, 16, 8),
        (dict(sequences=7, micro=7), 7, 7, 1),
        (dict(tokens=4096, micro=4), 16, 4, 4),
        (dict(tokens=524288, micro=32, length=1024, ranks=8), 512, 32, 2),
        (dict(sequences=24, ranks=3), 24, 8, 1),
        (dict(tokens=1024), 4, 4, 1),
    ],
)
def test_b15_legal_batches(asked, global_batch, micro, count) -> None:
    batch, choices = settle(**asked)
    assert (batch.global_batch_size, batch.micro_batch_size, batch.num_microbatches) == (global_batch, micro, count)
    assert batch.micro_batch_size * batch.num_microbatches * asked.get("ranks", 1) == batch.global_batch_size
    assert batch.tokens_per_step == global_batch * asked.get("length", 256)
    assert len(choices) == ("micro" not in asked)


@pytest.mark.parametrize(
    ("asked", "what", "rule", "cure"),
    [
        (
            dict(sequences=500, micro=16, ranks=4),
            "accumulation.global_batch_size=500",
            "divisible by micro_batch_size 16 × data ranks 4 = 64",
            "448 or 512, or accumulation.micro_batch_size=5 or 25",
        ),
        (
            dict(sequences=501, micro=16, ranks=4),
            "accumulation.global_batch_size=501",
            "divisible by micro_batch_size 16 × data ranks 4 = 64",
            "448 or 512",
        ),
        (
            dict(sequences=8, micro=3),
            "accumulation.global_batch_size=8",
            "divisible by micro_batch_size 3 × data ranks 1 = 3",
            "6 or 9, or accumulation.micro_batch_size=2 or 4",
        ),
        (
            dict(sequences=10, ranks=4),
            "accumulation.global_batch_size=10",
            "divisible by data ranks 4",
            "8 or 12, or 2 or 5 data ranks",
        ),
        (dict(sequences=3, ranks=4), "accumulation.global_batch_size=3", "divisible by data ranks 4", "4, or 3 data ranks"),
        (
            dict(tokens=1000),
            "accumulation.global_batch_tokens=1000",
            "divisible by sequence_length 256 × data ranks 1 = 256",
            "768 or 1024",
        ),
        (
            dict(tokens=4100, micro=4, ranks=2),
            "accumulation.global_batch_tokens=4100",
            "divisible by sequence_length 256 × micro_batch_size 4 × data ranks 2 = 2048",
            "4096 or 6144",
        ),
        (
            dict(sequences=16, micro=32),
            "accumulation.micro_batch_size=32",
            "at most the sequences of one rank: global_batch_size 16 / data ranks 1 = 16",
            "accumulation.micro_batch_size=16 or accumulation.global_batch_size=32",
        ),
        (
            dict(sequences=2, micro=1, ranks=4),
            "accumulation.micro_batch_size=1",
            "at most the sequences of one rank: global_batch_size 2 / data ranks 4 = 0",
            "accumulation.global_batch_size=4",
        ),
        (
            dict(tokens=2048, micro=16),
            "accumulation.micro_batch_size=16",
            "at most the sequences of one rank: global_batch_tokens 2048 / sequence_length 256 / data ranks 1 = 8",
            "accumulation.micro_batch_size=8 or accumulation.global_batch_tokens=4096",
        ),
    ],
)
def test_b15_illegal_batches_are_refused_with_the_nearest_legal_ones(asked, what, rule, cure) -> None:
    with pytest.raises(PlanError) as caught:
        settle(**asked)
    (problem,) = caught.value.problems
    assert (problem.what, problem.rule, problem.cure) == (what, rule, cure)


@pytest.mark.parametrize("micro", range(1, 10))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_b15_no_sequence_is_lost_for_any_batch(micro: int, ranks: int) -> None:
    """Every (batch, micro-batch, ranks) either keeps all its sequences or is refused, and what is proposed instead is legal."""
    for sequences in range(1, 40):
        try:
            batch, _ = settle(sequences=sequences, micro=micro, ranks=ranks)
        except PlanError as error:
            assert sequences % (micro * ranks)
            (problem,) = error.problems
            settle_proposals(problem, sequences, micro, ranks)
        else:
            assert batch.micro_batch_size * batch.num_microbatches * ranks == sequences


def settle_proposals(problem: Problem, sequences: int, micro: int, ranks: int) -> None:
    """What a message proposes: other batches, other micro-batches, other numbers of ranks."""
    if not problem.what.startswith("accumulation.global_batch_size"):
        return
    for proposal in problem.cure.split(", or ")[0].split(" or "):
        settle(sequences=int(proposal), micro=micro, ranks=ranks)
    for proposal in problem.cure.partition("micro_batch_size=")[2].partition(",")[0].split(" or "):
        settle(sequences=sequences, micro=int(proposal or 1), ranks=1)
    if problem.cure.endswith(" data ranks"):
        for proposal in problem.cure.rpartition(", or ")[2].removesuffix(" data ranks").split(" or "):
            settle(sequences=sequences, micro=micro, ranks=int(proposal))


@pytest.mark.parametrize(
    ("per_rank", "memory_mib", "micro", "reason"),
    [
        (16, 100, 16, "forecast 26.0 MiB"),
        (16, 32.5, 16, "forecast 26.0 MiB"),
        (16, 32.4, 8, "forecast 18.0 MiB; 16 needs 26.0 MiB of 25.9 MiB"),
        (12, 18, 4, "forecast 14.0 MiB; 6 needs 16.0 MiB of 14.4 MiB"),
        (7, 16, 1, "forecast 11.0 MiB; 7 needs 17.0 MiB of 12.8 MiB"),
    ],
)
def test_auto_micro_batch_is_the_largest_divisor_that_fits(per_rank, memory_mib, micro, reason) -> None:
    found = largest_micro_batch(per_rank, int(memory_mib * MIB), forecast)
    assert found == (micro, Choice("accumulation.micro_batch_size", str(micro), reason))


def test_auto_micro_batch_when_nothing_fits() -> None:
    assert largest_micro_batch(16, 13 * MIB, forecast) is None
