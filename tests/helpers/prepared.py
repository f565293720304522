"""Texts prepared into the cache of a test, and what came out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.config.typed_data import ByteTokenizerConfig, DataConfig, PrepareConfig
from llmtrain.data.formats import Prepared, PreparedSplit
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.prepare import Preparation, find_preparation, prepare

TEXTS = [f"document {i}\nwith {i} in it\n" * (1 + i % 3) for i in range(24)]
SETTINGS = PrepareConfig(path=None, workers=None, shard_bytes=64 << 20)
SMALL = PrepareConfig(path=None, workers=None, shard_bytes=64)
"""Many shards of a small text."""
NAMES = ("train-00000.tokens", "train-00000.offsets", "validation-00001.tokens", "validation-00001.offsets", "metadata.json")
"""Files of a folder with a shard for each split."""


def job_of(data: DataConfig, tokenizer: Any = ByteTokenizerConfig(), settings: PrepareConfig = SETTINGS) -> Preparation:
    return find_preparation(data, tokenizer, settings, Heartbeat(lambda line: None))


def prepare_path(
    data: DataConfig, tokenizer: Any = ByteTokenizerConfig(), settings: PrepareConfig = SETTINGS, lines: list[str] | None = None
) -> Prepared:
    said: list[str] = [] if lines is None else lines
    return prepare(job_of(data, tokenizer, settings), Heartbeat(said.append))


def ids(split: PreparedSplit) -> list[int]:
    return split.tokens.read_range(0, len(split.tokens)).tolist()


def documents(split: PreparedSplit) -> list[str]:
    """Texts of byte tokens, framed or not."""
    parts = np.split(np.array(ids(split)), split.offsets()[1:-1])
    return [bytes(part[part < 256].astype(np.uint8)).decode() for part in parts]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def entries(data: DataConfig) -> list[Path]:
    return sorted(Path(data.source.cache_dir).iterdir())  # type: ignore[union-attr, arg-type]
