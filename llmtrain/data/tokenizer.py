"""Text to token ids and back: bytes, characters, or byte-level BPE trained on the data.

Every tokenizer numbers its text tokens from 0 and puts its special tokens behind them. `encode` never makes a special id,
whatever the text says; begin and end of a document are added in one place (`data/prepare.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed import BpeTokenizerConfig, ByteTokenizerConfig, TokenizerConfig
from llmtrain.plan.plan import Availability

_NUM_CODE_POINTS = 0x110000


class Tokenizer(ABC):
    """What every tokenizer offers. `decode(encode(text)) == text`; for `char` if training text held all its characters."""

    vocab_size: int
    """Ids run from 0 to vocab_size - 1, special tokens included."""
    bos_id: int
    """Begin of a document."""
    eos_id: int
    """End of a document."""

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of a text, without begin and end token."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Everything `load_tokenizer` needs, as plain JSON."""

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Ids of several texts; the same ids as one by one."""
        return [self.encode(text) for text in texts]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON: equal exactly if every text has equal ids."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8."""

    def __init__(self) -> None:
        self.bos_id, self.eos_id, self.vocab_size = 256, 257, 258

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "byte"}


class CharTokenizer(Tokenizer):
    """One token per character seen in training; any other character becomes one unknown token, which decodes to U+FFFD."""

    def __init__(self, characters: str) -> None:
        """`characters` in ascending order of code points, without repeats."""
        self._characters = characters
        codes = np.frombuffer(characters.encode("utf-32-le"), dtype="<u4")
        self.unk_id = len(codes)
        self.bos_id, self.eos_id, self.vocab_size = self.unk_id + 1, self.unk_id + 2, self.unk_id + 3
        self._id_of_code = np.full(_NUM_CODE_POINTS, self.unk_id, dtype=np.int64)
        self._id_of_code[codes] = np.arange(len(codes))

    def encode(self, text: str) -> NDArray[np.int64]:
        return self._id_of_code[_code_points(text)]

    def decode(self, ids: Iterable[int]) -> str:
        texts = (self._characters[i] if i < self.unk_id else "\ufffd" for i in ids if i <= self.unk_id)
        return "".join(texts)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "char", "characters": self._characters}


class BpeTokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes as in GPT-2, Radford et al. 2019), run by `tokenizers`.

    The library is given no special tokens, so text that spells one stays text.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> None:
        """Tokens by id (bytes written as in GPT-2's byte alphabet) and the merges in the order they apply."""
        _require_tokenizers()
        from tokenizers import models

        self._tokens = list(tokens)
        self._merges = [(left, right) for left, right in merges]
        self.bos_id, self.eos_id, self.vocab_size = len(tokens), len(tokens) + 1, len(tokens) + 2
        ids = {token: index for index, token in enumerate(tokens)}
        self._library = _byte_level(models.BPE(vocab=ids, merges=self._merges))

    def encode(self, text: str) -> NDArray[np.int64]:
        _utf8(text)
        return np.array(self._library.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        for text in texts:
            _utf8(text)
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._library.decode([int(i) for i in ids if i < self.bos_id], skip_special_tokens=False)
        return text

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bpe", "tokens": self._tokens, "merges": [list(merge) for merge in self._merges]}


class IdTokenizer(Tokenizer):
    """Stands in where there is no text (`data=synthetic`): writes ids as decimal numbers and reads them back."""

    def __init__(self, vocab_size: int) -> None:
        self.bos_id, self.eos_id, self.vocab_size = vocab_size - 2, vocab_size - 1, vocab_size

    def encode(self, text: str) -> NDArray[np.int64]:
        words = text.split()
        bad = [word for word in words if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size)]
        if bad:
            raise DataError(
                Problem(
                    f"{bad[0]!r} in the text",
                    f"with data=synthetic there are no letters, only token numbers from 0 to {self.vocab_size - 1}",
                    "write numbers, for example '17 5 240'",
                )
            )
        return np.array([int(word) for word in words], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "ids", "vocab_size": self.vocab_size}


def train_tokenizer(config: TokenizerConfig, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer a config asks for; `texts()` goes through the training text and is called if something is learnt."""
    if isinstance(config, ByteTokenizerConfig):
        return ByteTokenizer()
    if isinstance(config, BpeTokenizerConfig):
        return _train_bpe(config.vocab_size, texts())
    seen = np.zeros(_NUM_CODE_POINTS, dtype=bool)
    for text in texts():
        seen[_code_points(text)] = True
    return CharTokenizer("".join(map(chr, np.flatnonzero(seen))))


def load_tokenizer(stored: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` described.

    Raises:
        DataError: the description is of no known kind or incomplete, or the package it needs is missing.
    """
    makers: dict[str, Callable[[], Tokenizer]] = {
        "byte": ByteTokenizer,
        "char": lambda: CharTokenizer(stored["characters"]),
        "bpe": lambda: BpeTokenizer(stored["tokens"], stored["merges"]),
        "ids": lambda: IdTokenizer(stored["vocab_size"]),
    }
    kind = stored.get("kind")
    if kind not in makers:
        raise DataError(Problem(f"a stored tokenizer of kind {kind!r}", f"this version knows {', '.join(makers)}"))
    try:
        return makers[kind]()
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(Problem(f"a stored tokenizer of kind {kind!r}", f"its description is damaged: {error!r}")) from error


def availability() -> dict[str, Availability]:
    """Which kinds can be used here, by the words of `tokenizer.kind`."""
    found = importlib.util.find_spec("tokenizers") is not None
    reason = "" if found else "the package tokenizers is not installed (pip install tokenizers)"
    return {"byte": Availability(True), "char": Availability(True), "bpe": Availability(found, reason)}


def _require_tokenizers() -> None:
    state = availability()["bpe"]
    if not state.available:
        raise DataError(Problem("tokenizer=bpe", state.reason, "tokenizer=byte needs no package"))


def _train_bpe(vocab_size: int, texts: Iterable[str]) -> BpeTokenizer:
    """Learn merges until there are `vocab_size` tokens with the two special ones, or nothing is left to merge."""
    _require_tokenizers()
    from tokenizers import models, pre_tokenizers, trainers

    library = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    model = json.loads(library.to_str())["model"]
    return BpeTokenizer(sorted(model["vocab"], key=model["vocab"].__getitem__), model["merges"])


def _byte_level(model: Any) -> Any:
    """A `tokenizers.Tokenizer` that splits text as GPT-2 does, writes bytes as letters and undoes both when decoding."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    return library


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(Problem(f"character {error.start} of the text", "half a surrogate pair is no text")) from error


def _code_points(text: str) -> NDArray[np.uint32]:
    _utf8(text)
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
