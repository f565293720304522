"""Opens token files as a run does, and reads them back as lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import TokenData, TokenFormat
from llmtrain.data.packing import TokenStream
from llmtrain.data.token_files import TokenFiles, open_token_files


def source(path: Path | str, **changes: Any) -> TokenData:
    fields = {"validation_path": None, "validation_fraction": None, "format": TokenFormat.AUTO, "dtype": None}
    return TokenData(path=str(path), **{**fields, **changes})


def opened(path: Path | str, *, vocab_size: int = 50257, eos_id: int | None = None, **changes: Any) -> TokenFiles:
    return open_token_files(source(path, **changes), vocab_size=vocab_size, eos_id=eos_id, progress=lambda line: None)


def ids(stream: TokenStream) -> list[int]:
    return stream.tokens.read_range(0, len(stream.tokens)).tolist()


def refused(path: Path | str, **changes: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(path, **changes)
    return str(caught.value)


def documents_of(stream: TokenStream) -> list[list[int]]:
    borders = stream.offsets.tolist()
    return [ids(stream)[start:stop] for start, stop in zip(borders, borders[1:])]
