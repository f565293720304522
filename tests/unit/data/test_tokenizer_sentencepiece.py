"""SentencePiece models: equal to the library, whole documents only, control pieces never made from text."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from helpers.tokenizer_files import NASTY, SPELLED, corpus, rank_lines, sentencepiece_model
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import SentencePieceTokenizerConfig
from llmtrain.data import tokenizer_sentencepiece
from llmtrain.data.sentencepiece_model import Edges, parse_model
from llmtrain.data.tokenizer import SentencePieceTokenizer, load_tokenizer, make_tokenizer

READY = {algorithm: SentencePieceTokenizer(sentencepiece_model(algorithm)) for algorithm in ("bpe", "unigram")}


@pytest.fixture(params=READY)
def tokenizer(request: pytest.FixtureRequest) -> SentencePieceTokenizer:
    return READY[request.param]


def test_ids_are_those_of_the_library(tokenizer: SentencePieceTokenizer) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    texts = [*NASTY, *corpus()[:20]]
    assert [ids.tolist() for ids in tokenizer.encode_many(texts)] == [library.encode(text, out_type=int) for text in texts]
    assert tokenizer.vocab_size == library.vocab_size()
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)


@given(text=st.one_of(st.text(max_size=40), st.text(alphabet="</s>unk \n▁", max_size=30)))
@settings(max_examples=100, deadline=None)
def test_every_text_comes_back_and_makes_no_control_piece(text: str) -> None:
    for tokenizer in READY.values():
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int64 and not {1, 2} & set(ids.tolist())
        # The letter that stands for a blank is read as one.
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")


def test_b31_text_that_spells_a_special_token_stays_text(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.encode(SPELLED).tolist()
    assert not {0, 1, 2} & set(ids)
    assert tokenizer.decode([1, *ids, 2, 10**6]) == SPELLED
    assert tokenizer.decode([]) == ""


def test_a_cut_between_words_would_change_ids(tokenizer: SentencePieceTokenizer) -> None:
    assert not tokenizer.cuts_at_words
    assert [*tokenizer.encode("the cat"), *tokenizer.encode(" sat")] != tokenizer.encode("the cat sat").tolist()


CUT = {
    "byte fallback": SentencePieceTokenizer(sentencepiece_model("bpe")),
    "unknown characters": SentencePieceTokenizer(sentencepiece_model("bpe", byte_fallback=False)),
    "pieces of the user": SentencePieceTokenizer(sentencepiece_model("bpe", user_defined_symbols=("cat sat", "日本x"))),
    "over words": SentencePieceTokenizer(sentencepiece_model("bpe", split_by_whitespace=False, add_dummy_prefix=False)),
    "changed text": SentencePieceTokenizer(sentencepiece_model("bpe", normalization_rule_name="nmt_nfkc")),
    "blanks squeezed": SentencePieceTokenizer(sentencepiece_model("bpe", remove_extra_whitespaces=True)),
    "unigram": READY["unigram"],
}


@given(
    text=st.one_of(st.text(max_size=60), st.text(alphabet="the cat sat on 日本x\né", max_size=80), st.sampled_from(corpus()))
)
@settings(max_examples=150, deadline=None)
def test_b33_stretches_have_the_ids_of_the_whole(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_sentencepiece, "STRETCH_CHARACTERS", 3)
        for name, tokenizer in CUT.items():
            library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
            assert tokenizer.encode(text).tolist() == library.encode(text, out_type=int), name


def test_b33_a_long_text_is_cut_between_words() -> None:
    text = " ".join(corpus())
    edges = Edges(parse_model(CUT["byte fallback"].model))
    assert text[edges.next_after(text, 100)] == " " and edges.next_after(text, 100) < 130
    assert Edges(parse_model(READY["unigram"].model)).next_after(text, 100) == len(text)


def test_a_model_without_marks() -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model("bpe", bos_id=-1, eos_id=-1))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_stored_and_pickled_forms_are_the_same_tokenizer(tokenizer: SentencePieceTokenizer) -> None:
    for again in (load_tokenizer(json.loads(json.dumps(tokenizer.to_json()))), pickle.loads(pickle.dumps(tokenizer))):
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(SPELLED).tolist() == tokenizer.encode(SPELLED).tolist()
    assert READY["bpe"].fingerprint != READY["unigram"].fingerprint


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(READY["bpe"].model)
    for path in (tmp_path, file):
        made = make_tokenizer(SentencePieceTokenizerConfig(str(path)))
        assert made is not None and made.fingerprint == READY["bpe"].fingerprint


@pytest.mark.parametrize("content", [b"", b"hello", b"\x0a\x02\x0a", None], ids=["empty", "text", "cut", "half"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    model = READY["bpe"].model
    (tmp_path / "tokenizer.model").write_bytes(model[: len(model) // 2] if content is None else content)
    with pytest.raises(DataError, match="no SentencePiece model"):
        make_tokenizer(SentencePieceTokenizerConfig(str(tmp_path)))


def test_ranks_under_the_same_name_are_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(rank_lines()))
    with pytest.raises(DataError, match="tokenizer=tiktoken"):
        make_tokenizer(SentencePieceTokenizerConfig(str(tmp_path)))
