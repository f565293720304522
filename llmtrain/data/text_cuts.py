"""Where a long text may be cut so that the ids of the pieces are those of the whole.

A place lies after a letter, or an ASCII digit, and before ASCII white space. Tokenizers that say `cuts_at_words` never join across one:
the patterns of GPT-2, cl100k and their like put white space in one piece with punctuation before it, never with a letter.

Anything longer than LONGEST_WORD_BYTES without such a place is cut between two characters, every LONGEST_WORD_BYTES from where it
begins: its ids are not those of the whole, but the same however long the pieces are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 18
"""Text is read and encoded about this much at a time, so that a document of any size takes little memory."""
LONGEST_WORD_BYTES = 1 << 20
"""A piece may become as long, to end at a place."""
CUTS_VERSION = 2
"""Of the rule: part of the key of prepared tokens, since shards are cut by it."""
_CHARACTER_BYTES = 4
"""A character has at most as many."""

Read = Callable[[int, int], bytes]
"""Gives bytes [start, stop) of a text, all of them."""


def piece_end(read: Read, start: int, stop: int, piece_bytes: int) -> int:
    """Where a piece of the text [start, stop) ends that begins at `start`: the begin of the text, or where another piece ends.

    At the last place within `piece_bytes`; without one it is longer, up to the end of the word.
    """
    assert piece_bytes >= 8
    wanted = high = start + piece_bytes
    if wanted >= stop:
        return stop
    while high > start:
        low = max(start, high - BLOCK_BYTES)
        if cut := last_cut(read(low, high)):
            return low + cut
        high = low + _CHARACTER_BYTES if low > start else start
    end = start
    while end < wanted:
        end = _word_end(read, end, stop)
    return end


def _word_end(read: Read, start: int, stop: int) -> int:
    """The first place after `start`, at most LONGEST_WORD_BYTES on: the same in pieces of any length."""
    # One byte more: the white space after a word of that length.
    word = read(start, min(stop, start + LONGEST_WORD_BYTES + 1))
    if cut := first_cut(word):
        return start + cut
    return stop if stop - start <= LONGEST_WORD_BYTES else start + _last_character(word)


def last_cut(block: bytes) -> int:
    """The last place to cut at; after an ASCII letter or digit if there is one. 0 = none."""
    ascii_places, others = _places(block)
    if ascii_places.size:
        return int(ascii_places[-1])
    return next((place for place in reversed(others.tolist()) if _is_after_letter(block, place)), 0)


def first_cut(block: bytes) -> int:
    """The first place to cut at, 0 = none."""
    ascii_places, others = _places(block)
    first = int(ascii_places[0]) if ascii_places.size else 0
    earlier = others[: int(np.searchsorted(others, first))] if first else others
    return next((place for place in earlier.tolist() if _is_after_letter(block, place)), first)


def _places(block: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places before ASCII white space: after an ASCII letter or digit, and after anything that is not ASCII."""
    values = np.frombuffer(block, dtype=np.uint8)
    letter = values | 0x20
    word = ((letter >= 0x61) & (letter <= 0x7A)) | ((values >= 0x30) & (values <= 0x39))
    space = (values == 0x20) | ((values >= 0x09) & (values <= 0x0D))
    return np.flatnonzero(word[:-1] & space[1:]) + 1, np.flatnonzero((values[:-1] >= 0x80) & space[1:]) + 1


def _is_after_letter(block: bytes, place: int) -> bool:
    return block[max(0, place - _CHARACTER_BYTES) : place].decode("utf-8", errors="ignore")[-1:].isalpha()


def _last_character(block: bytes) -> int:
    """Where the last character of a block begins, the block as it may break off."""
    values = np.frombuffer(block, dtype=np.uint8)
    return int(np.flatnonzero(values & 0xC0 != 0x80)[-1])
