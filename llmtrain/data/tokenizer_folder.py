"""What lies beside a tokenizer of the `tokenizers` package: which tokens begin and end a text, and the older pair of files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.suggest import either, nearest_words
from llmtrain.data.tokenizer_base import read_bytes
from llmtrain.data.tokenizer_json import Description, added_token, byte_alphabet, byte_level, byte_level_decoder, describe
from llmtrain.data.tokenizer_tiktoken import PATTERNS

PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
"""Names of vocabulary and merges: as transformers writes them, as GPT-2 was published."""
WELL_KNOWN = {
    "bos": ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[BOS]", "<｜begin▁of▁sentence｜>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>"),
}
"""Spellings to look for where no file says which token begins and ends a text, best first."""
_SPLITS = {None: None, "GPT2Tokenizer": None, "Qwen2Tokenizer": PATTERNS["qwen"].regex}
"""Classes in tokenizer_config.json whose vocab.json and merges.txt are byte-level → how they split text; None = as GPT-2."""


def read_json(file: Path) -> Any:
    """Content of a JSON file; DataError if it is none."""
    try:
        return json.loads(read_bytes(file))
    except ValueError as error:
        raise DataError(Problem(str(file), f"it is not JSON: {error}")) from error


def pair_in(folder: Path) -> tuple[Path, Path] | None:
    """The files with vocabulary and merges in a folder, if it has both."""
    for names in PAIRS:
        vocabulary, merges = (folder / name for name in names)
        if vocabulary.is_file() and merges.is_file():
            return vocabulary, merges
    return None


def read_pair(vocabulary_file: Path, merges_file: Path) -> Description:
    """The description of a byte-level BPE that is told by two files.

    Raises:
        DataError: a damaged file, or one that is not byte-level.
    """
    vocabulary = read_json(vocabulary_file)
    if not isinstance(vocabulary, dict) or not all(isinstance(number, int) for number in vocabulary.values()):
        raise DataError(Problem(str(vocabulary_file), "not a table of tokens and their ids"))
    absent = [letter for letter in byte_alphabet() if letter not in vocabulary]
    if absent:
        rule = f"no byte-level vocabulary as of GPT-2: {absent[0]!r} is not in it"
        raise DataError(Problem(str(vocabulary_file), rule, "save the tokenizer as tokenizer.json with transformers"))
    folder = vocabulary_file.parent
    config = _object(folder / "tokenizer_config.json")
    kind = (config.get("tokenizer_class") or "").removesuffix("Fast") or None
    if kind not in _SPLITS:
        rule = f"{vocabulary_file.name} does not say how {kind} splits text"
        raise DataError(Problem(str(folder), rule, "save the tokenizer as tokenizer.json with transformers"))
    added = _added(folder, config, vocabulary)
    description = describe(
        vocabulary,
        _merges(merges_file, vocabulary),
        {token["content"]: token["id"] for token in added},
        pre_tokenizer=byte_level(_SPLITS[kind]),
        decoder=byte_level_decoder(),
        normalizer={"type": "NFC"} if _SPLITS[kind] else None,
    )
    description["added_tokens"] = added
    return description


def find_marks(
    folder: Path, vocabulary: Mapping[str, int], special: Collection[int], bos: str | None, eos: str | None
) -> tuple[int | None, int | None]:
    """Ids of the tokens that begin and end a text: as given, else as a file in the folder says, else by well-known spellings.

    Args:
        special: ids that are marked as special tokens.
        bos, eos: spellings, None = not given.

    Raises:
        DataError: a spelling that is not in the vocabulary.
    """
    return _mark("bos", bos, folder, vocabulary, special), _mark("eos", eos, folder, vocabulary, special)


def _mark(role: str, given: str | None, folder: Path, vocabulary: Mapping[str, int], special: Collection[int]) -> int | None:
    if given is not None:
        return _id_of(given, f"tokenizer.{role}_token={given}", vocabulary)
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        content = _object(file)
        if f"{role}_token" in content:
            name = content[f"{role}_token"]
            name = name.get("content") if isinstance(name, dict) else name
            return None if name is None else _id_of(name, f"{role}_token {name!r} in {file}", vocabulary)
    known = [vocabulary[name] for name in WELL_KNOWN[role] if name in vocabulary]
    for number in _numbers(folder, role):
        # Configs of models repeat the defaults of their class where nobody set them, so an ordinary token is not believed.
        if number in special or number in known:
            return number
    return known[0] if known else None


def _numbers(folder: Path, role: str) -> Iterator[int]:
    for name in ("config.json", "generation_config.json"):
        number = _object(folder / name).get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int):
            yield number


def _id_of(name: str, what: str, vocabulary: Mapping[str, int]) -> int:
    if name in vocabulary:
        return vocabulary[name]
    near = nearest_words(name, (token for token in vocabulary if token[:1] in "<[" and len(token) > 2))
    raise DataError(Problem(what, "no such token in the vocabulary", either(near) or "the spelling that is in its vocabulary"))


def _object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise DataError(Problem(str(file), "not a JSON object"))
    return content


def _merges(file: Path, vocabulary: Mapping[str, int]) -> list[list[str]]:
    merges = []
    try:
        lines = read_bytes(file).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(Problem(str(file), f"it is not UTF-8 (byte {error.start})")) from error
    for number, line in enumerate(lines, 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not {*parts, "".join(parts)} <= vocabulary.keys():
            raise DataError(Problem(f"{file}:{number}", "not two tokens that make a third of the vocabulary"))
        merges.append(parts)
    return merges


def _added(folder: Path, config: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[Description]:
    """Added tokens as the files beside say them; well-known spellings of the vocabulary are special in any case."""
    tokens = {
        vocabulary[name]: added_token(name, vocabulary[name])
        for names in WELL_KNOWN.values()
        for name in names
        if name in vocabulary
    }
    for name, number in _object(folder / "added_tokens.json").items():
        tokens[number] = added_token(name, number)
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        tokens[int(number)] = {**added_token(token["content"], int(number)), **token}
    return [tokens[number] for number in sorted(tokens)]
