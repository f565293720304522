"""Tokenizers as the files of a Hugging Face model folder, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtrain.data.sentencepiece_model import describe_model
from llmtrain.data.tokenizer_base import Tokenizer, read_bytes
from llmtrain.data.tokenizer_bpe import BpeTokenizer
from llmtrain.data.tokenizer_file import FileTokenizer, read_tokenizer_json
from llmtrain.data.tokenizer_folder import pair_in
from llmtrain.data.tokenizer_json import Description, byte_alphabet, byte_level, byte_level_decoder, describe
from llmtrain.data.tokenizer_plain import ByteTokenizer, CharTokenizer
from llmtrain.data.tokenizer_sentencepiece import SentencePieceTokenizer, read_sentencepiece
from llmtrain.data.tokenizer_tiktoken import PATTERNS, TiktokenTokenizer, looks_like_ranks, read_tiktoken

BOS, EOS, UNKNOWN = "<|begin_of_text|>", "<|end_of_text|>", "<|unknown|>"
"""Spellings of special tokens that have none here."""


def huggingface_files(tokenizer: Tokenizer, *, adds_bos: bool = False) -> dict[str, bytes]:
    """Files by name that `transformers.AutoTokenizer` reads; without special tokens it gives every text the same ids.

    Text that spells a special token is the exception: there it becomes one, as everywhere in that library.

    Args:
        adds_bos: whether it puts the begin-of-text token in front unless told otherwise, as a model needs that was trained with it.

    Returns:
        Nothing for a tokenizer that has no text (plain ids).

    Raises:
        DataError: a SentencePiece model of a kind that has no such files.
    """
    description = _describe(tokenizer)
    if description is None:
        return {}
    names = _names(tokenizer, description)
    if adds_bos and tokenizer.bos_id is not None and not isinstance(tokenizer, FileTokenizer):
        description["post_processor"] = bos_in_front(names["bos_token"], tokenizer.bos_id)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    files = {"tokenizer.json": _json(description), "tokenizer_config.json": _json(config)}
    if isinstance(tokenizer, SentencePieceTokenizer):
        files["tokenizer.model"] = tokenizer.model
    return files


def tokenizer_of_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer in a Hugging Face model folder; None where there is none.

    Raises:
        DataError: its files are damaged, or the package it needs is missing.
    """
    if (folder / "tokenizer.json").is_file() or pair_in(folder) is not None:
        return read_tokenizer_json(str(folder), None, None)
    file = folder / "tokenizer.model"
    if not file.is_file():
        return None
    return read_tiktoken(str(file), None) if looks_like_ranks(read_bytes(file)) else read_sentencepiece(str(file))


def _describe(tokenizer: Tokenizer) -> Description | None:
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.description
    if isinstance(tokenizer, SentencePieceTokenizer):
        return describe_model(tokenizer.model)
    if isinstance(tokenizer, TiktokenTokenizer):
        return _describe_ranks(tokenizer)
    if isinstance(tokenizer, CharTokenizer):
        ids = {character: number for number, character in enumerate(tokenizer.characters)}
        special = {UNKNOWN: tokenizer.unk_id, **_special(tokenizer)}
        return describe(ids, [], special, pre_tokenizer=None, decoder={"type": "Fuse"}, unk_token=UNKNOWN)
    if isinstance(tokenizer, BpeTokenizer):
        ids = {token: number for number, token in enumerate(tokenizer.tokens)}
        return _describe_bytes(ids, tokenizer.merges, _special(tokenizer))
    if isinstance(tokenizer, ByteTokenizer):
        return _describe_bytes({letter: byte for byte, letter in enumerate(byte_alphabet())}, [], _special(tokenizer))
    return None


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    assert tokenizer.bos_id is not None and tokenizer.eos_id is not None, "only of tokenizers made here"
    return {BOS: tokenizer.bos_id, EOS: tokenizer.eos_id}


def _describe_bytes(ids: dict[str, int], merges: list[tuple[str, str]], special: dict[str, int]) -> Description:
    return describe(ids, merges, special, pre_tokenizer=byte_level(None), decoder=byte_level_decoder())


def _describe_ranks(tokenizer: TiktokenTokenizer) -> Description:
    """BPE with every pair of tokens that makes a token, in the order of ranks; a word that is a token is taken whole."""
    letters, rules = byte_alphabet(), PATTERNS[tokenizer.pattern]
    ranks = {token: rank for rank, token in enumerate(tokenizer.ranks)}
    words = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in tokenizer.ranks:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return describe(
        {words[token]: rank for token, rank in ranks.items()},
        [(words[left], words[right]) for left, right in merges],
        tokenizer.special,
        pre_tokenizer=byte_level(rules.portable_regex or rules.regex),
        decoder=byte_level_decoder(),
        normalizer={"type": "NFC"} if rules.composes else None,
        ignore_merges=True,
    )


def _names(tokenizer: Tokenizer, description: Description) -> dict[str, str]:
    """Spellings of the special tokens, by their keys in tokenizer_config.json."""
    if isinstance(tokenizer, FileTokenizer):
        spelled = tokenizer.special
    else:
        spelled = {token["content"]: token["id"] for token in description["added_tokens"]}
    roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "unk_token": getattr(tokenizer, "unk_id", None)}
    by_id = {number: name for name, number in spelled.items()}
    return {role: by_id[number] for role, number in roles.items() if number in by_id}


def bos_in_front(name: str, number: int) -> Description:
    """A post-processor of tokenizer.json that puts a special token before every text."""
    mark, text = {"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = [{"SpecialToken": {"id": name, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {name: {"id": name, "ids": [number], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": [mark, text], "pair": [mark, text, *second], "special_tokens": special}


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8")
