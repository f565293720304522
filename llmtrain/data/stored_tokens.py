"""`data=tokens`: folders that `llmtrain prepare` made, and the token files of other programs, as the two splits of a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import ConfigError, DataError, Problem
from llmtrain.config.paths import user_path
from llmtrain.config.typed_data import (
    IdTokenizerConfig,
    Packing,
    StoredTokenizerConfig,
    TokenData,
    TokenFormat,
    TokenizerConfig,
)
from llmtrain.data.formats import BAD_RECORDS, Prepared, PreparedSplit, is_prepared, open_prepared
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.packing import TokenStream
from llmtrain.data.sources import VALIDATION_PATH
from llmtrain.data.token_array import TokenArray
from llmtrain.data.token_files import open_token_files
from llmtrain.data.tokenizer import IdTokenizer, Tokenizer, make_tokenizer

MOST_DECODED_TOKENS = 25_000_000
"""A longer validation split is not turned back into text: its bytes stay unknown."""
FREQUENCY_TOKENS = 1 << 20
"""Training tokens whose text gives the byte frequencies to compare with."""
_BLOCK_TOKENS = 1 << 18
_HELD_BACK = 16
"""A character has at most four bytes, so a block need not give back more tokens than this to end between two."""


@dataclass(frozen=True)
class TextBytes:
    """What is known of the text behind tokens."""

    train_counts: NDArray[np.int64]
    """[256] how often each byte value occurs."""
    validation_counts: NDArray[np.int64]

    @property
    def validation_bytes(self) -> int:
        """UTF-8 bytes of the validation text."""
        return int(self.validation_counts.sum())

    @property
    def frequency_bits(self) -> float:
        """Cross-entropy in bits of validation bytes under training byte frequencies; 1 is added to each count."""
        train = self.train_counts.astype(np.float64) + 1
        return float(-(self.validation_counts * np.log2(train / train.sum())).sum() / self.validation_bytes)


@dataclass(frozen=True)
class Stored:
    """Tokens of both splits, opened."""

    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream
    fingerprints: tuple[str, str]
    """Of the content of each split."""
    name: str
    held_out: str
    """How validation was chosen, in words."""
    text: TextBytes | None
    """None = it cannot be told from the tokens."""
    bad: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Reason -> count of records that were no documents."""
    skipped: str = ""
    """Files that were left out, in words."""
    copies: Path | None = None
    """Copies of the records that were no documents, where they were kept."""

    @classmethod
    def of(cls, prepared: Prepared) -> Stored:
        """A prepared folder."""
        return cls._join(prepared, [prepared.train], [prepared.validation], prepared.held_out)

    @classmethod
    def apart(cls, train: Prepared, validation: Prepared) -> Stored:
        """All of one folder for training and all of another for validation."""
        sides = ([folder.train, folder.validation] for folder in (train, validation))
        return cls._join(train, *sides, VALIDATION_PATH)

    @classmethod
    def _join(cls, prepared: Prepared, train: list[PreparedSplit], validation: list[PreparedSplit], held_out: str) -> Stored:
        return cls(
            tokenizer=prepared.tokenizer,
            train=_stream(train),
            validation=_stream(validation),
            fingerprints=("/".join(split.sha256 for split in train), "/".join(split.sha256 for split in validation)),
            name=prepared.name,
            held_out=held_out,
            text=TextBytes(_byte_counts(train), _byte_counts(validation)),
            bad=prepared.bad,
            copies=found if (found := prepared.folder / BAD_RECORDS).exists() else None,
        )


def open_stored(
    source: TokenData, tokenizer: TokenizerConfig | Tokenizer, *, packing: Packing, vocab_size: int | None, beat: Heartbeat
) -> Stored:
    """Open the tokens a config names.

    Args:
        packing: `document` and `padded` need document borders.
        tokenizer: the section of the config or a tokenizer; a prepared folder has its own, which has to be the same.
        vocab_size: `model.vocab_size`; needed where nothing else says how many ids there are.

    Raises:
        ConfigError: a setting that the folder has no use for, a path in a home folder that is not there.
        DataError: damaged files, ids outside the vocabulary, another tokenizer than the one that made them, no document borders where
            they are needed.
    """
    folder = user_path(source.path, f"data.path={source.path}")
    if source.format is TokenFormat.PREPARED or (source.format is TokenFormat.AUTO and is_prepared(folder)):
        return _open_folder(source, folder, tokenizer, beat)
    stored = _open_files(source, tokenizer, vocab_size, beat)
    if packing is not Packing.CONCAT:
        _check_borders(stored, packing)
    return stored


def _open_folder(source: TokenData, folder: Path, config: TokenizerConfig | Tokenizer, beat: Heartbeat) -> Stored:
    _check_settings(source, folder)
    prepared = open_prepared(folder, None, beat.status)
    prepared = replace(prepared, tokenizer=_checked_tokenizer(prepared, config))
    if source.validation_path is None:
        return Stored.of(prepared)
    setting = f"data.validation_path={source.validation_path}"
    held_out_folder = user_path(source.validation_path, setting)
    held_out = prepared if held_out_folder == folder else open_prepared(held_out_folder, None, beat.status)
    if held_out.tokenizer.fingerprint != prepared.tokenizer.fingerprint:
        rule = f"its tokens were made with another tokenizer than those of {folder}"
        raise DataError(Problem(setting, rule, "prepare its text with the same tokenizer"))
    return Stored.apart(prepared, held_out)


def _check_settings(source: TokenData, folder: Path) -> None:
    """Raise ConfigError for settings that a prepared folder has no use for."""
    if source.validation_fraction is not None:
        rule = f"{folder} was split when it was prepared"
        cure = "leave it out, or data.validation_path=OTHER_FOLDER"
        raise ConfigError(Problem(f"data.validation_fraction={source.validation_fraction:g}", rule, cure))
    if source.dtype is not None:
        raise ConfigError(Problem(f"data.dtype={source.dtype}", f"{folder} says itself how ids are stored", "leave it out"))


def _checked_tokenizer(prepared: Prepared, config: TokenizerConfig | Tokenizer) -> Tokenizer:
    """The tokenizer that is asked for, which may decode in another way; DataError if its ids are not those of the folder."""
    if isinstance(config, StoredTokenizerConfig):
        return prepared.tokenizer
    asked = config if isinstance(config, Tokenizer) else make_tokenizer(config)
    if asked is None or asked.fingerprint != prepared.tokenizer.fingerprint:
        kind = "the tokenizer of the run" if isinstance(config, Tokenizer) else f"tokenizer={config.kind}"
        rule = f"{prepared.folder} was prepared with another one: its ids would stand for other text"
        raise DataError(Problem(kind, rule, "tokenizer=auto takes the one that comes with the folder"))
    return asked


def _open_files(source: TokenData, config: TokenizerConfig | Tokenizer, vocab_size: int | None, beat: Heartbeat) -> Stored:
    tokenizer = _tokenizer_of_files(config, vocab_size)
    eos_id = None if isinstance(config, StoredTokenizerConfig) else tokenizer.eos_id
    files = open_token_files(source, vocab_size=tokenizer.vocab_size, eos_id=eos_id, progress=beat.status)
    text = None
    if not isinstance(tokenizer, IdTokenizer):
        text = _decoded(files.train.tokens, files.validation.tokens, tokenizer, beat)
    return Stored(tokenizer, files.train, files.validation, files.fingerprints, files.name, files.held_out, text)


def _check_borders(stored: Stored, packing: Packing) -> None:
    """Raise DataError if nothing tells the documents of token files apart."""
    if len(stored.train.offsets) > 2:
        return
    eos_id = stored.tokenizer.eos_id
    why = "these files do not mark their ends" if eos_id is None else f"token {eos_id}, which ends one, is not in these files"
    cure = "tokenizer=ids with tokenizer.eos_id=50256 for tokens of GPT-2, or data.packing=concat"
    raise DataError(Problem(f"data.packing={packing.value}", f"keeps documents apart, and {why}", cure))


def _tokenizer_of_files(config: TokenizerConfig | Tokenizer, vocab_size: int | None) -> Tokenizer:
    known = config if isinstance(config, Tokenizer) else make_tokenizer(config)
    if known is not None:
        return known
    if vocab_size is None:
        rule = "token files do not say how many ids there are, and tokenizer=auto has nothing else to go by"
        cure = "model.vocab_size=50257 for those of GPT-2; or tokenizer=file with tokenizer.path=tokenizer.json"
        raise DataError(Problem("data=tokens", rule, cure))
    return IdTokenizer(vocab_size, config.eos_id if isinstance(config, IdTokenizerConfig) else None)


def _stream(splits: list[PreparedSplit]) -> TokenStream:
    """The tokens of splits, one after another."""

    def offsets() -> NDArray[np.int64]:
        borders = np.empty(sum(split.documents for split in splits) + 1, np.int64)
        filled, base = 0, 0
        for split in splits:
            np.add(split.offsets(), base, out=borders[filled : filled + split.documents + 1])
            filled, base = filled + split.documents, base + len(split.tokens)
        return borders

    return TokenStream(TokenArray([part for split in splits for part in split.parts]), offsets)


def _byte_counts(splits: list[PreparedSplit]) -> NDArray[np.int64]:
    return np.sum([np.array(split.byte_counts, dtype=np.int64) for split in splits], axis=0)


def _decoded(train: TokenArray, validation: TokenArray, tokenizer: Tokenizer, beat: Heartbeat) -> TextBytes | None:
    if len(validation) > MOST_DECODED_TOKENS:
        return None
    beat.status("turning the validation tokens back into text, to count its bytes")
    counts = _decoded_bytes(validation, tokenizer, len(validation))
    return TextBytes(_decoded_bytes(train, tokenizer, FREQUENCY_TOKENS), counts) if counts.any() else None


def _decoded_bytes(tokens: TokenArray, tokenizer: Tokenizer, most: int) -> NDArray[np.int64]:
    """How often each byte value occurs in the text of the first `most` tokens."""
    counts = np.zeros(256, dtype=np.int64)
    for text in decoded_text(tokens, tokenizer, most):
        counts += np.bincount(np.frombuffer(text.encode(), dtype=np.uint8), minlength=256)
    return counts


def decoded_text(tokens: TokenArray, tokenizer: Tokenizer, most: int, block_tokens: int = _BLOCK_TOKENS) -> Iterator[str]:
    """The text of the first `most` tokens in pieces; none ends within a character, unless the tokens make no whole one."""
    stop = min(most, len(tokens))
    start = 0
    while start < stop:
        ids = tokens.read_range(start, min(start + block_tokens, stop)).tolist()
        end, text = len(ids), tokenizer.decode(ids)
        if start + end < stop:
            for shorter in range(len(ids), max(0, len(ids) - _HELD_BACK), -1):
                if not (tried := tokenizer.decode(ids[:shorter])).endswith("\N{REPLACEMENT CHARACTER}"):
                    end, text = shorter, tried
                    break
        yield text
        start += end
