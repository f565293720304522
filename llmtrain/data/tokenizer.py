"""Text to token ids and back: the tokenizer that a config, a stored description or training text asks for.

Each kind is in its own module: `tokenizer_plain` (bytes, characters, plain ids), `tokenizer_bpe` (trained here),
`tokenizer_file` (tokenizer.json), `tokenizer_tiktoken`, `tokenizer_sentencepiece`; `tokenizer_export` writes them for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed_data import (
    BpeTokenizerConfig,
    ByteTokenizerConfig,
    FileTokenizerConfig,
    LearntTokenizerConfig,
    SentencePieceTokenizerConfig,
    TiktokenTokenizerConfig,
    TokenizerConfig,
)
from llmtrain.data.tokenizer_base import Tokenizer, availability_of
from llmtrain.data.tokenizer_bpe import BpeTokenizer, train_bpe
from llmtrain.data.tokenizer_file import FileTokenizer, read_tokenizer_json
from llmtrain.data.tokenizer_plain import ByteTokenizer, CharTokenizer, IdTokenizer, train_char
from llmtrain.data.tokenizer_sentencepiece import SentencePieceTokenizer, read_sentencepiece
from llmtrain.data.tokenizer_tiktoken import TiktokenTokenizer, read_tiktoken
from llmtrain.plan.plan import Availability

__all__ = [
    "BpeTokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "FileTokenizer",
    "IdTokenizer",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "availability",
    "load_tokenizer",
    "make_tokenizer",
    "train_tokenizer",
]

_KINDS: dict[str, Any] = {
    "byte": ByteTokenizer,
    "char": CharTokenizer,
    "bpe": BpeTokenizer,
    "file": FileTokenizer,
    "tiktoken": TiktokenTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "ids": IdTokenizer,
}


def make_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer a config describes; None if it has to be learnt from text, or comes with token files.

    Raises:
        DataError: its file is missing, damaged or of another kind, or the package it needs is missing.
        ConfigError: its path lies in a home folder that is not there.
    """
    if isinstance(config, ByteTokenizerConfig):
        return ByteTokenizer()
    if isinstance(config, FileTokenizerConfig):
        return read_tokenizer_json(config.path, config.bos_token, config.eos_token)
    if isinstance(config, TiktokenTokenizerConfig):
        return read_tiktoken(config.path, config.pattern)
    if isinstance(config, SentencePieceTokenizerConfig):
        return read_sentencepiece(config.path)
    return None


def train_tokenizer(
    config: LearntTokenizerConfig,
    texts: Callable[[], Iterable[str]],
    progress: Callable[[str], None] = lambda line: None,
) -> Tokenizer:
    """Learn a tokenizer; `texts()` goes once through the training text.

    Args:
        progress: gets a line when a long stretch begins in which no text is read.

    Raises:
        DataError: the package it needs is missing.
    """
    if isinstance(config, BpeTokenizerConfig):
        return train_bpe(config.vocab_size, texts(), progress)
    return train_char(texts())


def load_tokenizer(stored: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` described.

    Raises:
        DataError: the description is of no known kind or incomplete, or the package it needs is missing.
    """
    kind = stored.get("kind")
    if kind not in _KINDS:
        raise DataError(Problem(f"a stored tokenizer of kind {kind!r}", f"this version knows {', '.join(_KINDS)}"))
    try:
        tokenizer: Tokenizer = _KINDS[kind].from_json(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(Problem(f"a stored tokenizer of kind {kind!r}", f"its description is damaged: {error!r}")) from error
    return tokenizer


def availability() -> dict[str, Availability]:
    """Which kinds can be used here, by the words of `tokenizer.kind`."""
    return {kind: availability_of(kind) for kind in _KINDS}
