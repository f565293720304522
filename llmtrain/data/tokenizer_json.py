"""Descriptions of the `tokenizers` package (tokenizer.json) as plain data: how one is made, read and robbed of its special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmtrain.data.tokenizer_tiktoken import PATTERNS

Description = dict[str, Any]

_SAFE_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"})
_ORIGINAL_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_KNOWN_SPLITS = frozenset({_ORIGINAL_GPT2, *(pattern.portable_regex or pattern.regex for pattern in PATTERNS.values())})
_WORD_BEFORE_SPACE = re.compile(r"[^\W_][ \t-\r]")


def byte_alphabet() -> list[str]:
    """The letter that stands for each byte (GPT-2): printable ones of Latin-1 for themselves, others from U+0100 on."""
    letters, free = [], iter(range(0x100, 0x200))
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        letters.append(chr(byte if printable else next(free)))
    return letters


def describe(
    vocabulary: Mapping[str, int],
    merges: Iterable[Sequence[str]],
    special: Mapping[str, int],
    *,
    pre_tokenizer: Description | None,
    decoder: Description,
    normalizer: Description | None = None,
    **model: Any,
) -> Description:
    """A description of BPE. Special tokens stand in the vocabulary too: the library numbers those that do not by itself."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(name, number) for name, number in sorted(special.items(), key=lambda item: item[1])],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **model,
            "vocab": {**vocabulary, **special},
            "merges": [list(merge) for merge in merges],
        },
    }


def added_token(name: str, number: int, *, special: bool = True) -> Description:
    """An entry of `added_tokens`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": number, "content": name, **flags}


def byte_level(regex: str | None) -> Description:
    """The pre-tokenizer that writes bytes as letters; `regex` splits text before, None = GPT-2's."""
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex is None}
    if regex is None:
        return letters
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, letters]}


def byte_level_decoder() -> Description:
    """The decoder that reads letters as bytes."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def vocabulary_of(description: Description) -> dict[str, int]:
    """Tokens and ids of the model inside a description, as the library reads them; added tokens too."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(description))
    found: dict[str, int] = library.get_vocab(with_added_tokens=True)
    return found


def without_special(description: Description, special: Mapping[str, int]) -> Description:
    """A description that gives text the same ids, but has no way to make a special one.

    Special tokens get names that no text can spell. They are not taken out, since the library numbers added tokens by their order.
    What is drawn at random, cut to a length, filled up or put around a text is left out.
    """
    names = {name: f"\U0010ffff special {number}" for name, number in special.items()}
    model = dict(description["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if "merges" in model:
        merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in merges if not names.keys() & {a, b, a + b}]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "dropout" in model:
        model["dropout"] = None
    added = [
        {**token, "content": names.get(token["content"], token["content"])} for token in description.get("added_tokens") or []
    ]
    dropped = {"truncation": None, "padding": None, "post_processor": None}
    return {**description, **dropped, "added_tokens": added, "model": model}


def unknown_token(description: Description, vocabulary: Mapping[str, int]) -> int | None:
    """Id of what stands for characters outside the vocabulary."""
    model = description["model"]
    number = model.get("unk_id")
    return number if number is not None else vocabulary.get(model.get("unk_token"))


def cuts_at_words(description: Description) -> bool:
    """Whether a text may be cut after a letter or an ASCII digit and before ASCII white space without a change of ids.

    True only where normaliser and pre-tokenizer are known to be so: each step does the same on either side of such a place, and one
    of them always splits there.
    """
    if any(step["type"] not in _SAFE_NORMALIZERS for step in _steps(description.get("normalizer"), "normalizers")):
        return False
    for token in description.get("added_tokens") or []:
        if not token["special"] and (token["rstrip"] or _WORD_BEFORE_SPACE.search(token["content"])):
            return False
    found = [_split_at_words(step) for step in _steps(description.get("pre_tokenizer"), "pretokenizers")]
    return None not in found and True in found


def _steps(part: Description | None, inside: str) -> list[Description]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[inside] for step in _steps(inner, inside)]
    return [part]


def _split_at_words(step: Description) -> bool | None:
    """True = always splits between word and white space; False = indifferent to such a place; None = not known to be either."""
    kind = step["type"]
    if kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        return True
    if kind in ("Digits", "Punctuation"):
        return False
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return bool(step.get("use_regex", True))
    if kind == "Split" and step["pattern"].get("Regex", "").replace(r"[\p{L}]", r"\p{L}") in _KNOWN_SPLITS:
        kept = (step["behavior"], bool(step["invert"])) in (("Isolated", False), ("Removed", True))
        return True if kept else None
    return None
