"""Tokenizers of other projects: tokenizer.json, or vocabulary and merges in two files, run by the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.paths import user_path
from llmtrain.data.tokenizer_base import Tokenizer, json_hash, require_package, tokenizer_file, utf8
from llmtrain.data.tokenizer_folder import PAIRS, find_marks, pair_in, read_json, read_pair
from llmtrain.data.tokenizer_json import Description, cuts_at_words, unknown_token, vocabulary_of, without_special


class FileTokenizer(Tokenizer):
    """A tokenizer that a tokenizer.json describes. Text that spells a special token stays text, and nothing is put around it.

    Added tokens that are not special (runs of blanks, for example) belong to the vocabulary of text and are found in it.
    Whether `decode(encode(text)) == text` is up to the file: byte-level ones without a normaliser give every text back.
    """

    def __init__(self, description: Mapping[str, Any], bos_id: int | None, eos_id: int | None) -> None:
        """`description` is the content of the file; ids are those of its vocabulary."""
        require_package("file")
        import tokenizers

        self.description: Description = dict(description)
        self.bos_id, self.eos_id = bos_id, eos_id
        vocabulary = vocabulary_of(self.description)
        self.vocab_size = max(vocabulary.values()) + 1
        self.special = _special(self.description, vocabulary, bos_id, eos_id)
        self._plain = without_special(self.description, self.special)
        self.cuts_at_words = cuts_at_words(self._plain)
        self._library = tokenizers.Tokenizer.from_str(json.dumps(self._plain))
        self._library.encode_special_tokens = True
        self._hidden = np.zeros(self.vocab_size, dtype=bool)
        self._hidden[list(self.special.values())] = True
        self._forbidden = self._hidden.copy()
        unknown = unknown_token(self.description, vocabulary)
        if unknown is not None and unknown not in (bos_id, eos_id):
            self._forbidden[unknown] = False

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        for text in texts:
            utf8(text)
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._checked(np.array(encoding.ids, dtype=np.int64)) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if i < self.vocab_size and not self._hidden[i]]
        text: str = self._library.decode(known, skip_special_tokens=False)
        return text

    def to_json(self) -> dict[str, Any]:
        return {"kind": "file", "tokenizer": self.description, "bos_id": self.bos_id, "eos_id": self.eos_id}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> FileTokenizer:
        """The inverse of `to_json`.

        Raises:
            ValueError: the description is none that the library reads.
        """
        try:
            return cls(stored["tokenizer"], stored["bos_id"], stored["eos_id"])
        except DataError:
            raise
        except Exception as error:  # the library raises this very class
            raise ValueError(str(error)) from error

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """SHA-256 of what decides the ids: not of how they are decoded or what special tokens are called."""
        parts = ("added_tokens", "normalizer", "pre_tokenizer", "model")
        return json_hash([{part: self._plain.get(part) for part in parts}, self.bos_id, self.eos_id])

    def __reduce__(self) -> Any:
        return self.from_json, (self.to_json(),)

    def _checked(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        bad = ids[self._forbidden[ids]]
        if bad.size:
            name = next(name for name, number in self.special.items() if number == bad[0])
            raise DataError(Problem(f"the text becomes the special token {name!r}", "this tokenizer cannot tell it from text"))
        return ids


def read_tokenizer_json(path: str, bos: str | None, eos: str | None) -> FileTokenizer:
    """The tokenizer of a tokenizer.json, of the folder that holds it, or of a vocab.json with merges.txt beside it.

    Args:
        bos, eos: the tokens that begin and end a text, as they are spelled; None = told by the files beside it.

    Raises:
        DataError: no such file, a damaged one, or a token that is not in the vocabulary.
        ConfigError: it lies in a home folder that is not there.
    """
    require_package("file")
    given = user_path(path, f"tokenizer.path={path}")
    folder = given if given.is_dir() else given.parent
    of_a_pair = given.name in [name for names in PAIRS for name in names]
    pair = pair_in(folder) if of_a_pair or not (folder / "tokenizer.json").is_file() else None
    if pair is not None and (of_a_pair or given.is_dir()):
        return _make(pair[0], read_pair(*pair), bos, eos)
    names = ("tokenizer.json", f"{PAIRS[0][0]} with {PAIRS[0][1]}")
    file = tokenizer_file(path, names)
    description = read_json(file)
    if not isinstance(description, dict) or "type" not in (description.get("model") or {}):
        raise DataError(Problem(str(file), "it is no tokenizer.json: it describes no model", "tokenizer.path=tokenizer.json"))
    return _make(file, description, bos, eos)


def _make(file: Path, description: Description, bos: str | None, eos: str | None) -> FileTokenizer:
    try:
        vocabulary = vocabulary_of(description)
        special = _special(description, vocabulary, None, None)
        marks = find_marks(file.parent, vocabulary, special.values(), bos, eos)
        return FileTokenizer(description, *marks)
    except DataError:
        raise
    except Exception as error:  # the library raises this very class
        raise DataError(Problem(str(file), f"the package tokenizers cannot read it: {error}")) from error


def _special(description: Description, vocabulary: Mapping[str, int], bos_id: int | None, eos_id: int | None) -> dict[str, int]:
    """Spelling and id of the tokens that text never makes."""
    marked = {token["content"] for token in description.get("added_tokens") or [] if token["special"]}
    return {name: number for name, number in vocabulary.items() if name in marked or number in (bos_id, eos_id)}
