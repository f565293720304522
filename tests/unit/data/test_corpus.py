"""From config sections to loaders."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import (
    BpeTokenizerConfig,
    ByteTokenizerConfig,
    CharTokenizerConfig,
    DataConfig,
    Packing,
    StdlibData,
    SyntheticData,
)
from llmtrain.data import corpus as corpus_module
from llmtrain.data import units as units_module
from llmtrain.data.corpus import Corpus, build_corpus
from llmtrain.data.heartbeat import INTERVAL_SECONDS, Heartbeat
from llmtrain.data.meter import count
from llmtrain.data.sources import read_blocks, scan_source
from llmtrain.data.synthetic import SyntheticRows
from llmtrain.metrics.format import format_count

MakeFolder = Callable[[Sequence[str]], Path]
MakeConfig = Callable[..., DataConfig]
TEXTS = [f"document {i}\nwith {i} in it\n" * (1 + i % 3) for i in range(24)]


def build(data: DataConfig, tokenizer: Any = ByteTokenizerConfig(), *, seed: int = 0, vocab_size: int | None = None) -> Corpus:
    return build_corpus(data, tokenizer, seed=seed, vocab_size=vocab_size, progress=lambda line: None)


def synthetic(packing: Packing = Packing.CONCAT) -> DataConfig:
    return DataConfig(SyntheticData(), 16, packing, None, True)


@pytest.mark.parametrize("tokenizer", [ByteTokenizerConfig(), CharTokenizerConfig(), BpeTokenizerConfig(280)])
@pytest.mark.parametrize("packing", list(Packing))
def test_text_comes_out_of_the_loader(
    make_folder: MakeFolder, data_config: MakeConfig, tokenizer: Any, packing: Packing
) -> None:
    """Validation rows in order decode to the validation documents in order; a padded training row to one training document."""
    data = data_config(make_folder(TEXTS), packing=packing, sequence_length=200)
    found = scan_source(data.source)  # type: ignore[arg-type]
    corpus = build(data, tokenizer)
    (batch,) = corpus.validation.batches(100)
    real = slice(None) if packing is not Packing.PADDED else batch.document_ids == 0
    decoded = corpus.tokenizer.decode(batch.tokens[real].flatten().tolist())
    assert decoded.startswith("".join(text for document in found.validation for text in read_blocks(document)))
    assert (batch.positions is None) == (packing is Packing.CONCAT)
    if packing is Packing.PADDED:
        epoch = corpus.train.batch(0, corpus.train.samples_per_epoch)
        rows = [row[ids == 0].tolist() for row, ids in zip(epoch.tokens, epoch.document_ids)]
        texts = ["".join(read_blocks(document)) for document in found.train]
        assert sorted(map(corpus.tokenizer.decode, rows)) == sorted(texts)


def test_fingerprint_covers_what_is_read_but_not_the_seed(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    folder = make_folder(TEXTS)
    data = data_config(folder)
    base = build(data)
    assert build(data, seed=1).fingerprint == base.fingerprint
    assert build(data, seed=1).train.fingerprint == base.train.fingerprint
    others = [
        build(replace(data, sequence_length=17)),
        build(replace(data, packing=Packing.DOCUMENT)),
        build(replace(data, eos=False)),
        build(data, CharTokenizerConfig()),
        build(data_config(folder, fraction=0.5)),
    ]
    prints = [base.train.fingerprint, base.validation.fingerprint, *(other.train.fingerprint for other in others)]
    assert len(set(prints)) == len(prints)
    (folder / "0003.txt").write_text("document three\n")
    others.append(build(data))
    assert len({corpus.fingerprint for corpus in (base, *others)}) == 1 + len(others)


def test_bits_per_byte(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    """Training bytes are half a, a quarter b, a quarter newline; the counts have one added to each of the 256."""
    folder = make_folder(["aab\n" * 300])
    corpus = build(data_config(folder, fraction=0.25, eos=False))
    total = 4 * 225 + 256  # 75 of 300 lines are held out
    common, rare = -math.log2((2 * 225 + 1) / total), -math.log2((225 + 1) / total)
    assert corpus.byte_frequency_bits == pytest.approx(0.5 * common + 0.5 * rare)
    # 300 bytes, BOS in front: 301 tokens, 300 of them targets.
    assert corpus.bytes_per_token == 1.0


def test_bytes_per_token_counts_scored_tokens(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(TEXTS), packing=Packing.DOCUMENT)
    corpus = build(data, BpeTokenizerConfig(290))
    targets = sum(batch.num_targets for batch in corpus.validation.batches(4))
    held_out = scan_source(data.source).validation  # type: ignore[arg-type]
    assert corpus.bytes_per_token == pytest.approx(sum(d.stop - d.start for d in held_out) / targets)


def test_summary_is_one_line(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    folder = make_folder(["line of text\n" * 1000])
    (folder / "empty").write_text("")
    summary = build(data_config(folder, fraction=0.1)).summary
    assert summary == "texts · 11.7k tokens train · 1.3k validation (the tail of the file held out) · 1 file skipped (1 empty)"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (845, "845"),
        (12_345, "12.3k"),
        (490_000, "490k"),
        (9_812_345, "9.81M"),
        (999_999_999, "1B"),
        (2 * 10**12, "2T"),
    ],
)
def test_counts_have_the_form_of_all_counts_of_a_run(number: int, text: str) -> None:
    assert count(number) == text == format_count(number)
    for near in (number - 1, number + 1, 10 * number + 9):
        assert count(near) == format_count(near)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(TEXTS))
    with pytest.raises(DataError, match="model.vocab_size=257") as caught:
        build(data, vocab_size=257)
    assert "258" in str(caught.value)
    assert build(data, vocab_size=258).tokenizer.vocab_size == 258
    assert build(data, vocab_size=512).tokenizer.vocab_size == 258


def test_a_split_with_nothing_to_predict_is_refused(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(["ab"]), fraction=0.5, packing=Packing.PADDED, bos=False, eos=False)
    with pytest.raises(DataError, match="the training split has 1 tokens"):
        build(data)


@pytest.mark.parametrize("packing", list(Packing))
def test_synthetic_is_a_function_of_seed_split_and_sample(packing: Packing) -> None:
    corpus, again = build(synthetic(packing)), build(synthetic(packing))
    batch = corpus.train.batch(100, 8)
    assert torch.equal(batch.tokens[3:5], again.train.batch(103, 2).tokens)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert not torch.equal(batch.tokens, build(synthetic(packing), seed=1).train.batch(100, 8).tokens)
    assert corpus.byte_frequency_bits is None and math.isnan(corpus.bytes_per_token)
    if packing is Packing.CONCAT:
        assert batch.positions is None and batch.document_ids is None
    else:
        assert batch.positions is not None and batch.document_ids is not None
        assert batch.positions.tolist() == [list(range(16))] * 8 and not batch.document_ids.any()


def test_synthetic_splits_differ() -> None:
    train, validation = (
        SyntheticRows(split, num_rows=64, vocab_size=258, sequence_length=16, packing=Packing.CONCAT, seed=0).read(
            np.arange(64)
        )
        for split in ("train", "validation")
    )
    assert not (train.tokens == validation.tokens).all(axis=1).any()


def test_synthetic_ids_are_uniform_over_the_vocabulary() -> None:
    corpus = build(synthetic(), vocab_size=50)
    counts = torch.bincount(corpus.train.batch(0, 2000).tokens.flatten(), minlength=50)
    assert len(counts) == 50 and abs(float(((counts - 640) ** 2 / 640).sum()) - 49) < 5 * math.sqrt(98)


def test_synthetic_vocabulary() -> None:
    assert build(synthetic()).tokenizer.vocab_size == 258
    assert build(synthetic(), BpeTokenizerConfig(4096)).tokenizer.vocab_size == 4096
    assert build(synthetic(), CharTokenizerConfig(), vocab_size=90).tokenizer.vocab_size == 90
    with pytest.raises(DataError, match="tokenizer=char with data=synthetic"):
        build(synthetic(), CharTokenizerConfig())


def test_synthetic_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build(synthetic())
    assert list(tmp_path.iterdir()) == []


def test_default_data_is_ready(tmp_path: Path) -> None:
    corpus = build(DataConfig(StdlibData(0.05, str(tmp_path)), 256, Packing.CONCAT, None, True))
    assert corpus.summary.startswith("Python's own library · ") and corpus.summary.endswith("(whole modules held out)")
    assert corpus.train.batch(0, 2).tokens.shape == (2, 256)
    assert corpus.byte_frequency_bits is not None and 4 < corpus.byte_frequency_bits < 6


def test_progress_speaks_during_one_long_call(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan blocks until something was said: without a voice of its own the preparation would hang here."""
    spoken = threading.Event()

    def slow_scan(source: Any) -> Any:
        assert spoken.wait(timeout=30)
        return scan_source(source)

    monkeypatch.setattr(units_module, "scan_source", slow_scan)
    monkeypatch.setattr(corpus_module, "Heartbeat", lambda progress: Heartbeat(progress, interval_seconds=0.01))
    build_corpus(
        data_config(make_folder(TEXTS)), ByteTokenizerConfig(), seed=0, vocab_size=None, progress=lambda line: spoken.set()
    )
    assert INTERVAL_SECONDS <= 2
