"""From the data and tokenizer sections of a config to loaders: the only function the rest of the program calls."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed import (
    BpeTokenizerConfig,
    ByteTokenizerConfig,
    DataConfig,
    SyntheticData,
    TokenizerConfig,
)
from llmtrain.data.formats import Prepared, PreparedSplit
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.loader import TokenLoader, ValidationLoader
from llmtrain.data.packing import Rows, pack
from llmtrain.data.prepare import cache_folder, prepare
from llmtrain.data.sources import Scan, describe_skipped, scan_source
from llmtrain.data.synthetic import TRAIN_ROWS, VALIDATION_ROWS, SyntheticRows
from llmtrain.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer


@dataclass(frozen=True)
class Corpus:
    """Data of a run, ready to be read."""

    tokenizer: Tokenizer
    train: TokenLoader
    validation: ValidationLoader
    summary: str
    """One line for the run card."""
    fingerprint: str
    """Hash of everything that decides which tokens are read, but the seed."""
    bytes_per_token: float
    """Bytes of validation text per scored token: loss in bits per byte = loss / ln 2 / this. NaN where there is no text."""
    byte_frequency_bits: float | None
    """Bits per byte of validation text under the byte frequencies of training text; None where there is no text."""

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in nats per token, told in bits per byte of text; None where there is no text."""
        return None if self.byte_frequency_bits is None else loss / math.log(2) / self.bytes_per_token

    @property
    def byte_frequency_loss(self) -> float | None:
        """What guessing by byte frequency alone scores, in nats per token; None where there is no text."""
        bits = self.byte_frequency_bits
        return None if bits is None else bits * math.log(2) * self.bytes_per_token


def build_corpus(
    data: DataConfig, tokenizer: TokenizerConfig, *, seed: int, vocab_size: int | None, progress: Callable[[str], None]
) -> Corpus:
    """Find, split, tokenize (or open what was tokenized before) and pack the text a config names.

    Args:
        seed: decides the order of training samples (and the content of synthetic data).
        vocab_size: `model.vocab_size` where the user set it; the tokenizer must fit into it.
        progress: gets a line at least every two seconds while something takes long; may be called from another thread.

    Raises:
        ConfigError: a path in a home folder that is not there.
        DataError: no text, text that is not UTF-8, a tokenizer that does not fit or cannot be used, nothing to predict.
        StorageError: the cache folder cannot be written.
    """
    if isinstance(data.source, SyntheticData):
        return _synthetic(data, tokenizer, seed, vocab_size)
    with Heartbeat(progress) as beat:
        beat.status("reading the text")
        scan = scan_source(data.source)
        prepared = prepare(scan, data, tokenizer, cache_folder(data.source.cache_dir), beat)
    _check_vocabulary(prepared.tokenizer, vocab_size)
    train, validation = _rows(prepared.train, data, "training"), _rows(prepared.validation, data, "validation")
    return _corpus(
        data,
        prepared.tokenizer,
        (train, prepared.train.sha256),
        (validation, prepared.validation.sha256),
        seed=seed,
        summary=_summary(scan, prepared),
        bytes_per_token=prepared.validation.source_bytes / validation.num_targets,
        byte_frequency_bits=_byte_frequency_bits(prepared),
    )


def _corpus(
    data: DataConfig,
    tokenizer: Tokenizer,
    train: tuple[Rows, str],
    validation: tuple[Rows, str],
    *,
    seed: int,
    summary: str,
    bytes_per_token: float,
    byte_frequency_bits: float | None,
) -> Corpus:
    """Loaders over rows; `train` and `validation` are rows and the hash of their content."""

    def fingerprint(split: str, content: str) -> str:
        parts = [split, content, tokenizer.fingerprint, data.packing.value, data.sequence_length]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    train_loader = TokenLoader(train[0], seed=seed, fingerprint=fingerprint("train", train[1]))
    validation_loader = ValidationLoader(
        validation[0], sequence_length=data.sequence_length, fingerprint=fingerprint("validation", validation[1])
    )
    both = f"{train_loader.fingerprint}/{validation_loader.fingerprint}"
    return Corpus(
        tokenizer=tokenizer,
        train=train_loader,
        validation=validation_loader,
        summary=summary,
        fingerprint=hashlib.sha256(both.encode()).hexdigest(),
        bytes_per_token=bytes_per_token,
        byte_frequency_bits=byte_frequency_bits,
    )


def _rows(split: PreparedSplit, data: DataConfig, name: str) -> Rows:
    rows = pack(split.stream, data.packing, data.sequence_length)
    if rows.num_targets == 0:
        raise DataError(
            Problem(
                f"the {name} split has {len(split.stream.tokens)} tokens",
                f"with data.packing={data.packing.value} none of them has one before it to be predicted from",
                "give more text",
            )
        )
    return rows


def _synthetic(data: DataConfig, config: TokenizerConfig, seed: int, vocab_size: int | None) -> Corpus:
    if vocab_size is None:
        if isinstance(config, ByteTokenizerConfig):
            vocab_size = ByteTokenizer().vocab_size
        elif isinstance(config, BpeTokenizerConfig):
            vocab_size = config.vocab_size
        else:
            rule = "a character vocabulary is learnt from text, and synthetic data has none"
            raise DataError(Problem("tokenizer=char with data=synthetic", rule, "model.vocab_size=258, or tokenizer=byte"))
    tokenizer = IdTokenizer(vocab_size)

    def rows(split: str, num_rows: int) -> tuple[Rows, str]:
        made = SyntheticRows(
            split,
            num_rows=num_rows,
            vocab_size=vocab_size,
            sequence_length=data.sequence_length,
            packing=data.packing,
            seed=seed,
        )
        return made, "synthetic"

    return _corpus(
        data,
        tokenizer,
        rows("train", TRAIN_ROWS),
        rows("validation", VALIDATION_ROWS),
        seed=seed,
        summary=f"synthetic · random tokens of {vocab_size:,} ids, nothing to learn",
        bytes_per_token=math.nan,
        byte_frequency_bits=None,
    )


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            Problem(
                f"model.vocab_size={vocab_size}",
                f"the tokenizer has {tokenizer.vocab_size} ids, and every one needs a row of the embedding",
                f"model.vocab_size=auto, or at least {tokenizer.vocab_size}",
            )
        )


def _byte_frequency_bits(prepared: Prepared) -> float:
    """Cross-entropy in bits of validation bytes under training byte frequencies; 1 is added to each count."""
    train = np.array(prepared.train.byte_counts, dtype=np.float64) + 1
    validation = np.array(prepared.validation.byte_counts, dtype=np.float64)
    return float(-(validation * np.log2(train / train.sum())).sum() / validation.sum())


def _summary(scan: Scan, prepared: Prepared) -> str:
    train, validation = len(prepared.train.stream.tokens), len(prepared.validation.stream.tokens)
    parts = [scan.name, f"{_count(train)} tokens train", f"{_count(validation)} validation ({scan.held_out})"]
    if scan.skipped.total():
        parts.append(describe_skipped(scan.skipped))
    return " · ".join(parts)


def _count(number: int) -> str:
    """At most three digits: `845`, `12.3k`, `9.81M`, `1.2B`; the form in which all other counts of a run are shown."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # Rounded to three digits, so that 999,999 is not 1000k.
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{suffix}"
    return str(number)
