"""Small sources for the data tests: streams whose every token is another number, and folders of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from llmtrain.config.typed import DataConfig, Packing, TextData
from llmtrain.data.packing import TokenStream


@pytest.fixture
def make_stream() -> Callable[[Sequence[int]], TokenStream]:
    """Documents of the given lengths; token i of the stream is the number 1000 + i, so a token says where it comes from."""

    def make(lengths: Sequence[int]) -> TokenStream:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return TokenStream(np.arange(1000, 1000 + offsets[-1], dtype=np.uint16), offsets)

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
    """A data section that reads a path, with its cache under tmp_path."""

    def make(
        path: Path,
        *,
        fraction: float = 0.2,
        sequence_length: int = 16,
        packing: Packing = Packing.CONCAT,
        bos: bool = True,
        eos: bool = True,
    ) -> DataConfig:
        source = TextData(str(path), fraction, str(tmp_path / "cache"))
        return DataConfig(source, sequence_length, packing, bos, eos)

    return make
