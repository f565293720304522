"""The frozen form of what a run reads: data, tokenizer, and how text becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


class Packing(StrEnum):
    CONCAT = "concat"
    DOCUMENT = "document"
    PADDED = "padded"


class OnBad(StrEnum):
    """What to do with a record that is no document."""

    ERROR = "error"
    SKIP = "skip"
    QUARANTINE = "quarantine"


class TokenFormat(StrEnum):
    """Layout of token files."""

    AUTO = "auto"
    PREPARED = "prepared"
    RAW = "raw"
    LLM_C = "llm_c"
    MEGATRON = "megatron"
    DATATROVE = "datatrove"


@dataclass(frozen=True)
class StdlibData:
    validation_fraction: float
    cache_dir: str | None


@dataclass(frozen=True)
class TextData:
    path: str
    validation_path: str | None
    validation_fraction: float
    cache_dir: str | None


@dataclass(frozen=True)
class RecordData:
    """Files that hold many documents each."""

    kind: Literal["jsonl", "parquet"]
    path: str
    validation_path: str | None
    validation_fraction: float
    cache_dir: str | None
    text_field: str
    on_bad: OnBad
    max_document_bytes: int


@dataclass(frozen=True)
class TokenData:
    """Files of token ids."""

    path: str
    validation_path: str | None
    validation_fraction: float | None
    """None = not said: the default where the end of the files is held out."""
    format: TokenFormat
    dtype: str | None
    """Of raw files, e.g. `uint32`. None = not said: the default of raw files; the others say it themselves."""


@dataclass(frozen=True)
class SyntheticData:
    """Random tokens; a pure function of the seed and the sample index, nothing on disk."""


@dataclass(frozen=True)
class PluginData:
    """Documents that an installed plugin yields."""

    kind: str
    validation_fraction: float
    cache_dir: str | None
    options: Any


TextSource = StdlibData | TextData | RecordData
"""Data that is text when it is found."""
DataSource = TextSource | PluginData | TokenData | SyntheticData


@dataclass(frozen=True)
class DataConfig:
    source: DataSource
    sequence_length: int
    packing: Packing
    bos: bool | None
    """None = if the tokenizer has a begin-of-text token that is not its end-of-text token."""
    eos: bool


@dataclass(frozen=True)
class PrepareConfig:
    path: str | None
    workers: int | None
    shard_bytes: int


@dataclass(frozen=True)
class ByteTokenizerConfig:
    kind: Literal["byte"] = "byte"


@dataclass(frozen=True)
class CharTokenizerConfig:
    kind: Literal["char"] = "char"


@dataclass(frozen=True)
class BpeTokenizerConfig:
    vocab_size: int
    kind: Literal["bpe"] = "bpe"


@dataclass(frozen=True)
class FileTokenizerConfig:
    """A `tokenizer.json` of the tokenizers library."""

    path: str
    bos_token: str | None
    eos_token: str | None
    kind: Literal["file"] = "file"


@dataclass(frozen=True)
class TiktokenTokenizerConfig:
    path: str
    pattern: str | None
    kind: Literal["tiktoken"] = "tiktoken"


@dataclass(frozen=True)
class SentencePieceTokenizerConfig:
    path: str
    kind: Literal["sentencepiece"] = "sentencepiece"


@dataclass(frozen=True)
class IdTokenizerConfig:
    """No letters, only token numbers; the vocabulary is the model's."""

    eos_id: int | None
    kind: Literal["ids"] = "ids"


@dataclass(frozen=True)
class StoredTokenizerConfig:
    """Whatever comes with the data: the tokenizer of prepared tokens, plain ids for other token files."""

    kind: Literal["auto"] = "auto"


@dataclass(frozen=True)
class RunTokenizerConfig:
    """That of the run folder `model.init_from` names."""

    path: str
    kind: Literal["run"] = "run"


LearntTokenizerConfig = CharTokenizerConfig | BpeTokenizerConfig
"""Tokenizers made from the training text."""
TokenizerConfig = (
    ByteTokenizerConfig
    | LearntTokenizerConfig
    | FileTokenizerConfig
    | TiktokenTokenizerConfig
    | SentencePieceTokenizerConfig
    | IdTokenizerConfig
    | StoredTokenizerConfig
    | RunTokenizerConfig
)
