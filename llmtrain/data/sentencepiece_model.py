"""The content of a SentencePiece model file, and the same tokenizer as a description of the `tokenizers` package.

A model file is a protocol buffer (google/sentencepiece, src/sentencepiece_model.proto); what is needed of it is read here, since the
`sentencepiece` package shows pieces and scores but not how text is normalised.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from llmtrain.config.errors import DataError, Problem
from llmtrain.data.tokenizer_json import Description, added_token, describe

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_BLANK = "\u2581"


@dataclass
class Piece:
    """A token: its text, its score (log-probability, or minus the place of its merge) and what kind of token it is."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass
class Model:
    """The fields of a model file that decide ids; defaults are those of the format."""

    pieces: list[Piece] = field(default_factory=list)
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    blank_behind: bool = False
    """Whether the blank belongs to the word before it."""
    charsmap: bytes = b""
    """Compiled table of what the normaliser replaces."""
    blank_in_front: bool = True
    """Whether a text gets a blank in front."""
    squeezes_blanks: bool = True
    """Whether blanks at either end go and runs of them become one."""


def parse_model(content: bytes) -> Model:
    """Read a model file."""
    model = Model()
    for number, value in _fields(content):
        if number == 1:
            model.pieces.append(_piece(value))
        elif number == 2:
            trainer = dict(_fields(value))
            model.algorithm = trainer.get(3, UNIGRAM)
            model.byte_fallback = bool(trainer.get(35, 0))
            model.blank_behind = bool(trainer.get(24, 0))
        elif number == 3:
            normalizer = dict(_fields(value))
            model.charsmap = normalizer.get(2, b"")
            model.blank_in_front = bool(normalizer.get(3, 1))
            model.squeezes_blanks = bool(normalizer.get(4, 1))
    return model


class Edges:
    """Places at which a text falls into parts that a BPE model treats independently: no piece reaches over them.

    There are none for other algorithms, whose choices weigh the whole text, and none if the normaliser changes text.
    """

    def __init__(self, model: Model) -> None:
        self._exist = model.algorithm == BPE and not (model.charsmap or model.squeezes_blanks or model.blank_behind)
        texts = [piece.text for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED, UNUSED)]
        self._known = {text for text in texts if len(text) == 1}
        self._inside = {text[place : place + 2] for text in texts for place in range(len(text) - 1)}

    def next_after(self, text: str, place: int) -> int:
        """The first such place of a text at or after `place`, else its end."""
        if not self._exist:
            return len(text)
        for cut in range(place, len(text)):
            before, after = (_BLANK if letter == " " else letter for letter in text[cut - 1 : cut + 1])
            # Unknown characters in a row become one token, so one side has to be known.
            if before in self._known and before + after not in self._inside:
                return cut
        return len(text)


def describe_model(content: bytes) -> Description:
    """The description of a tokenizer that gives text the ids the model gives it; docs/tokenizers.md has the exceptions.

    Raises:
        DataError: the model is of an algorithm (words, characters) or has a rule for blanks that the library does not have.
    """
    model = parse_model(content)
    if model.algorithm not in (UNIGRAM, BPE) or model.blank_behind:
        rule = "the package tokenizers knows SentencePiece models of unigrams and BPE with blanks in front of words only"
        raise DataError(Problem("export of this SentencePiece model", rule, "share the model file as it is"))
    names = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = next(piece.text for piece in model.pieces if piece.kind == UNKNOWN)
    normalizer, pre_tokenizer = _blanks(model)
    common = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": _decoder(model)}
    if model.algorithm == BPE:
        flags = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": model.byte_fallback}
        description = describe(names, _merges(model), {}, **common, **flags)
    else:
        pieces = [[piece.text, piece.score] for piece in model.pieces]
        description = describe({}, [], {}, **common)
        description["model"] = {
            "type": "Unigram",
            "unk_id": names[unknown],
            "vocab": pieces,
            "byte_fallback": model.byte_fallback,
        }
    kinds = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    description["added_tokens"] = [
        added_token(piece.text, number, special=kinds[piece.kind])
        for number, piece in enumerate(model.pieces)
        if piece.kind in kinds
    ]
    return description


def _merges(model: Model) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score first: that is the order in which SentencePiece joins them."""
    usable = {piece.text: piece.score for piece in model.pieces if piece.kind in (NORMAL, UNUSED)}
    found = []
    for text, score in usable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in usable and right in usable:
                found.append((-score, left, right))
    return [(left, right) for _, left, right in sorted(found, key=lambda merge: merge[0])]


def _blanks(model: Model) -> tuple[Description, Description | None]:
    """Normaliser and pre-tokenizer: what is replaced, where blanks go, and the letter that is written for them."""
    steps: list[Description] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.squeezes_blanks:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    user_defined = any(piece.kind == USER_DEFINED for piece in model.pieces)
    if model.blank_in_front and not user_defined:
        steps.append({"type": "Prepend", "prepend": _BLANK})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _BLANK})
    if not (model.blank_in_front and user_defined):
        return {"type": "Sequence", "normalizers": steps}, None
    # A normaliser would put a blank in front of every stretch between user-defined pieces, and Metaspace puts none before a blank
    # of its own letter. So one Metaspace writes an ordinary blank at the begin of the text, where none is left, and one turns it.
    metaspace = {"type": "Metaspace", "split": False}
    first = {**metaspace, "replacement": " ", "prepend_scheme": "first"}
    second = {**metaspace, "replacement": _BLANK, "prepend_scheme": "never"}
    return {"type": "Sequence", "normalizers": steps}, {"type": "Sequence", "pretokenizers": [first, second]}


def _decoder(model: Model) -> Description:
    steps: list[Description] = [{"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}]
    if model.byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if model.blank_in_front:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _piece(content: bytes) -> Piece:
    fields = dict(_fields(content))
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    return Piece(fields.get(1, b"").decode("utf-8"), score, fields.get(3, NORMAL))


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of one message: an int, or the bytes of anything else."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        wire = key & 7
        if wire == 0:
            value, place = _varint(content, place)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if size is None:
            size, place = _varint(content, place)
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
