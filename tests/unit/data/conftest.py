"""Small sources for the data tests: streams whose every token is another number, and folders of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.config.typed_data import DataConfig, OnBad, Packing, RecordData, TextData, TextSource
from llmtrain.data.packing import TokenStream
from llmtrain.data.token_array import TokenArray


@pytest.fixture
def make_stream() -> Callable[[Sequence[int]], TokenStream]:
    """Documents of the given lengths; token i of the stream is the number 1000 + i, so a token says where it comes from."""

    def make(lengths: Sequence[int]) -> TokenStream:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return TokenStream(TokenArray([np.arange(1000, 1000 + offsets[-1], dtype=np.uint16)]), offsets)

    return make


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[[Sequence[str]], Path]:
    """A folder with one text file per string, in order."""

    def make(texts: Sequence[str]) -> Path:
        folder = tmp_path / "texts"
        folder.mkdir()
        for index, text in enumerate(texts):
            (folder / f"{index:04d}.txt").write_bytes(text.encode())
        return folder

    return make


@pytest.fixture
def data_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A data section that reads a path, with its cache under tmp_path; `source` replaces fields of its source."""

    def make(
        path: Path,
        *,
        fraction: float = 0.2,
        sequence_length: int = 16,
        packing: Packing = Packing.CONCAT,
        bos: bool | None = None,
        eos: bool = True,
        **source: Any,
    ) -> DataConfig:
        cache = str(tmp_path / "cache")
        if path.suffix in (".jsonl", ".parquet"):
            kind = "jsonl" if path.suffix == ".jsonl" else "parquet"
            found: TextSource = RecordData(kind, str(path), None, fraction, cache, "text", OnBad.ERROR, 1 << 20)
        else:
            found = TextData(str(path), None, fraction, cache)
        return DataConfig(replace(found, **source), sequence_length, packing, bos, eos)

    return make


@pytest.fixture
def make_records(tmp_path: Path) -> Callable[[Sequence[str]], Path]:
    """A file of JSON lines: one per string, which is taken as it is if it is no plain text (`raw:` in front)."""

    def make(texts: Sequence[str], name: str = "records.jsonl") -> Path:
        path = tmp_path / name
        lines = [text[4:] if text.startswith("raw:") else json.dumps({"text": text}) for text in texts]
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return make
