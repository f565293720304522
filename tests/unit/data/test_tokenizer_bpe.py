"""Training byte-pair encoding: the same text gives the same merges, in any batches, on any number of threads."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest
import tokenizers
from helpers.tokenizer_files import byte_level_json, corpus

from llmtrain.config.typed_data import BpeTokenizerConfig
from llmtrain.data import tokenizer_bpe
from llmtrain.data.tokenizer import BpeTokenizer, FileTokenizer, train_tokenizer
from llmtrain.data.tokenizer_bpe import BLOCK_CHARACTERS, MIN_PAIR_COUNT, train_bpe


def reference_merges(texts: list[str], num_merges: int) -> list[tuple[str, str]]:
    """The merges by the definition: join the most frequent pair, of equals the one of the lowest ids, and count again."""
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [list(word) for text in texts for word, _ in split.pre_tokenize_str(text)]
    ids = {letter: number for number, letter in enumerate(sorted(split.alphabet()))}
    merges: list[tuple[str, str]] = []
    while len(merges) < num_merges:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
        if counts[best] < MIN_PAIR_COUNT:
            return merges
        merges.append(best)
        ids["".join(best)] = len(ids)
        words = [joined(word, best) for word in words]
    return merges


def joined(word: list[str], pair: tuple[str, str]) -> list[str]:
    found: list[str] = []
    place = 0
    while place < len(word):
        together = tuple(word[place : place + 2]) == pair
        found.append("".join(pair) if together else word[place])
        place += 2 if together else 1
    return found


def test_merges_are_those_of_the_definition() -> None:
    texts = list(corpus(600))
    made = train_bpe(300, texts)
    assert made.merges == reference_merges(texts, 42)
    assert made.vocab_size == 300


def test_rare_pairs_are_not_merged() -> None:
    assert train_bpe(400, ["abcdefg hijk"]).merges == []
    assert train_bpe(400, ["ab ab"]).merges == [("a", "b")]


def test_the_order_and_number_of_texts_do_not_matter() -> None:
    texts = list(corpus())
    one = train_bpe(330, texts)
    assert train_bpe(330, reversed(texts)).fingerprint == one.fingerprint
    assert train_bpe(330, ["\n".join(texts)]).vocab_size == one.vocab_size


@pytest.mark.parametrize("threads", ["1", "2", "7"])
def test_the_same_text_gives_the_same_merges(threads: str) -> None:
    code = (
        "from helpers.tokenizer_files import corpus\n"
        "from llmtrain.data.tokenizer_bpe import train_bpe\n"
        "print(train_bpe(330, corpus() * 3).fingerprint)\n"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(("tests", "."))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == train_bpe(330, corpus() * 3).fingerprint


def test_texts_are_read_once_and_the_wait_after_them_is_said() -> None:
    events: list[str] = []

    def texts():
        events.append("opened")
        yield from corpus()
        events.append("read")

    train_tokenizer(BpeTokenizerConfig(300), texts, events.append)
    assert events == ["opened", "read", "learning the vocabulary: merging pairs"]


@pytest.mark.parametrize("letter", ["x", "日", "7", " "])
def test_b33_a_giant_word_is_cut_for_the_trainer(letter: str) -> None:
    giant = letter * (500 * BLOCK_CHARACTERS)
    made = train_bpe(330, [*corpus(), "the" + giant + "cat", "a short one"])
    text = "the" + giant + "cat"
    pieces = [text[place : place + BLOCK_CHARACTERS] for place in range(0, len(text), BLOCK_CHARACTERS)]
    assert made.fingerprint == train_bpe(330, [*corpus(), *pieces, "a short one"]).fingerprint
    assert made.decode(made.encode(giant)) == giant


def test_b32_ids_above_16_bits_survive() -> None:
    words = {f"w{number}": number for number in range(70000)}
    body = byte_level_json(())
    body["pre_tokenizer"], body["decoder"] = {"type": "WhitespaceSplit"}, None
    body["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = FileTokenizer(body, None, 69999)
    assert tokenizer.vocab_size == 70000
    ids = tokenizer.encode("w65535 w65536 w69998 w4464")
    assert ids.tolist() == [65535, 65536, 69998, 4464] and ids.itemsize == 8
    assert tokenizer.decode(ids) == "w65535 w65536 w69998 w4464"


def test_a_large_vocabulary_is_stored_whole() -> None:
    tokens = [*BYTES, *(f"{BYTES[left]}{BYTES[right]}" for left in range(256) for right in range(256))]
    made = BpeTokenizer(tokens, [(BYTES[left], BYTES[right]) for left in range(256) for right in range(256)])
    assert (made.vocab_size, made.eos_id) == (65794, 65793)
    stored = json.dumps(made.to_json(), sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(stored.encode()).hexdigest() == made.fingerprint
    assert int(made.encode("\x7f\x7f").max()) < 65792


BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_ctrl_c_ends_the_process_while_the_library_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library does not come back to Python for a minute, and until then Python would not see the signal."""
    seen = []
    plain = tokenizer_bpe._trainable

    def looking(texts: Iterable[str], progress: Callable[[str], None]) -> Iterator[str]:
        seen.append(signal.getsignal(signal.SIGINT))
        yield from plain(texts, progress)

    monkeypatch.setattr(tokenizer_bpe, "_trainable", looking)
    before = signal.getsignal(signal.SIGINT)
    train_tokenizer(BpeTokenizerConfig(300), lambda: ["some text to learn from"])
    assert seen == [signal.SIG_DFL] and signal.getsignal(signal.SIGINT) is before
