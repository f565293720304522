"""Byte-level byte-pair encoding: trained on the data, run by the `tokenizers` package."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.tokenizer_base import Tokenizer, require_package, utf8

MIN_PAIR_COUNT = 2
"""A pair that stands in the text once is not merged."""
BLOCK_CHARACTERS = 1024
"""A block of this length without an edge of a word is a text of its own for the trainer, so that no word is twice as long. No token
is, and the trainer holds every place of a word: minutes and gigabytes for one of megabytes."""
_EDGE = re.compile(r"\s\S|\S\s")


class BpeTokenizer(Tokenizer):
    """Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes as in GPT-2, Radford et al. 2019), run by `tokenizers`.

    The library is given no special tokens, so text that spells one stays text.
    """

    cuts_at_words = True

    def __init__(self, tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> None:
        """Tokens by id (bytes written as in GPT-2's byte alphabet) and the merges in the order they apply."""
        require_package("bpe")
        from tokenizers import models

        self.tokens = list(tokens)
        self.merges = [(left, right) for left, right in merges]
        self.bos_id, self.eos_id, self.vocab_size = len(tokens), len(tokens) + 1, len(tokens) + 2
        ids = {token: index for index, token in enumerate(tokens)}
        self._library = _byte_level(models.BPE(vocab=ids, merges=self.merges))

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        for text in texts:
            utf8(text)
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._library.decode([int(i) for i in ids if i < self.bos_id], skip_special_tokens=False)
        return text

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bpe", "tokens": self.tokens, "merges": [list(merge) for merge in self.merges]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> BpeTokenizer:
        """The inverse of `to_json`."""
        return cls(stored["tokens"], stored["merges"])

    def __reduce__(self) -> Any:
        return self.from_json, (self.to_json(),)


def train_bpe(vocab_size: int, texts: Iterable[str], progress: Callable[[str], None] = lambda line: None) -> BpeTokenizer:
    """Learn merges until there are `vocab_size` tokens with the two special ones, or nothing is left to merge.

    Texts are read once, a few at a time; memory grows with the number of different words in them.
    """
    require_package("bpe")
    from tokenizers import models, pre_tokenizers, trainers

    library = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        min_frequency=MIN_PAIR_COUNT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    with _interruptible():
        library.train_from_iterator(_trainable(texts, progress), trainer)
    model = json.loads(library.to_str())["model"]
    return BpeTokenizer(sorted(model["vocab"], key=model["vocab"].__getitem__), model["merges"])


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process at once.

    The library does not return to Python while it learns, for a minute or more, and Python would notice the signal only then. Nothing
    is lost: what is learnt is kept when it is complete.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _trainable(texts: Iterable[str], progress: Callable[[str], None]) -> Iterator[str]:
    """The texts with every long word cut; says when the last one was read, since learning the merges comes after it."""
    for text in texts:
        utf8(text)
        yield from _cut_long_words(text)
    progress("learning the vocabulary: merging pairs")


def _cut_long_words(text: str) -> Iterator[str]:
    begin = 0
    for start in range(0, len(text), BLOCK_CHARACTERS):
        stop = start + BLOCK_CHARACTERS
        if _EDGE.search(text, start, stop) is None and len(text) > BLOCK_CHARACTERS:
            yield text[begin:start]
            yield text[start:stop]
            begin = stop
    yield text[begin:]


def _byte_level(model: Any) -> Any:
    """A `tokenizers.Tokenizer` that splits text as GPT-2 does, writes bytes as letters and undoes both when decoding."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    return library
