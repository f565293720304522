"""What every tokenizer offers, and what their modules share.

`encode` never makes a special id, whatever the text says; begin and end of a document are added in one place
(`data/framing.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.paths import user_path
from llmtrain.plan.plan import Availability

PACKAGES = {"bpe": "tokenizers", "file": "tokenizers", "tiktoken": "tiktoken", "sentencepiece": "sentencepiece"}
"""Kinds of tokenizer that another package runs, and its name."""


class Tokenizer(ABC):
    """What every tokenizer offers. `decode(encode(text)) == text` unless its docstring says otherwise."""

    vocab_size: int
    """Ids run from 0 to vocab_size - 1, special tokens included."""
    bos_id: int | None
    """Begin of a document; may be the same as `eos_id`. None = it has none."""
    eos_id: int | None
    """End of a document. None = it has none."""
    cuts_at_words: bool
    """Whether a text may be cut after a letter or an ASCII digit and before ASCII white space without a change of its ids."""

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of a text, without begin and end token.

        Raises:
            DataError: the text holds half a surrogate pair, which is no character.
        """

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
        """SHA-256 of what decides the ids: equal exactly if every text has equal ids."""
        return json_hash(self.to_json())


def json_hash(value: Any) -> str:
    """SHA-256 of canonical JSON: sorted keys, no spaces, ASCII."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def utf8(text: str) -> bytes:
    """UTF-8 of a text; half a surrogate pair raises DataError."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(Problem(f"character {error.start} of the text", "half a surrogate pair is no text")) from error


def cut_at(text: str, place: re.Pattern[str]) -> Iterator[str]:
    """The text, cut behind every match of `place`; the whole of it where there is none."""
    start = 0
    for match in place.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def tokenizer_file(path: str, names: Sequence[str]) -> Path:
    """The file that `tokenizer.path` means: itself, or the first of `names` (patterns, best first) in the folder it is.

    Raises:
        DataError: there is none, or more than one that fits.
        ConfigError: it lies in a home folder that is not there.
    """
    given = user_path(path, f"tokenizer.path={path}")
    if not given.is_dir():
        if given.is_file():
            return given
        raise DataError(Problem(f"tokenizer.path={path}", "there is no such file", "tokenizer.path=FILE_OR_FOLDER"))
    for name in names:
        found = sorted(file for file in given.glob(name) if file.is_file())
        if len(found) > 1:
            rule = f"the folder holds {', '.join(file.name for file in found)}, and any could be meant"
            raise DataError(Problem(f"tokenizer.path={path}", rule, f"tokenizer.path={found[0]}"))
        if found:
            return found[0]
    there = sorted(file.name for file in given.iterdir())
    rule = f"the folder holds no {' or '.join(names)}, only {', '.join(there[:8]) or 'nothing'}{' …' if len(there) > 8 else ''}"
    raise DataError(Problem(f"tokenizer.path={path}", rule, "tokenizer.path=FILE"))


def read_bytes(file: Path) -> bytes:
    """Content of a file; DataError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(Problem(str(file), f"it cannot be read: {error.strerror}", "make it readable")) from error


def availability_of(kind: str) -> Availability:
    """Whether the package that runs a kind of tokenizer is installed."""
    package = PACKAGES.get(kind)
    if package is None or importlib.util.find_spec(package) is not None:
        return Availability(True)
    return Availability(False, f"the package {package} is not installed (pip install {package})")


def require_package(kind: str) -> None:
    """Raise DataError unless the package that runs a kind of tokenizer is installed."""
    state = availability_of(kind)
    if not state.available:
        raise DataError(Problem(f"tokenizer={kind}", state.reason, "tokenizer=byte needs no package"))
