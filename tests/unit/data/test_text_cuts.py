"""Pieces of a text, and that the ids of the pieces are those of the whole, in any script."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.typed_data import BpeTokenizerConfig
from llmtrain.data import text_cuts
from llmtrain.data.text_cuts import last_cut, piece_end
from llmtrain.data.tokenizer import Tokenizer, train_tokenizer
from llmtrain.data.tokenizer_tiktoken import TiktokenTokenizer

KINDS = ["bpe", "gpt2", "cl100k", "o200k", "llama3", "qwen"]
SCRIPTS = {
    "Greek": "αβγδ εζηθ ικλμ· νξοπ; ρστυ",
    "Cyrillic": "абвг дежз ийкл, мноп рсту",
    "Chinese": "中文没有空格。标点，后面\n第一章 开始\n人人生而自由",
    "marks": "e\u0301 o\u0301\n हिन्दी में ١٢ x²\n",
    "mixed": "один two 三 τέσσερα, 5 — шесть!\n",
}

LETTERS = st.sampled_from(list("".join(SCRIPTS.values())))
ENDS = st.sampled_from([before + after for before in "。，·—²٢\u0301é日" for after in ("\n", " ", "\n\n", " \n")])


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        stop = piece_end(lambda low, high: data[low:high], start, len(data), size)
        yield data[start:stop]
        start = stop


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """One that has learnt to join what stands in these scripts, white space after punctuation too."""
    texts = [(text + " " + text[::-1]) * 9 for text in SCRIPTS.values()]
    if kind == "bpe":
        return train_tokenizer(BpeTokenizerConfig(600), lambda: texts)
    joined = [a + b for a in ("。", "，", "·", ";", "—", "!", "\u0301", "²") for b in ("\n", " ", "。")]
    ranks = {bytes([value]): None for value in range(256)}
    for piece in [*(word for text in texts for word in text.split()), *joined, " \n", "\n "]:
        # Every beginning is a token, so that the whole is reached by merges.
        ranks |= {piece.encode()[:stop]: None for stop in range(2, len(piece.encode()) + 1)}
    return TiktokenTokenizer(list(ranks), kind)


@given(letters=st.lists(st.one_of(LETTERS, LETTERS, ENDS), max_size=200), size=st.integers(8, 60))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_change_no_id_in_any_script(kind: str, letters: list[str], size: int) -> None:
    text, tokenizer = "".join(letters), tokenizer_of(kind)
    found = [i for piece in pieces(text.encode(), size) for i in tokenizer.encode(piece.decode()).tolist()]
    assert found == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", ["Greek", "Cyrillic", "Chinese", "mixed"])
def test_text_of_every_script_is_cut_between_its_words(script: str, kind: str) -> None:
    text, tokenizer = (SCRIPTS[script] + " ") * 50, tokenizer_of(kind)
    parts = [piece.decode() for piece in pieces(text.encode(), 64)]
    assert len(parts) > 20 and all(part[-1].isalnum() and part[0].isspace() for part in parts[1:-1])
    assert [i for part in parts for i in tokenizer.encode(part).tolist()] == tokenizer.encode(text).tolist()


@given(
    words=st.lists(st.tuples(st.sampled_from("aé日。"), st.integers(1, 90), st.sampled_from([" ", "\n", ""])), max_size=12),
    sizes=st.tuples(st.integers(8, 300), st.integers(8, 300)),
)
@settings(max_examples=400, deadline=None)
def test_words_that_are_too_long_are_cut_alike_in_pieces_of_any_length(
    words: list[tuple[str, int, str]], sizes: tuple[int, int]
) -> None:
    """So `prepare.shard_bytes` changes no token: a cut within a word is there whatever the pieces are."""
    data = "".join(letter * count + space for letter, count, space in words).encode()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_cuts, "LONGEST_WORD_BYTES", 60)
        patch.setattr(text_cuts, "BLOCK_BYTES", 40)
        for size in sizes:
            blocks = [block for piece in pieces(data, size) for block in pieces(piece, 40)]
            assert b"".join(blocks) == data
            ends = list(accumulate(map(len, blocks)))[:-1]
            found.append({end for end in ends if last_cut(data[max(0, end - 4) : end + 1]) != min(4, end)})
    assert found[0] == found[1]
