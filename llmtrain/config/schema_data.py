"""The sections of the wire form that say what is read: data, tokenizer, and how text becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from llmtrain.config.declare import AUTO, MAX_RANKS, MAX_ROWS, MAX_TOKENS, key

FILES = ("text", "jsonl", "parquet", "tokens")
"""Kinds of data that are read from `data.path`."""
RECORDS = ("jsonl", "parquet")
"""Kinds of data whose files hold many documents each."""
TOKENIZED_HERE = ("stdlib", "text", *RECORDS)
"""Kinds of data that are text when they are found."""
TOKENIZER_FILES = ("file", "tiktoken", "sentencepiece")
"""Kinds of tokenizer that are read from `tokenizer.path`."""


@dataclass
class Data:
    kind: str = key(
        "stdlib", "where text or tokens come from", choices=("stdlib", "text", "jsonl", "parquet", "tokens", "synthetic")
    )
    path: Optional[str] = key(None, "file, folder or pattern (`shards/*.jsonl.zst`) to read", kinds=FILES, path=True)
    validation_path: Optional[str] = key(
        None, "the same for validation; null = validation_fraction of data.path is held out", kinds=FILES, path=True
    )
    sequence_length: int = key(256, "tokens a row of a batch holds", unit="tokens", ge=2, le=MAX_ROWS)
    packing: str = key(
        "concat",
        "concat: documents follow each other in a row; document: the same with attention and positions kept inside each document; "
        "padded: one document (or piece of it) a row",
        choices=("concat", "document", "padded"),
    )
    bos: Union[bool, str] = key(
        AUTO, "put a begin-of-text token before each document; auto = if the tokenizer has one that is not its end-of-text"
    )
    eos: bool = key(True, "put an end-of-text token after each document")
    validation_fraction: Optional[float] = key(
        None, "share held out for validation (default 0.05)", gt=0, lt=1, kinds=(*TOKENIZED_HERE, "tokens")
    )
    cache_dir: Optional[str] = key(
        None, "folder of prepared token files; null = llmtrain under the user's cache folder", kinds=TOKENIZED_HERE, path=True
    )
    text_field: Optional[str] = key(None, "field or column that holds the text (default text)", kinds=RECORDS)
    on_bad: Optional[str] = key(
        None,
        "what to do with a record that is no document (default error); counts and places are told; quarantine keeps a copy of each",
        choices=("error", "skip", "quarantine"),
        kinds=RECORDS,
    )
    max_document_bytes: Optional[int] = key(
        None, "longest document that is not bad (default 256 MiB)", unit="bytes", ge=1, le=2**31, kinds=RECORDS
    )
    format: Optional[str] = key(
        None,
        "layout of token files (default auto: told by name and header)",
        choices=(AUTO, "prepared", "raw", "llm_c", "megatron", "datatrove"),
        kinds=("tokens",),
    )
    dtype: Optional[str] = key(
        None,
        "type of raw token ids, little-endian (default uint16; the other formats say it themselves)",
        choices=("uint16", "uint32", "int32", "int64"),
        kinds=("tokens",),
    )


@dataclass
class Tokenizer:
    kind: str = key(
        AUTO,
        "what a token is; auto = that of model.init_from, else bytes for text, what comes with prepared tokens, ids for other token files",
        choices=(AUTO, "byte", "char", "bpe", *TOKENIZER_FILES, "ids"),
    )
    vocab_size: Optional[int] = key(
        None, "tokens to train, special ones included (default 4096)", unit="tokens", ge=260, le=MAX_ROWS, kinds=("bpe",)
    )
    path: Optional[str] = key(
        None,
        "tokenizer.json, .tiktoken ranks or SentencePiece model; or the folder it lies in",
        kinds=TOKENIZER_FILES,
        path=True,
    )
    pattern: Optional[str] = key(
        None,
        "how text is split before its ranks apply, and the special tokens (default: told by the number of ranks)",
        choices=("gpt2", "cl100k", "o200k", "llama3", "qwen"),
        kinds=("tiktoken",),
    )
    bos_token: Optional[str] = key(
        None, "the begin-of-text token as it is spelled (default: told by the files beside it)", kinds=("file",)
    )
    eos_token: Optional[str] = key(
        None, "the end-of-text token as it is spelled (default: told by the files beside it)", kinds=("file",)
    )
    eos_id: Optional[int] = key(
        None,
        "id of the end-of-text token in the token files; null = documents are not told apart",
        ge=0,
        lt=2**32,
        kinds=("ids",),
    )


@dataclass
class Prepare:
    path: Optional[str] = key(None, "folder to write prepared tokens into; null = data.cache_dir, where training finds them")
    workers: Union[int, str] = key(AUTO, "processes that tokenize; auto = cores", unit="processes", ge=1, le=MAX_RANKS)
    shard_bytes: int = key(
        64 * 2**20, "text that becomes one shard, the unit of work and of resuming", unit="bytes", ge=1, le=MAX_TOKENS
    )
