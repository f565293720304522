"""SentencePiece models (Kudo & Richardson 2018), run by the `sentencepiece` package."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.data.sentencepiece_model import Edges, parse_model
from llmtrain.data.tokenizer_base import Tokenizer, read_bytes, require_package, tokenizer_file, utf8
from llmtrain.data.tokenizer_tiktoken import looks_like_ranks

FILES = ("tokenizer.model", "*.model")
STRETCH_CHARACTERS = 1 << 16
"""Text given to a BPE model at once, where it can be cut without a trace: time per character grows with length, threefold at 5 MB."""
_NO_BLANK_IN_FRONT = b"\x1a\x02\x18\x00"
"""Behind a model file it sets `normalizer_spec.add_dummy_prefix` to false: protocol buffers take the last of two values."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model of any algorithm. Text that spells a control piece (`<s>`) stays text.

    `decode(encode(text)) == text` if the model has byte fallback (or text holds its characters only) and its normaliser leaves the
    text as it is. A caller cannot cut between words, since every text may get a blank in front.
    """

    cuts_at_words = False

    def __init__(self, model: bytes) -> None:
        """`model` is the content of the model file."""
        require_package("sentencepiece")
        import sentencepiece

        self.model = model
        self._library = sentencepiece.SentencePieceProcessor()
        try:
            self._library.LoadFromSerializedProto(model)
            self.vocab_size = self._library.vocab_size()
        except RuntimeError as error:
            raise ValueError("it is no SentencePiece model") from error
        if self.vocab_size <= 0:
            raise ValueError("it is a SentencePiece model without pieces")
        self.bos_id, self.eos_id = _existing(self._library.bos_id()), _existing(self._library.eos_id())
        self.unk_id: int = self._library.unk_id()
        self._following = sentencepiece.SentencePieceProcessor()
        self._following.LoadFromSerializedProto(model + _NO_BLANK_IN_FRONT)
        self._edges = Edges(parse_model(model))

    def encode(self, text: str) -> NDArray[np.int64]:
        utf8(text)
        parts, start = [], 0
        while start < len(text):
            stop = self._edges.next_after(text, start + STRETCH_CHARACTERS)
            library = self._following if start else self._library
            parts.append(np.array(library.encode(text[start:stop], out_type=int), dtype=np.int64))
            start = stop
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if i < self.vocab_size and not self._library.is_control(int(i))]
        text: str = self._library.decode(known)
        return text

    def to_json(self) -> dict[str, Any]:
        return {"kind": "sentencepiece", "model": base64.b64encode(self.model).decode()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> SentencePieceTokenizer:
        """The inverse of `to_json`."""
        return cls(base64.b64decode(stored["model"], validate=True))

    def __reduce__(self) -> Any:
        return self.from_json, (self.to_json(),)


def read_sentencepiece(path: str) -> SentencePieceTokenizer:
    """The tokenizer of a model file, or of the folder that holds it.

    Raises:
        DataError: no such file, or one that is no SentencePiece model.
        ConfigError: it lies in a home folder that is not there.
    """
    require_package("sentencepiece")
    file = tokenizer_file(path, FILES)
    content = read_bytes(file)
    if looks_like_ranks(content):
        raise DataError(
            Problem(f"{file}", "it holds ranks, as Llama 3 has them, and no SentencePiece model", "tokenizer=tiktoken")
        )
    try:
        return SentencePieceTokenizer(content)
    except ValueError as error:
        raise DataError(Problem(f"{file}", str(error), "tokenizer.path=FILE, in most models tokenizer.model")) from error


def _existing(token: int) -> int | None:
    return token if token >= 0 else None
