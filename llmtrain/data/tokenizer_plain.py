"""Tokenizers that need no package: bytes, characters, and plain token numbers where there is no text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.data.tokenizer_base import Tokenizer, utf8

_NUM_CODE_POINTS = 0x110000


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8."""

    cuts_at_words = True

    def __init__(self) -> None:
        self.bos_id, self.eos_id, self.vocab_size = 256, 257, 258

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "byte"}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ByteTokenizer:
        """The inverse of `to_json`."""
        return cls()


class CharTokenizer(Tokenizer):
    """One token per character seen in training; any other character becomes one unknown token, which decodes to U+FFFD."""

    cuts_at_words = True

    def __init__(self, characters: str) -> None:
        """`characters` in ascending order of code points, without repeats."""
        self.characters = characters
        codes = np.frombuffer(characters.encode("utf-32-le"), dtype="<u4")
        self.unk_id = len(codes)
        self.bos_id, self.eos_id, self.vocab_size = self.unk_id + 1, self.unk_id + 2, self.unk_id + 3
        self._id_of_code = np.full(_NUM_CODE_POINTS, self.unk_id, dtype=np.int64)
        self._id_of_code[codes] = np.arange(len(codes))

    def encode(self, text: str) -> NDArray[np.int64]:
        return self._id_of_code[_code_points(text)]

    def decode(self, ids: Iterable[int]) -> str:
        texts = (self.characters[i] if i < self.unk_id else "\ufffd" for i in ids if i <= self.unk_id)
        return "".join(texts)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "char", "characters": self.characters}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> CharTokenizer:
        """The inverse of `to_json`."""
        return cls(stored["characters"])


def train_char(texts: Iterable[str]) -> CharTokenizer:
    """One token for every character of the texts."""
    seen = np.zeros(_NUM_CODE_POINTS, dtype=bool)
    for text in texts:
        seen[_code_points(text)] = True
    return CharTokenizer("".join(map(chr, np.flatnonzero(seen))))


class IdTokenizer(Tokenizer):
    """Stands in where there is no text: writes ids as decimal numbers and reads them back.

    Where an end-of-text id is known it stands before the first document too, as in GPT-2.
    """

    cuts_at_words = True

    def __init__(self, vocab_size: int, eos_id: int | None = None) -> None:
        self.bos_id, self.eos_id, self.vocab_size = eos_id, eos_id, vocab_size

    def encode(self, text: str) -> NDArray[np.int64]:
        words = text.split()
        bad = [word for word in words if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size)]
        if bad:
            raise DataError(
                Problem(
                    f"{bad[0]!r} in the text",
                    f"the tokenizer of this run has no letters, only token numbers from 0 to {self.vocab_size - 1}",
                    "write numbers, for example '17 5 240'",
                )
            )
        return np.array([int(word) for word in words], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "ids", "vocab_size": self.vocab_size, "eos_id": self.eos_id}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> IdTokenizer:
        """The inverse of `to_json`."""
        return cls(stored["vocab_size"], stored["eos_id"])


def _code_points(text: str) -> NDArray[np.uint32]:
    utf8(text)
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
