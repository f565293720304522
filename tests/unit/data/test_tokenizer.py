"""Round trips, special ids, storage and availability of the tokenizers."""

from __future__ import annotations

import importlib.util
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import (
    BpeTokenizerConfig,
    ByteTokenizerConfig,
    CharTokenizerConfig,
    FileTokenizerConfig,
    IdTokenizerConfig,
    SentencePieceTokenizerConfig,
    StoredTokenizerConfig,
    TiktokenTokenizerConfig,
    TokenizerConfig,
)
from llmtrain.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    Tokenizer,
    availability,
    load_tokenizer,
    make_tokenizer,
    train_tokenizer,
)

TEXTS = ["the cat sat on the mat\n", "the hat, the bat;\r\n\tand a naïve 日本語 text", "a   b\n\n\nc  "] * 3
ALPHABET = "".join(sorted(set("".join(TEXTS))))


def trained(kind: str) -> Tokenizer:
    if kind == "byte":
        return ByteTokenizer()
    return train_tokenizer(CharTokenizerConfig() if kind == "char" else BpeTokenizerConfig(300), lambda: TEXTS)


@pytest.fixture(scope="module", params=["byte", "char", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return trained(request.param)


@given(text=st.text(alphabet=ALPHABET, max_size=60))
@settings(max_examples=60, deadline=None)
def test_round_trip_of_known_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int64
    assert len(ids) == 0 or (ids.min() >= 0 and ids.max() < min(tokenizer.bos_id, tokenizer.eos_id))
    assert [part.tolist() for part in tokenizer.encode_many([text, "cat"])] == [ids.tolist(), tokenizer.encode("cat").tolist()]


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_round_trip_of_any_text(kind: str, text: str) -> None:
    tokenizer = ByteTokenizer() if kind == "byte" else BPE
    assert tokenizer.decode(tokenizer.encode(text)) == text


BPE = trained("bpe") if availability()["bpe"].available else ByteTokenizer()


def test_stored_form_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    stored = json.loads(json.dumps(tokenizer.to_json()))
    again = load_tokenizer(stored)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.bos_id, again.eos_id) == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    text = "the naïve cat sat"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_fingerprints_differ() -> None:
    kinds = [ByteTokenizer(), CharTokenizer("ab"), CharTokenizer("abc"), trained("bpe"), IdTokenizer(258), IdTokenizer(300)]
    kinds.append(IdTokenizer(300, 299))
    assert len({tokenizer.fingerprint for tokenizer in kinds}) == len(kinds)


def test_byte_ids() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)
    assert tokenizer.encode("Aé").tolist() == [65, 0xC3, 0xA9]
    assert tokenizer.decode([256, 65, 0xC3, 257]) == "A\ufffd"


def test_char_has_one_unknown_token() -> None:
    tokenizer = trained("char")
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.vocab_size == len(ALPHABET) + 3
    assert tokenizer.encode("aΩb").tolist()[1] == tokenizer.unk_id
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("aΩb"), tokenizer.eos_id]) == "a\ufffdb"


def test_bpe_learns_merges_and_counts_its_special_tokens() -> None:
    tokenizer = trained("bpe")
    assert tokenizer.vocab_size <= 300
    assert tokenizer.bos_id == tokenizer.vocab_size - 2 and tokenizer.eos_id == tokenizer.vocab_size - 1
    assert len(tokenizer.encode("the")) < 3
    assert train_tokenizer(BpeTokenizerConfig(262), lambda: TEXTS).vocab_size == 262
    assert trained("bpe").fingerprint == tokenizer.fingerprint


def test_b31_text_that_spells_a_special_token_stays_text() -> None:
    spelled = "<|endoftext|> <s></s> <bos><eos> [BOS]"
    tokenizer = train_tokenizer(BpeTokenizerConfig(300), lambda: [spelled] * 20)
    for candidate in (tokenizer, ByteTokenizer()):
        ids = candidate.encode(spelled)
        assert not {candidate.bos_id, candidate.eos_id} & set(ids.tolist())
        assert candidate.decode(ids) == spelled


def test_ids_stand_in_for_text() -> None:
    tokenizer = IdTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (100, None, None)
    again = load_tokenizer(IdTokenizer(100, 7).to_json())
    assert (again.vocab_size, again.bos_id, again.eos_id) == (100, 7, 7)
    assert tokenizer.encode("17 5\n99").tolist() == [17, 5, 99]
    assert tokenizer.decode([17, 5, 99]) == "17 5 99"
    for text in ("17 cat", "100", "-1"):
        with pytest.raises(DataError, match="token numbers from 0 to 99"):
            tokenizer.encode(text)


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="character 1"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize("stored", [{"kind": "wordpiece"}, {}, {"kind": "char"}, {"kind": "bpe", "tokens": 5, "merges": []}])
def test_damaged_description_is_refused(stored: dict[str, object]) -> None:
    with pytest.raises(DataError, match="a stored tokenizer"):
        load_tokenizer(stored)


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability()["bpe"].available
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tokenizers" else find_spec(name, *rest)
    )
    state = availability()
    assert not state["bpe"].available and "pip install tokenizers" in state["bpe"].reason
    assert state["byte"].available and state["char"].available
    with pytest.raises(DataError, match="pip install tokenizers"):
        train_tokenizer(BpeTokenizerConfig(300), lambda: TEXTS)


PATHS: list[tuple[str, TokenizerConfig]] = [
    ("tokenizers", FileTokenizerConfig("t", None, None)),
    ("tiktoken", TiktokenTokenizerConfig("t", None)),
    ("sentencepiece", SentencePieceTokenizerConfig("t")),
]


@pytest.mark.parametrize("package, config", PATHS)
def test_a_missing_package_is_said_before_a_missing_file(
    package: str, config: TokenizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no such file"):
        make_tokenizer(config)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name, *rest))
    assert f"pip install {package}" in availability()[config.kind].reason
    with pytest.raises(DataError, match=f"pip install {package}"):
        make_tokenizer(config)


def test_what_text_or_data_decides_is_not_made_here() -> None:
    configs = (CharTokenizerConfig(), BpeTokenizerConfig(300), IdTokenizerConfig(None), StoredTokenizerConfig())
    assert [make_tokenizer(config) for config in configs] == [None] * 4
    assert isinstance(make_tokenizer(ByteTokenizerConfig()), ByteTokenizer)


def test_every_tokenizer_can_go_to_another_process(tokenizer: Tokenizer) -> None:
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode(ALPHABET).tolist() == tokenizer.encode(ALPHABET).tolist()


@given(text=st.text(alphabet=ALPHABET + "aZ9 .'\n", max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_cut_between_word_and_space_changes_no_id(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.cuts_at_words
    whole = tokenizer.encode(text).tolist()
    for place in range(1, len(text)):
        if text[place - 1].isascii() and text[place - 1].isalnum() and text[place] in " \t\n\r":
            assert [*tokenizer.encode(text[:place]), *tokenizer.encode(text[place:])] == whole
