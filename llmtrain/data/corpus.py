"""From the data and tokenizer sections of a config to loaders: the only function the rest of the program calls."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.schema_data import Prepare
from llmtrain.config.typed_data import (
    BpeTokenizerConfig,
    ByteTokenizerConfig,
    DataConfig,
    PrepareConfig,
    SyntheticData,
    TokenData,
    TokenizerConfig,
)
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.loader import TokenLoader, ValidationLoader
from llmtrain.data.meter import count
from llmtrain.data.packing import Rows, TokenStream, pack
from llmtrain.data.prepare import find_preparation
from llmtrain.data.prepare import prepare as prepare_tokens
from llmtrain.data.shards import describe_bad, first_places
from llmtrain.data.sources import describe_skipped
from llmtrain.data.stored_tokens import Stored, open_stored
from llmtrain.data.synthetic import TRAIN_ROWS, VALIDATION_ROWS, SyntheticRows
from llmtrain.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer

DEFAULT_PREPARE = PrepareConfig(path=None, workers=None, shard_bytes=Prepare.shard_bytes)


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
    """Bytes of validation text per scored token: loss in bits per byte = loss / ln 2 / this. NaN where the text is not known."""
    byte_frequency_bits: float | None
    """Bits per byte of validation text under the byte frequencies of training text; None where the text is not known."""
    warning: str = ""
    """What was left out of the data, with places; empty = nothing."""

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in nats per token, told in bits per byte of text; None where the text is not known."""
        return None if math.isnan(self.bytes_per_token) else loss / math.log(2) / self.bytes_per_token

    @property
    def byte_frequency_loss(self) -> float | None:
        """What guessing by byte frequency alone scores, in nats per token; None where there is no text."""
        bits = self.byte_frequency_bits
        return None if bits is None else bits * math.log(2) * self.bytes_per_token


def build_corpus(
    data: DataConfig,
    tokenizer: TokenizerConfig | Tokenizer,
    *,
    seed: int,
    vocab_size: int | None,
    progress: Callable[[str], None],
    prepare: PrepareConfig = DEFAULT_PREPARE,
) -> Corpus:
    """Find, split, tokenize (or open what was tokenized before) and pack the data a config names.

    Args:
        tokenizer: a section of the config; or a tokenizer itself, for other text in the tokens of a run.
        seed: decides the order of training samples (and the content of synthetic data).
        vocab_size: `model.vocab_size` where the user set it; the tokenizer must fit into it.
        progress: gets a line at least every two seconds while something takes long; may be called from another thread.
        prepare: how text is tokenized.

    Raises:
        ConfigError: a path in a home folder that is not there.
        DataError: no text, text that is not UTF-8, a tokenizer that does not fit or cannot be used, nothing to predict.
        StorageError: the cache folder cannot be written.
    """
    if isinstance(data.source, SyntheticData):
        return _synthetic(data, tokenizer, seed, vocab_size)
    with Heartbeat(progress) as beat:
        if isinstance(data.source, TokenData):
            stored = open_stored(data.source, tokenizer, packing=data.packing, vocab_size=vocab_size, beat=beat)
        else:
            job = find_preparation(data, tokenizer, prepare, beat)
            if isinstance(job.tokenizer, Tokenizer):  # what does not fit is told before hours of preparation
                _check_vocabulary(job.tokenizer, vocab_size)
            prepared = prepare_tokens(job, beat)
            skipped = describe_skipped(job.text.skipped) if job.text.skipped.total() else ""
            stored = replace(Stored.of(prepared), name=job.text.name, held_out=job.text.held_out, skipped=skipped)
        _check_vocabulary(stored.tokenizer, vocab_size)
        beat.status("looking for document borders")
        train, validation = _rows(stored.train, data, "training"), _rows(stored.validation, data, "validation")
    text = stored.text
    return _corpus(
        data,
        stored.tokenizer,
        (train, stored.fingerprints[0]),
        (validation, stored.fingerprints[1]),
        seed=seed,
        summary=_summary(stored),
        bytes_per_token=math.nan if text is None else text.validation_bytes / validation.num_targets,
        byte_frequency_bits=None if text is None else text.frequency_bits,
        warning=_warning(stored),
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
    warning: str = "",
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
        warning=warning,
    )


def _rows(stream: TokenStream, data: DataConfig, name: str) -> Rows:
    rows = pack(stream, data.packing, data.sequence_length)
    if rows.num_targets == 0:
        raise DataError(
            Problem(
                f"the {name} split has {len(stream.tokens)} tokens",
                f"with data.packing={data.packing.value} none of them has one before it to be predicted from",
                "give more text",
            )
        )
    return rows


def _synthetic(data: DataConfig, config: TokenizerConfig | Tokenizer, seed: int, vocab_size: int | None) -> Corpus:
    if vocab_size is None:
        if isinstance(config, Tokenizer):
            vocab_size = config.vocab_size
        elif isinstance(config, ByteTokenizerConfig):
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


def _warning(stored: Stored) -> str:
    if not stored.bad:
        return ""
    copies = f"; copies in {stored.copies}" if stored.copies else ""
    return f"{describe_bad(stored.bad)} left out, for example {first_places(stored.bad)}{copies}"


def _summary(stored: Stored) -> str:
    train, validation = count(len(stored.train.tokens)), count(len(stored.validation.tokens))
    missing = [words for words in (stored.skipped, describe_bad(stored.bad)) if words]
    return " · ".join([stored.name, f"{train} tokens train", f"{validation} validation ({stored.held_out})", *missing])
