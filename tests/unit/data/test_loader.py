"""Training batches are a pure function of the sample index; validation visits everything once, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from llmtrain.config.typed_data import Packing
from llmtrain.data.loader import Batch, TokenLoader, ValidationLoader
from llmtrain.data.packing import TokenStream, pack
from llmtrain.ops.cross_entropy import IGNORE_INDEX

Maker = Callable[[Sequence[int]], TokenStream]
LENGTHS = [3 + (7 * i) % 11 for i in range(37)]
"""37 documents of 3 to 13 tokens."""


def loader(stream: TokenStream, packing: Packing = Packing.PADDED, *, length: int = 12, seed: int = 5) -> TokenLoader:
    return TokenLoader(pack(stream, packing, length), seed=seed, fingerprint="")


def first_tokens(batch: Batch) -> list[int]:
    """The first token of a row names the row: tokens of the test stream are all different."""
    return batch.tokens[:, 0].tolist()


def same(left: Batch, right: Batch) -> bool:
    pairs = [(getattr(left, name), getattr(right, name)) for name in vars(left)]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def cut(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(**{name: None if value is None else value[start:stop] for name, value in vars(batch).items()})


@pytest.mark.parametrize("packing", list(Packing))
def test_b25_any_start_continues_the_uninterrupted_stream(make_stream: Maker, packing: Packing) -> None:
    """37 documents, 2.5 epochs: a loader made anew at every k reads what the uninterrupted one reads."""
    stream = make_stream(LENGTHS)
    total = loader(stream, packing).samples_per_epoch * 5 // 2
    whole = loader(stream, packing).batch(0, total)
    for k in range(total):
        assert same(loader(stream, packing).batch(k, total - k), cut(whole, k, total))


def test_b26_epochs_after_a_late_start_are_complete(make_stream: Maker) -> None:
    """Resumed at 90 % of epoch 1: epochs 2 and 3 still hold every document once."""
    resumed = loader(make_stream(LENGTHS))
    n = resumed.samples_per_epoch
    start = n + n * 9 // 10
    rows = first_tokens(resumed.batch(start, 4 * n - start))
    rest, later = rows[: 2 * n - start], rows[2 * n - start :]
    for epoch in (later[:n], later[n:]):
        assert Counter(epoch) == Counter(range_of_rows(resumed))
    assert len(set(rest)) == len(rest)


def range_of_rows(train: TokenLoader) -> list[int]:
    return sorted(first_tokens(train.batch(0, train.samples_per_epoch)))


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_b27_ranks_and_micro_batches_only_cut_the_same_order(make_stream: Maker, ranks: int, micro_batch: int) -> None:
    """Updates of 12 samples, read by other numbers of ranks and micro-batches: one global order, no repeat, no gap."""
    stream = make_stream(LENGTHS)
    whole = first_tokens(loader(stream).batch(0, 96))
    found: list[int] = []
    for update in range(8):
        for rank in range(ranks):
            share = 12 // ranks
            first = update * 12 + rank * share
            for start in range(first, first + share, micro_batch):
                found += first_tokens(loader(stream).batch(start, min(micro_batch, first + share - start)))
    assert found == whole


def test_b29_each_epoch_everything_once_in_another_order(make_stream: Maker) -> None:
    train = loader(make_stream(LENGTHS))
    n = train.samples_per_epoch
    assert n == 37
    rows = first_tokens(train.batch(0, 3 * n))
    epochs = [tuple(rows[i * n : (i + 1) * n]) for i in range(3)]
    everything = sorted(1000 + int(offset) for offset in np.concatenate([[0], np.cumsum(LENGTHS)])[:-1])
    assert [sorted(epoch) for epoch in epochs] == [everything] * 3
    assert len(set(epochs)) == 3
    assert all(list(epoch) != everything for epoch in epochs)


def test_b29_order_is_a_function_of_seed_and_epoch(make_stream: Maker) -> None:
    stream = make_stream(LENGTHS)
    first = first_tokens(loader(stream, seed=5).batch(37, 37))
    assert first == first_tokens(loader(stream, seed=5).batch(37, 37))
    assert first != first_tokens(loader(stream, seed=6).batch(37, 37))


def test_b05_last_update_of_an_epoch_carries_on_into_the_next(make_stream: Maker) -> None:
    """5 samples, updates of 4: the second update is the fifth sample and the first three of the next epoch; none is dropped."""
    train = loader(make_stream([4, 5, 6, 7, 8]))
    assert train.samples_per_epoch == 5
    updates = [train.batch(4 * i, 4) for i in range(5)]
    assert [update.sample_index.tolist() for update in updates] == [list(range(4 * i, 4 * i + 4)) for i in range(5)]
    rows = [row for update in updates for row in first_tokens(update)]
    assert [sorted(rows[5 * e : 5 * e + 5]) for e in range(4)] == [range_of_rows(train)] * 4
    assert sum(update.num_targets for update in updates) == 4 * train._rows.num_targets


def test_one_batch_may_span_several_epochs(make_stream: Maker) -> None:
    train = loader(make_stream([4, 5]))
    assert Counter(first_tokens(train.batch(1, 8))) == {1000: 4, 1004: 4}


def test_batch_has_int64_columns_and_counts_targets(make_stream: Maker) -> None:
    batch = loader(make_stream(LENGTHS), Packing.DOCUMENT).batch(10**15, 3)
    assert {value.dtype for value in vars(batch).values()} == {torch.int64}
    assert batch.tokens.shape == batch.targets.shape == (3, 12)
    assert batch.sample_index.tolist() == [10**15, 10**15 + 1, 10**15 + 2]
    assert batch.num_targets == int((batch.targets != IGNORE_INDEX).sum())
    assert same(batch.to("cpu"), batch)
    assert batch.to("meta").tokens.device.type == "meta"


@pytest.mark.parametrize("packing", list(Packing))
def test_b53_validation_is_the_same_for_any_batch_size(make_stream: Maker, packing: Packing) -> None:
    """Every target once; the token mean of any per-token loss does not depend on how rows are grouped."""
    stream = make_stream([5, 9, 2, 14, 1, 3, 8])
    rows = pack(stream, packing, 8)
    validation = ValidationLoader(rows, sequence_length=8, fingerprint="")
    means = []
    for batch_size in (1, 3, 8, 100):
        batches = list(validation.batches(batch_size, None))
        targets = torch.cat([batch.targets.flatten() for batch in batches])
        scored = targets[targets != IGNORE_INDEX]
        assert scored.tolist() == sorted(set(scored.tolist())) and len(scored) == validation.num_targets
        means.append(sum(float((b.targets[b.targets != IGNORE_INDEX] ** 2).sum()) for b in batches) / len(scored))
    assert len(set(means)) == 1
    starts = {0} if packing is Packing.CONCAT else set(stream.offsets.tolist())
    assert validation.num_targets == len(set(range(42)) - starts)


@pytest.mark.parametrize(("max_tokens", "num_rows"), [(1, 1), (8, 1), (17, 2), (24, 3), (10**9, 6)])
def test_b53_a_limit_takes_the_same_first_rows_for_any_batch_size(make_stream: Maker, max_tokens: int, num_rows: int) -> None:
    validation = ValidationLoader(pack(make_stream([42]), Packing.CONCAT, 8), sequence_length=8, fingerprint="")
    for batch_size in (1, 2, 4, 7):
        rows = [index for batch in validation.batches(batch_size, max_tokens) for index in batch.sample_index.tolist()]
        assert rows == list(range(num_rows))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("max_tokens", "num_rows"), [(None, 6), (17, 2), (1, 1)])
def test_b53_ranks_share_the_rows_that_one_would_score(
    make_stream: Maker, num_ranks: int, max_tokens: int | None, num_rows: int
) -> None:
    """Consecutive shares, equal but for one row, and together every row once; more ranks than rows leave some with none."""
    validation = ValidationLoader(pack(make_stream([42]), Packing.CONCAT, 8), sequence_length=8, fingerprint="")
    for batch_size in (1, 3, 8):
        shares = [
            [batch.sample_index.tolist() for batch in validation.batches(batch_size, max_tokens, rank, num_ranks)]
            for rank in range(num_ranks)
        ]
        by_rank = [[row for batch in share for row in batch] for share in shares]
        assert [row for share in by_rank for row in share] == list(range(num_rows))
        assert max(map(len, by_rank)) - min(map(len, by_rank)) <= 1
        assert all(0 < len(batch) <= batch_size for share in shares for batch in share)
