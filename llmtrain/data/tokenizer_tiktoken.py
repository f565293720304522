"""Byte-pair encoding from files of ranks, run by the `tiktoken` package: GPT-2, cl100k, o200k, Llama 3, Qwen.

A file has one line per token, its bytes in base64 and its rank, which is its id and the order in which merges apply. How text is
split before that, and which special tokens follow the ranks, is not in the file: the patterns here say it.
"""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.data.tokenizer_base import Tokenizer, cut_at, read_bytes, require_package, tokenizer_file, utf8

FILES = ("*.tiktoken", "tokenizer.model")
MAX_SPACES = 1 << 17
"""Longest run of white space given to the library at once; it fails from half a million on. Longer ones are cut: ids stay right
before and after the run, and inside it a token ends at every cut."""
_LONG_SPACE = re.compile(rf"\s{{{MAX_SPACES}}}(?=\s)")

_END = "<|endoftext|>"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AROUND_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Pattern:
    """What a file of ranks does not say."""

    num_ranks: int
    """Tokens in the published file, by which it is known."""
    regex: str
    """How text is split, as `tiktoken` reads it."""
    special: Mapping[str, int]
    """Special tokens → distance of their id from the number of ranks."""
    bos: str
    eos: str
    composes: bool = False
    """Whether text is brought into normal form C first."""
    portable_regex: str = ""
    """The same in the dialect of the `tokenizers` package, where that is another one."""


def _llama3_special() -> dict[str, int]:
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id"}
    named |= {8: "eom_id", 9: "eot_id", 10: "python_tag"}
    free = iter(range(256))
    return {f"<|{named[i]}|>" if i in named else f"<|reserved_special_token_{next(free)}|>": i for i in range(256)}


# Splits and special tokens: tiktoken's openai_public.py (MIT) for gpt2, cl100k and o200k; the tokenizers published with Llama 3.1
# and Qwen 2 for theirs. `\s++$` keeps cl100k equal to tiktoken where a text ends in white space.
PATTERNS = {
    "gpt2": Pattern(
        50256,
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        {_END: 0},
        _END,
        _END,
        portable_regex=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
    "cl100k": Pattern(
        100256,
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        {_END: 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4, "<|endofprompt|>": 20},
        _END,
        _END,
        portable_regex=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]"
        r"|\s+(?!\S)|\s",
    ),
    "o200k": Pattern(
        199998,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTIONS + "?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTIONS + "?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        {_END: 1, "<|endofprompt|>": 20},
        _END,
        _END,
    ),
    "llama3": Pattern(
        128000,
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AROUND_WORDS,
        _llama3_special(),
        "<|begin_of_text|>",
        "<|end_of_text|>",
    ),
    "qwen": Pattern(
        151643,
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AROUND_WORDS,
        {_END: 0, "<|im_start|>": 1, "<|im_end|>": 2},
        _END,
        _END,
        composes=True,
    ),
}


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by ranks, run by `tiktoken`; its encoder is given no special tokens, so text that spells one stays text.

    Models that end every document with their end-of-text token begin with it too: there `bos_id` is `eos_id`. With pattern qwen
    `decode(encode(text))` is the text in Unicode normal form C.
    """

    cuts_at_words = True

    def __init__(self, ranks: Sequence[bytes], pattern: str) -> None:
        """Tokens by rank, and a word of `PATTERNS`."""
        require_package("tiktoken")
        import tiktoken

        self.ranks, self.pattern = list(ranks), pattern
        rules = PATTERNS[pattern]
        self.special = {name: len(self.ranks) + distance for name, distance in rules.special.items()}
        self.bos_id, self.eos_id = self.special[rules.bos], self.special[rules.eos]
        self.vocab_size = max(self.special.values()) + 1
        numbers = {token: rank for rank, token in enumerate(self.ranks)}
        self._library = tiktoken.Encoding(pattern, pat_str=rules.regex, mergeable_ranks=numbers, special_tokens={})
        self._composes = rules.composes

    def encode(self, text: str) -> NDArray[np.int64]:
        utf8(text)
        if self._composes:
            text = unicodedata.normalize("NFC", text)
        parts = [self._library.encode_ordinary(part) for part in cut_at(text, _LONG_SPACE)]
        return np.concatenate([np.array(part, dtype=np.int64) for part in parts])

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if i < len(self.ranks)]
        return b"".join(self.ranks[i] for i in known).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        tokens = " ".join(base64.b64encode(token).decode() for token in self.ranks)
        return {"kind": "tiktoken", "pattern": self.pattern, "ranks": tokens}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TiktokenTokenizer:
        """The inverse of `to_json`."""
        return cls([base64.b64decode(token, validate=True) for token in stored["ranks"].split(" ")], stored["pattern"])

    def __reduce__(self) -> Any:
        return self.from_json, (self.to_json(),)


def read_tiktoken(path: str, pattern: str | None) -> TiktokenTokenizer:
    """The tokenizer of a file of ranks, or of the folder that holds it; pattern None = told by the number of ranks.

    Raises:
        DataError: no such file, a damaged one, or one whose pattern cannot be told.
        ConfigError: it lies in a home folder that is not there.
    """
    require_package("tiktoken")
    file = tokenizer_file(path, FILES)
    ranks = read_ranks(file)
    return TiktokenTokenizer(ranks, pattern or _pattern_of(file, len(ranks)))


def looks_like_ranks(content: bytes) -> bool:
    """Whether a file called `tokenizer.model` is text with ranks (Llama 3) and not a SentencePiece model."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} 0\r?\n", content) is not None


def read_ranks(file: Path) -> list[bytes]:
    """Tokens of a file in the order of their ranks.

    Raises:
        DataError: a line that is none, a rank or token that comes twice or is missing, named with its line.
    """
    ranks: dict[int, bytes] = {}
    lines: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(file).splitlines(), 1):
        if line:
            token, rank = _parse(line, file, number)
            if rank in ranks or token in lines:
                raise _damaged(
                    file, number, f"line {lines[ranks[rank] if rank in ranks else token]} has the same rank or token"
                )
            ranks[rank], lines[token] = token, number
    missing = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if missing is not None:
        raise _damaged(file, lines[ranks[max(ranks)]], f"ranks go up to {max(ranks)}, and none is {missing}")
    absent = next((byte for byte in range(256) if bytes([byte]) not in lines), None)
    if absent is not None:
        raise _damaged(file, len(lines), f"the file ends without a token for byte 0x{absent:02x}")
    return [ranks[rank] for rank in range(len(ranks))]


def _parse(line: bytes, file: Path, number: int) -> tuple[bytes, int]:
    words = line.split()
    try:
        if len(words) != 2 or not words[1].isdigit():
            raise ValueError("not two words, a token in base64 and its rank")
        token = base64.b64decode(words[0], validate=True)
        if not token:
            raise ValueError("the token is empty")
    except (ValueError, binascii.Error) as error:
        raise _damaged(file, number, str(error)) from error
    return token, int(words[1])


def _damaged(file: Path, line: int, rule: str) -> DataError:
    return DataError(Problem(f"{file}:{line}", rule, "tokenizer.path=FILE with ranks, or another tokenizer"))


def _pattern_of(file: Path, num_ranks: int) -> str:
    for word, pattern in PATTERNS.items():
        if pattern.num_ranks == num_ranks:
            return word
    known = ", ".join(f"{word} {pattern.num_ranks}" for word, pattern in PATTERNS.items())
    raise DataError(
        Problem(
            f"{file} with {num_ranks} ranks",
            f"the number tells how text is split, and this one is of none that is known ({known})",
            f"tokenizer.pattern={'|'.join(PATTERNS)}",
        )
    )
