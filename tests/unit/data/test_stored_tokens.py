"""data=tokens as a corpus: prepared folders with their tokenizer, files of other programs with one that is named or with none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import ConfigError, DataError
from llmtrain.config.typed_data import (
    BpeTokenizerConfig,
    ByteTokenizerConfig,
    DataConfig,
    IdTokenizerConfig,
    OnBad,
    Packing,
    PrepareConfig,
    StoredTokenizerConfig,
    TokenData,
    TokenFormat,
)
from llmtrain.data import stored_tokens as stored_module
from llmtrain.data.corpus import Corpus, build_corpus
from llmtrain.data.stored_tokens import decoded_text
from llmtrain.data.token_array import TokenArray
from llmtrain.data.tokenizer import BpeTokenizer, ByteTokenizer, IdTokenizer, train_tokenizer

MakeRecords = Callable[..., Path]
MakeConfig = Callable[..., DataConfig]
TEXTS = [f"document {i}\nwith {i} in it, é\n" * (1 + i % 3) for i in range(60)]


def build(
    data: DataConfig, tokenizer: Any = StoredTokenizerConfig(), *, vocab_size: int | None = None, path: Path | None = None
) -> Corpus:
    prepare = PrepareConfig(None if path is None else str(path), None, 1 << 10)
    return build_corpus(data, tokenizer, seed=0, vocab_size=vocab_size, progress=lambda line: None, prepare=prepare)


def tokens(path: Path, layout: TokenFormat = TokenFormat.AUTO, validation: Path | None = None, **form: Any) -> DataConfig:
    source = TokenData(str(path), None if validation is None else str(validation), None, layout, None)
    return replace(DataConfig(source, 16, Packing.CONCAT, None, True), **form)


@pytest.mark.parametrize("layout", [TokenFormat.AUTO, TokenFormat.PREPARED])
@pytest.mark.parametrize("packing", list(Packing))
def test_a_prepared_folder_is_the_text_it_was_made_of(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path, layout: TokenFormat, packing: Packing
) -> None:
    data = data_config(make_records([*TEXTS, "raw:{}"]), packing=packing, on_bad=OnBad.SKIP)
    made = build(data, BpeTokenizerConfig(280), path=tmp_path / "folder")
    read = build(tokens(tmp_path / "folder", layout, packing=packing))
    assert read.fingerprint == made.fingerprint and read.summary == made.summary and "1 bad record" in read.summary
    assert isinstance(read.tokenizer, BpeTokenizer) and read.tokenizer.fingerprint == made.tokenizer.fingerprint
    assert (read.bytes_per_token, read.byte_frequency_bits) == (made.bytes_per_token, made.byte_frequency_bits)
    assert read.train.batch(3, 4).tokens.equal(made.train.batch(3, 4).tokens)


def test_b32_another_tokenizer_than_that_of_the_folder_is_refused(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path
) -> None:
    made = build(data_config(make_records(TEXTS)), ByteTokenizerConfig(), path=tmp_path / "folder")
    data = tokens(tmp_path / "folder")
    assert build(data, ByteTokenizerConfig()).fingerprint == build(data, ByteTokenizer()).fingerprint == made.fingerprint
    for other in (IdTokenizerConfig(None), train_tokenizer(BpeTokenizerConfig(280), lambda: TEXTS)):
        with pytest.raises(DataError, match="prepared with another one") as caught:
            build(data, other, vocab_size=400)
        assert "tokenizer=auto" in caught.value.problems[0].cure
    with pytest.raises(DataError, match="model.vocab_size=257"):
        build(data, vocab_size=257)


def test_a_path_for_validation_takes_all_of_both_folders(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path
) -> None:
    made = [
        build(data_config(make_records(texts, name=f"{name}.jsonl")), ByteTokenizerConfig(), path=tmp_path / name)
        for name, texts in (("a", TEXTS), ("b", [text.upper() for text in TEXTS]))
    ]
    both = build(tokens(tmp_path / "a", validation=tmp_path / "b", packing=Packing.DOCUMENT))
    assert both.validation.num_targets == sum(len(text.upper().encode()) + 1 for text in TEXTS)
    ids = [list(batch.tokens[batch.document_ids >= 0]) for batch in both.validation.batches(10_000)]
    text = both.tokenizer.decode(int(token) for part in ids for token in part)
    assert sorted(text.lower().split("document")) == sorted("".join(TEXTS).split("document"))
    assert both.fingerprint not in {corpus.fingerprint for corpus in made}
    assert "all of data.validation_path" in both.summary
    whole = build(tokens(tmp_path / "a", validation=tmp_path / "a"))
    assert whole.validation.num_targets == sum(len(text.encode()) + 2 for text in TEXTS) - 1
    build(data_config(make_records(TEXTS)), BpeTokenizerConfig(280), path=tmp_path / "c")
    with pytest.raises(DataError, match="another tokenizer than those"):
        build(tokens(tmp_path / "a", validation=tmp_path / "c"))


@pytest.mark.parametrize(("name", "value"), [("validation_fraction", 0.2), ("dtype", "uint32")])
def test_settings_a_folder_has_no_use_for_are_refused(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path, name: str, value: Any
) -> None:
    build(data_config(make_records(TEXTS)), ByteTokenizerConfig(), path=tmp_path / "folder")
    data = tokens(tmp_path / "folder")
    with pytest.raises(ConfigError, match=f"data.{name}={value}"):
        build(replace(data, source=replace(data.source, **{name: value})))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Token files as nanoGPT has them: ids of byte text, documents ended by 257."""
    for name, texts in (("train", TEXTS[10:]), ("val", TEXTS[:10])):
        ids = [token for text in texts for token in [*text.encode(), 257]]
        np.array(ids, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


def test_plain_ids_need_to_know_how_many_there_are(raw: Path) -> None:
    with pytest.raises(DataError, match="how many ids") as caught:
        build(tokens(raw, TokenFormat.RAW))
    assert "model.vocab_size=50257" in caught.value.problems[0].cure
    corpus = build(tokens(raw, TokenFormat.RAW), vocab_size=258)
    assert isinstance(corpus.tokenizer, IdTokenizer) and corpus.tokenizer.eos_id is None
    assert math.isnan(corpus.bytes_per_token) and corpus.bits_per_byte(1.0) is None and corpus.byte_frequency_loss is None


def test_with_a_tokenizer_that_knows_text_losses_are_told_in_bits_per_byte(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = build(tokens(raw, TokenFormat.RAW), ByteTokenizerConfig())
    text = "".join(TEXTS[:10]).encode()
    assert corpus.bytes_per_token == len(text) / corpus.validation.num_targets
    counts = np.bincount(np.frombuffer("".join(TEXTS[10:]).encode(), np.uint8), minlength=256) + 1
    expected = -sum(math.log2(counts[byte] / counts.sum()) for byte in text) / len(text)
    assert corpus.byte_frequency_bits == pytest.approx(expected)
    monkeypatch.setattr(stored_module, "MOST_DECODED_TOKENS", 100)
    assert build(tokens(raw, TokenFormat.RAW), ByteTokenizerConfig()).bits_per_byte(1.0) is None


def test_packing_by_documents_needs_documents(raw: Path) -> None:
    for packing in (Packing.DOCUMENT, Packing.PADDED):
        data = tokens(raw, TokenFormat.RAW, packing=packing)
        with pytest.raises(DataError, match=f"data.packing={packing}") as caught:
            build(data, vocab_size=258)
        assert "tokenizer.eos_id=50256" in caught.value.problems[0].cure
        with pytest.raises(DataError, match="token 0, which ends one"):
            build(data, IdTokenizerConfig(0), vocab_size=258)
        corpus = build(data, IdTokenizerConfig(257), vocab_size=258)
        assert corpus.validation.num_targets == sum(len(text.encode()) for text in TEXTS[:10])
        assert build(data, ByteTokenizerConfig()).validation.num_targets == corpus.validation.num_targets


def test_other_text_in_the_tokens_of_a_run(make_records: MakeRecords, data_config: MakeConfig) -> None:
    """A tokenizer in place of its config: used as it is, nothing is learnt."""
    tokenizer = train_tokenizer(BpeTokenizerConfig(280), lambda: TEXTS)
    corpus = build(data_config(make_records([text.upper() for text in TEXTS])), tokenizer)
    assert corpus.tokenizer.fingerprint == tokenizer.fingerprint
    (batch,) = corpus.validation.batches(10_000)
    assert "DOCUMENT" in corpus.tokenizer.decode(batch.tokens.flatten().tolist())


@given(text=st.text(alphabet="aé日😀 ", max_size=60), block=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_text_of_blocks_is_the_text(text: str, block: int) -> None:
    """Blocks end between characters, so every byte is counted once."""
    array = TokenArray([np.frombuffer(text.encode(), dtype=np.uint8)])
    block = max(block, 4)
    assert "".join(decoded_text(array, ByteTokenizer(), len(array), block)) == text
