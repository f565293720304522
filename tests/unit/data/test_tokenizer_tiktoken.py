"""Files of ranks: read with every fault named, equal to tiktoken, as fast on strange text as on ordinary one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from helpers.tokenizer_files import NASTY, NUM_TOKENS, SPELLED, corpus, rank_lines, ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import TiktokenTokenizerConfig
from llmtrain.data.tokenizer import TiktokenTokenizer, load_tokenizer, make_tokenizer
from llmtrain.data.tokenizer_tiktoken import MAX_SPACES, PATTERNS


def read(path: Path, pattern: str | None = None) -> TiktokenTokenizer:
    made = make_tokenizer(TiktokenTokenizerConfig(str(path), pattern))
    assert isinstance(made, TiktokenTokenizer)
    return made


READY = {pattern: TiktokenTokenizer(ranks(), pattern) for pattern in PATTERNS}


@pytest.fixture(params=PATTERNS)
def tokenizer(request: pytest.FixtureRequest) -> TiktokenTokenizer:
    return READY[request.param]


@pytest.mark.parametrize("pattern, published", [("gpt2", "r50k_base"), ("cl100k", "cl100k_base"), ("o200k", "o200k_base")])
def test_patterns_are_those_of_tiktoken(pattern: str, published: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = PATTERNS[pattern]
    made_up = {index.to_bytes(4, "big"): index for index in range(rules.num_ranks)}
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *arguments, **more: made_up)
    original = openai_public.ENCODING_CONSTRUCTORS[published]()
    assert rules.regex == original["pat_str"]
    assert {name: rules.num_ranks + distance for name, distance in rules.special.items()} == original["special_tokens"]


def test_special_tokens_of_llama3_and_qwen() -> None:
    llama3, qwen = PATTERNS["llama3"], PATTERNS["qwen"]
    ids = {number + 128000: name for name, number in llama3.special.items()}
    assert sorted(ids) == list(range(128000, 128256))
    assert [ids[i] for i in (128000, 128001, 128009)] == ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    assert ids[128002] == "<|reserved_special_token_0|>" and ids[128255] == "<|reserved_special_token_247|>"
    assert qwen.num_ranks + qwen.special["<|endoftext|>"] == 151643


def test_begin_and_end(tokenizer: TiktokenTokenizer) -> None:
    special = {"gpt2": (0, 0), "cl100k": (1, 1), "o200k": (1, 1), "llama3": (0, 1), "qwen": (0, 0)}[tokenizer.pattern]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (NUM_TOKENS + special[0], NUM_TOKENS + special[1])
    assert (
        tokenizer.vocab_size == NUM_TOKENS + {"gpt2": 1, "cl100k": 21, "o200k": 21, "llama3": 256, "qwen": 3}[tokenizer.pattern]
    )


def test_ids_are_those_of_the_library(tokenizer: TiktokenTokenizer) -> None:
    numbers = {token: rank for rank, token in enumerate(ranks())}
    library = tiktoken.Encoding("x", pat_str=PATTERNS[tokenizer.pattern].regex, mergeable_ranks=numbers, special_tokens={})
    texts = [*NASTY, *corpus()[:20]]
    if tokenizer.pattern == "qwen":
        texts = [text for text in texts if "\u0301" not in text]
    assert [ids.tolist() for ids in tokenizer.encode_many(texts)] == [library.encode_ordinary(text) for text in texts]


def test_qwen_composes() -> None:
    assert READY["qwen"].encode("e\u0301").tolist() == READY["qwen"].encode("é").tolist()
    assert READY["gpt2"].encode("e\u0301").tolist() != READY["gpt2"].encode("é").tolist()


@given(text=st.one_of(st.text(max_size=40), st.text(alphabet="<|endoftx>_ \n'S1", max_size=30)))
@settings(max_examples=100, deadline=None)
def test_every_text_comes_back(text: str) -> None:
    for pattern, tokenizer in READY.items():
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64 and (len(ids) == 0 or ids.max() < NUM_TOKENS)
        assert pattern == "qwen" or tokenizer.decode(ids) == text


@given(text=st.text(alphabet="aZ9 \n\t'.-é日\u00a0/\r", max_size=40))
@settings(max_examples=150, deadline=None)
def test_a_cut_between_word_and_space_changes_no_id(text: str) -> None:
    for tokenizer in READY.values():
        assert tokenizer.cuts_at_words
        whole = tokenizer.encode(text).tolist()
        for place in range(1, len(text)):
            if text[place - 1].isascii() and text[place - 1].isalnum() and text[place] in " \t\n\r":
                assert [*tokenizer.encode(text[:place]), *tokenizer.encode(text[place:])] == whole


def test_b31_text_that_spells_a_special_token_stays_text(tokenizer: TiktokenTokenizer) -> None:
    ids = tokenizer.encode(SPELLED).tolist()
    assert max(ids) < NUM_TOKENS
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, 10**6]) == SPELLED
    assert tokenizer.decode([0xE6]) != "" and tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    "pattern, letter", [("gpt2", "\n"), ("cl100k", " "), ("llama3", "\u3000"), ("o200k", "A"), ("qwen", "日")]
)
def test_b33_giant_words_and_blanks(pattern: str, letter: str) -> None:
    tokenizer = READY[pattern]
    text = "a" + letter * (1_100_000 if letter.isspace() else 300_000) + "b"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    shorter = tokenizer.encode("a" + letter * MAX_SPACES + "b")
    assert ids[:9].tolist() == shorter[:9].tolist() and ids[-1] == shorter[-1]


def test_stored_and_pickled_forms_are_the_same_tokenizer(tokenizer: TiktokenTokenizer) -> None:
    for again in (load_tokenizer(json.loads(json.dumps(tokenizer.to_json()))), pickle.loads(pickle.dumps(tokenizer))):
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(SPELLED).tolist() == tokenizer.encode(SPELLED).tolist()
    assert len({other.fingerprint for other in READY.values()}) == len(READY)
    assert TiktokenTokenizer(ranks()[:-1], tokenizer.pattern).fingerprint != tokenizer.fingerprint


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(rank_lines()) + b"\n")
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        assert read(path, "llama3").fingerprint == READY["llama3"].fingerprint
    with pytest.raises(DataError, match=f"with {NUM_TOKENS} ranks\n.*gpt2 50256, cl100k 100256.*\n.*gpt2\\|cl100k"):
        read(tmp_path)
    for name in ("a.tiktoken", "b.tiktoken"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="any could be meant"):
        read(tmp_path)


def test_the_number_of_ranks_tells_the_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.tiktoken").write_bytes(b"\r\n".join(rank_lines()))
    monkeypatch.setitem(PATTERNS, "qwen", PATTERNS["qwen"].__class__(**{**vars(PATTERNS["qwen"]), "num_ranks": NUM_TOKENS}))
    assert read(tmp_path).pattern == "qwen"


DAMAGE = [
    (lambda lines: lines[:7] + [b"IQ== x"] + lines[8:], ":8", "not two words"),
    (lambda lines: lines[:7] + [b"IQ=="] + lines[8:], ":8", "not two words"),
    (lambda lines: lines[:7] + [b"I*Q 7"] + lines[8:], ":8", "base64|padding"),
    (lambda lines: lines[:7] + [b"= 7"] + lines[8:], ":8", "padding|empty"),
    (lambda lines: lines + [lines[7]], f":{NUM_TOKENS + 1}", "line 8 has the same"),
    (lambda lines: lines + [b"enp6enp6 3"], f":{NUM_TOKENS + 1}", "line 4 has the same"),
    (lambda lines: lines + [lines[7].split()[0] + b" %d" % NUM_TOKENS], f":{NUM_TOKENS + 1}", "line 8 has the same"),
    (lambda lines: lines[:300] + lines[301:], f":{NUM_TOKENS - 1}", "none is 300"),
    (lambda lines: lines[:200], ":200", "token for byte"),
    (lambda lines: [], ":0", "token for byte 0x00"),
]


@pytest.mark.parametrize("change, place, rule", DAMAGE)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, change: object, place: str, rule: str) -> None:
    file = tmp_path / "x.tiktoken"
    file.write_bytes(b"\n".join(change(rank_lines())))  # type: ignore[operator]
    with pytest.raises(DataError, match=rule) as caught:
        read(file, "gpt2")
    assert caught.value.problems[0].what == f"{file}{place}"
