"""Tokenizers in a Hugging Face model folder: transformers reads the same ids from it, and so do we."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from helpers.tokenizer_files import (
    NASTY,
    SPELLED,
    adds_marks,
    byte_level_json,
    corpus,
    metaspace_json,
    rank_lines,
    ranks,
    sentencepiece_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import BpeTokenizerConfig, CharTokenizerConfig
from llmtrain.data.sentencepiece_model import parse_model
from llmtrain.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    IdTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    train_tokenizer,
)
from llmtrain.data.tokenizer_export import huggingface_files, tokenizer_of_folder
from llmtrain.data.tokenizer_tiktoken import PATTERNS

PLAIN = [*(text for text in NASTY if text != SPELLED), "zqzq xzqzq", "x  \n  y", "x\n \n  "]
RANKS = [*ranks(), b"\n ", b"\n  ", b"zqzq"]
"""Also white space of two kinds, and a word that no merge leads to."""


def tokenizers() -> dict[str, Tokenizer]:
    """One of every kind that has text."""
    marked = byte_level_json(("<s>", "</s>"), first=True)
    found: dict[str, Tokenizer] = {
        "byte": ByteTokenizer(),
        "char": train_tokenizer(CharTokenizerConfig(), lambda: [*corpus(), " '\n\t"]),
        "bpe": train_tokenizer(BpeTokenizerConfig(320), corpus),
        "file": FileTokenizer(byte_level_json(), 340, 340),
        "file that adds marks": FileTokenizer(adds_marks(marked, "<s>", "</s>"), 0, 1),
        "file without marks": FileTokenizer(byte_level_json(()), None, None),
        "file of metaspace": FileTokenizer(metaspace_json("unigram"), 1, 2),
    }
    found |= {f"tiktoken {pattern}": TiktokenTokenizer(RANKS, pattern) for pattern in PATTERNS}
    for algorithm in ("bpe", "unigram"):
        found[f"sentencepiece {algorithm}"] = SentencePieceTokenizer(sentencepiece_model(algorithm))
    changes = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True, "byte_fallback": False}
    found["sentencepiece that changes text"] = SentencePieceTokenizer(sentencepiece_model("bpe", **changes))
    squeezed = sentencepiece_model("bpe", remove_extra_whitespaces=True)
    found["sentencepiece that squeezes blanks"] = SentencePieceTokenizer(squeezed)
    for name, more in (("bare", {"add_dummy_prefix": False}), ("usual", {})):
        own = sentencepiece_model("unigram", user_defined_symbols=("<sep>",), **more)
        found[f"sentencepiece with user-defined pieces, {name}"] = SentencePieceTokenizer(own)
    return found


KINDS = tokenizers()


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    for name, content in huggingface_files(tokenizer).items():
        (path / name).write_bytes(content)
    return path


def test_transformers_gives_the_same_ids(tokenizer: Tokenizer, folder: Path) -> None:
    library = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*PLAIN, "\n".join(corpus()[:100]), "a<sep>b <sep> c"]
    expected = [ids.tolist() for ids in tokenizer.encode_many(texts)]
    assert library(texts, add_special_tokens=False).input_ids == expected
    assert (library.bos_token_id, library.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert "model_max_length" not in config and library.model_max_length > 10**20


def test_what_was_written_is_read_again(tokenizer: Tokenizer, folder: Path) -> None:
    again = tokenizer_of_folder(folder)
    assert isinstance(again, FileTokenizer)
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    texts = [*NASTY, *corpus()[:20]]
    assert [ids.tolist() for ids in again.encode_many(texts)] == [ids.tolist() for ids in tokenizer.encode_many(texts)]
    assert [again.decode(again.encode(text)) for text in corpus()] == [tokenizer.decode(tokenizer.encode(t)) for t in corpus()]
    assert again.cuts_at_words == (tokenizer.cuts_at_words and not isinstance(tokenizer, CharTokenizer))


@given(text=st.text(alphabet=st.characters(codec="utf-8", max_codepoint=0x2FFF), max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_text_has_the_same_ids(text: str) -> None:
    for name in ("byte", "char", "bpe", "tiktoken cl100k", "tiktoken o200k", "tiktoken gpt2", "sentencepiece bpe"):
        assert READ[name].encode(text).tolist() == KINDS[name].encode(text).tolist(), name


def written_and_read(tokenizer: Tokenizer) -> FileTokenizer:
    return FileTokenizer(json.loads(huggingface_files(tokenizer)["tokenizer.json"]), None, None)


READ = {name: written_and_read(tokenizer) for name, tokenizer in KINDS.items()}


def test_b31_begin_of_text_is_put_in_front_if_the_model_was_trained_with_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, content in huggingface_files(tokenizer, adds_bos=True).items():
        (tmp_path / name).write_bytes(content)
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("the cat").tolist()
    assert library("the cat", add_special_tokens=False).input_ids == ids
    if not isinstance(tokenizer, FileTokenizer):
        assert library("the cat").input_ids == [tokenizer.bos_id, *ids]
        assert library("the cat", "the cat").input_ids == [tokenizer.bos_id, *ids] * 2


def test_the_file_of_another_project_goes_out_as_it_came_in() -> None:
    body = adds_marks(byte_level_json(("<s>", "</s>")), "<s>", "</s>")
    files = huggingface_files(FileTokenizer(body, 340, 341), adds_bos=True)
    assert json.loads(files["tokenizer.json"]) == body
    model = sentencepiece_model("bpe")
    assert huggingface_files(SentencePieceTokenizer(model))["tokenizer.model"] == model


def test_plain_ids_have_no_files() -> None:
    assert huggingface_files(IdTokenizer(100, 7)) == {}


def test_folders_with_other_files(tmp_path: Path) -> None:
    assert tokenizer_of_folder(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model("bpe"))
    assert isinstance(tokenizer_of_folder(tmp_path), SentencePieceTokenizer)
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(rank_lines()))
    with pytest.raises(DataError, match="number tells how text is split"):
        tokenizer_of_folder(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(byte_level_json()["model"]["vocab"]), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    assert isinstance(tokenizer_of_folder(tmp_path), FileTokenizer)


def test_a_model_file_is_read_as_the_package_reads_it() -> None:
    import sentencepiece

    content = sentencepiece_model("unigram", user_defined_symbols=("<sep>",))
    model, library = parse_model(content), sentencepiece.SentencePieceProcessor(model_proto=content)
    assert [piece.text for piece in model.pieces] == [library.id_to_piece(i) for i in range(library.vocab_size())]
    assert [piece.score for piece in model.pieces] == [library.get_score(i) for i in range(library.vocab_size())]
    kinds = {1: "normal", 2: "unknown", 3: "control", 4: "normal", 6: "byte"}
    for number, piece in enumerate(model.pieces):
        told = {"unknown": library.is_unknown(number), "control": library.is_control(number), "byte": library.is_byte(number)}
        assert kinds[piece.kind] == next((kind for kind, true in told.items() if true), "normal")


@pytest.mark.parametrize("options", [{"algorithm": "char"}, {"algorithm": "word"}, {"treat_whitespace_as_suffix": True}])
def test_a_model_that_cannot_be_written_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(DataError, match="export of this SentencePiece model"):
        huggingface_files(SentencePieceTokenizer(sentencepiece_model(**options)))


def test_stored_tokenizers_give_the_same_ids_in_another_process() -> None:
    code = (
        "import json, sys\n"
        "from llmtrain.data.tokenizer import load_tokenizer\n"
        "stored, texts = json.load(sys.stdin)\n"
        "made = [load_tokenizer(one) for one in stored]\n"
        "print(json.dumps([[one.fingerprint, *(ids.tolist() for ids in one.encode_many(texts))] for one in made]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    given_to_it = json.dumps([[tokenizer.to_json() for tokenizer in KINDS.values()], NASTY])
    done = subprocess.run([sys.executable, "-c", code], input=given_to_it, capture_output=True, text=True, check=True)
    expected = [[one.fingerprint, *(ids.tolist() for ids in one.encode_many(NASTY))] for one in KINDS.values()]
    assert json.loads(done.stdout) == expected
