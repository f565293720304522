"""Tokenizers of other projects: equal to the library, blind to special tokens in text, told apart by their ids."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from helpers.tokenizer_files import NASTY, SPELLED, adds_marks, byte_level_json, corpus, metaspace_json, write
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import FileTokenizerConfig
from llmtrain.data.tokenizer import FileTokenizer, load_tokenizer, make_tokenizer

PLAIN = [text for text in NASTY if text != SPELLED]


def read(path: Path, bos: str | None = None, eos: str | None = None) -> FileTokenizer:
    made = make_tokenizer(FileTokenizerConfig(str(path), bos, eos))
    assert isinstance(made, FileTokenizer)
    return made


def variants() -> dict[str, tuple[dict[str, Any], str, str]]:
    """Description, begin and end token of tokenizers that differ in what could go wrong around special tokens."""
    both, one = ("<s>", "</s>"), ("<|endoftext|>",)
    found = {
        "specials behind": (byte_level_json(both), *both),
        "specials in front": (byte_level_json(both, first=True), *both),
        "bos is eos": (byte_level_json(one), *one * 2),
        "metaspace bpe": (metaspace_json("bpe"), *both),
        "metaspace unigram": (metaspace_json("unigram"), *both),
        "words taken whole": (byte_level_json(both, first=True), *both),
    }
    found["words taken whole"][0]["model"]["ignore_merges"] = True
    found["words taken whole"][0]["pre_tokenizer"]["use_regex"] = False
    return {
        f"{name}, {'marks added' if marks else 'none added'}": (adds_marks(body, bos, eos) if marks else body, bos, eos)
        for (name, (body, bos, eos)), marks in itertools.product(found.items(), (False, True))
    }


VARIANTS = variants()


@pytest.fixture(scope="module", params=VARIANTS)
def tokenizer(request: pytest.FixtureRequest) -> FileTokenizer:
    body, bos, eos = VARIANTS[request.param]
    ids = {token["content"]: token["id"] for token in body["added_tokens"]}
    return FileTokenizer(body, ids[bos], ids[eos])


def test_ids_are_those_of_the_library(tokenizer: FileTokenizer) -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.description))
    texts = [*PLAIN, *corpus()[:20]]
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_many(texts)] == expected
    assert tokenizer.vocab_size == max(library.get_vocab(with_added_tokens=True).values()) + 1


@pytest.mark.parametrize("text", [SPELLED, "<s>", "</s>", "<|endoftext|>", "<s><s>a</s>", " <s> ", "x</s>"])
@pytest.mark.parametrize("bos, eos", list(itertools.product((False, True), repeat=2)))
def test_b31_special_tokens_come_from_the_framing_alone(tokenizer: FileTokenizer, text: str, bos: bool, eos: bool) -> None:
    ids = tokenizer.encode(text).tolist()
    framed = [tokenizer.bos_id] * bos + ids + [tokenizer.eos_id] * eos
    marks = {tokenizer.bos_id, tokenizer.eos_id}
    assert sum(token in marks for token in framed) == bos + eos
    decoded = tokenizer.decode(framed)
    # Metaspace writes a blank before every text, and takes one away again.
    byte_level = tokenizer.description["pre_tokenizer"]["type"] == "ByteLevel"
    assert decoded == (text if byte_level else text.removeprefix(" "))


@pytest.mark.parametrize("name", [name for name in VARIANTS if "metaspace" not in name])
@given(text=st.one_of(st.text(max_size=40), st.text(alphabet="<s>/|endoftx \n", max_size=30)))
@settings(max_examples=60, deadline=None)
def test_byte_level_gives_every_text_back(name: str, text: str) -> None:
    tokenizer = READY[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int64 and not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())


def ready(name: str) -> FileTokenizer:
    body, bos, eos = VARIANTS[name]
    ids = {token["content"]: token["id"] for token in body["added_tokens"]}
    return FileTokenizer(body, ids[bos], ids[eos])


READY = {name: ready(name) for name in VARIANTS if "metaspace" not in name}


def test_b31_not_even_the_hidden_name_of_a_special_token_makes_it(tokenizer: FileTokenizer) -> None:
    for number in tokenizer.special.values():
        text = f"the \U0010ffff special {number} cat"
        assert number == 0 or number not in tokenizer.encode(text).tolist()


def test_b31_a_text_that_would_make_a_special_token_is_refused() -> None:
    body = metaspace_json("unigram")
    body["pre_tokenizer"] = None
    body["model"]["vocab"] += [[letter, -1.0] for letter in "\U0010ffff 1"]
    with pytest.raises(DataError, match="becomes the special token '<s>'"):
        FileTokenizer(body, 1, 2).encode("\U0010ffff special 1")


def test_what_is_cut_filled_up_or_drawn_is_not() -> None:
    body = byte_level_json()
    plain = FileTokenizer(body, None, None)
    pad = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    odd = {**body, "padding": {**pad, "pad_token": "!"}, "truncation": cut, "model": {**body["model"], "dropout": 0.9}}
    text = corpus()[0]
    assert FileTokenizer(odd, None, None).encode(text).tolist() == plain.encode(text).tolist()


def test_added_tokens_of_text_are_found_and_keep_their_ids() -> None:
    body = byte_level_json(("<|endoftext|>",))
    end = body["added_tokens"][0]["id"]
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    body["added_tokens"].append({**shape, "id": end + 1, "content": "   ", "special": False})
    tokenizer = FileTokenizer(body, end, end)
    ids = tokenizer.encode("a   b<|endoftext|>").tolist()
    assert ids[1] == end + 1 and end not in ids
    assert tokenizer.decode(ids) == "a   b<|endoftext|>"


def test_an_unknown_character_is_one_unless_that_ends_a_text() -> None:
    body = metaspace_json("bpe")
    tokenizer = FileTokenizer(body, 1, 2)
    assert 0 in tokenizer.encode("cat \u4e00").tolist()
    assert tokenizer.decode(tokenizer.encode("cat \u4e00 sat")) == "cat  sat"
    ends = FileTokenizer(body, 1, 0)
    assert ends.encode("cat sat").tolist() == tokenizer.encode("cat sat").tolist()
    with pytest.raises(DataError, match="special token '<unk>'"):
        ends.encode("cat \u4e00")


def test_fingerprints_are_equal_exactly_if_ids_are() -> None:
    body = byte_level_json(("<s>", "</s>"))
    base = FileTokenizer(body, 340, 341)
    same = [
        FileTokenizer(adds_marks(body, "<s>", "</s>"), 340, 341),
        FileTokenizer(json.loads(json.dumps(byte_level_json(("<a>", "</a>")))), 340, 341),
        FileTokenizer({**body, "decoder": None}, 340, 341),
        FileTokenizer({**body, "model": {**body["model"], "merges": [" ".join(m) for m in body["model"]["merges"]]}}, 340, 341),
    ]
    assert [other.fingerprint == base.fingerprint for other in same] == [True] * 4
    fewer = json.loads(json.dumps(body))
    fewer["model"]["merges"].pop()
    other = [FileTokenizer(fewer, 340, 341), FileTokenizer({**body, "normalizer": {"type": "NFC"}}, 340, 341)]
    other += [FileTokenizer(body, None, 341), FileTokenizer(body, 340, 340)]
    assert len({tokenizer.fingerprint for tokenizer in (base, *other)}) == 5


def test_stored_and_pickled_forms_are_the_same_tokenizer(tokenizer: FileTokenizer) -> None:
    for again in (load_tokenizer(json.loads(json.dumps(tokenizer.to_json()))), pickle.loads(pickle.dumps(tokenizer))):
        assert again.fingerprint == tokenizer.fingerprint and again.cuts_at_words == tokenizer.cuts_at_words
        assert (again.vocab_size, again.bos_id, again.eos_id) == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
        assert again.encode(SPELLED).tolist() == tokenizer.encode(SPELLED).tolist()


SIDE_FILES: list[tuple[dict[str, Any], tuple[str | None, str | None]]] = [
    ({}, ("<s>", "</s>")),
    ({"tokenizer_config": {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}}, (None, "<|im_end|>")),
    ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, ("<s>", "<|im_end|>")),
    ({"tokenizer_config": {"bos_token": "</s>"}, "special_tokens_map": {"bos_token": "<s>"}}, ("</s>", "</s>")),
    ({"config": {"bos_token_id": 5, "eos_token_id": [342, 341]}}, ("<s>", "<|im_end|>")),
    ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": 342}}, ("<s>", "<|im_end|>")),
    ({"config": {"bos_token_id": 10**9, "eos_token_id": 17}}, ("<s>", "</s>")),
]


@pytest.mark.parametrize("files, marks", SIDE_FILES)
def test_marks_are_found_beside_the_file(tmp_path: Path, files: dict[str, Any], marks: tuple[str | None, str | None]) -> None:
    body = byte_level_json(("<s>", "</s>", "<|im_end|>"))
    ids = {None: None, **{token["content"]: token["id"] for token in body["added_tokens"]}}
    folder = write(tmp_path, tokenizer=body, **files)
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = read(path)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (ids[marks[0]], ids[marks[1]])
    given = read(folder, "<|im_end|>", "<s>")
    assert (given.bos_id, given.eos_id) == (ids["<|im_end|>"], ids["<s>"])


def test_no_marks_are_none(tmp_path: Path) -> None:
    tokenizer = read(write(tmp_path, tokenizer=byte_level_json(())))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)
    assert tokenizer.decode(tokenizer.encode(SPELLED)) == SPELLED
    both = read(write(tmp_path, tokenizer=byte_level_json(("<|endoftext|>",))))
    assert both.bos_id == both.eos_id == 340


def test_a_spelling_outside_the_vocabulary_is_refused_with_near_ones(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=byte_level_json(("<s>", "</s>")))
    with pytest.raises(DataError, match="eos_token=</S>\n.*no such token.*\n.*</s>"):
        read(tmp_path, eos="</S>")
    write(tmp_path, tokenizer_config={"bos_token": "<bos>"})
    with pytest.raises(DataError, match="bos_token '<bos>' in .*tokenizer_config.json"):
        read(tmp_path)
    assert read(tmp_path, bos="<s>").bos_id == 340


def write_pair(folder: Path, names: tuple[str, str] = ("vocab.json", "merges.txt"), **files: Any) -> dict[str, Any]:
    body = byte_level_json(("<|endoftext|>",))
    vocabulary = {**body["model"]["vocab"], "<|endoftext|>": 340}
    write(folder, **files)
    (folder / names[0]).write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in body["model"]["merges"]), ""]
    (folder / names[1]).write_text("\n".join(lines), encoding="utf-8")
    return body


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_vocabulary_and_merges_in_two_files(tmp_path: Path, names: tuple[str, str]) -> None:
    body = write_pair(tmp_path, names)
    whole = FileTokenizer(body, 340, 340)
    for path in (tmp_path, tmp_path / names[0], tmp_path / names[1]):
        tokenizer = read(path)
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.cuts_at_words) == (341, 340, 340, True)
        assert [ids.tolist() for ids in tokenizer.encode_many(NASTY)] == [ids.tolist() for ids in whole.encode_many(NASTY)]


def test_two_files_with_more_beside_them(tmp_path: Path) -> None:
    decoder = {"341": {"content": "<|im_end|>", "special": True}, "342": {"content": "<tool>", "special": False}}
    config = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|im_end|>", "bos_token": None}
    write_pair(tmp_path, tokenizer_config={**config, "added_tokens_decoder": decoder})
    tokenizer = read(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (None, 341, 343)
    ids = tokenizer.encode("12<tool><|im_end|>").tolist()
    assert 342 in ids and 341 not in ids
    assert tokenizer.description["normalizer"] == {"type": "NFC"}
    write(tmp_path, tokenizer_config={"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(DataError, match="does not say how CLIPTokenizer splits"):
        read(tmp_path)


DAMAGE: list[tuple[dict[str, str], str]] = [
    ({}, "the folder holds no tokenizer.json or vocab.json with merges.txt, only nothing"),
    ({"tokenizer.json": "{"}, "not JSON"),
    ({"tokenizer.json": "[]"}, "describes no model"),
    ({"tokenizer.json": '{"model": {"type": "Magic"}}'}, "cannot read it"),
    ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "no byte-level vocabulary"),
    ({"vocab.json": "[]", "merges.txt": ""}, "not a table"),
    ({"vocab.json": "{}"}, "only vocab.json"),
]


@pytest.mark.parametrize("files, message", DAMAGE)
def test_damaged_files_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_a_damaged_merge_is_named_with_its_line(tmp_path: Path) -> None:
    write_pair(tmp_path)
    lines = (tmp_path / "merges.txt").read_text(encoding="utf-8").split("\n")
    (tmp_path / "merges.txt").write_text("\n".join([*lines[:4], "q zzz", *lines[4:]]), encoding="utf-8")
    with pytest.raises(DataError, match="merges.txt:5"):
        read(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none.json")


def split(regex: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}


LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = {**LETTERS, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
CUTS: list[tuple[Any, Any, bool]] = [
    (None, GPT2, True),
    (None, None, False),
    (None, LETTERS, False),
    (None, {**GPT2, "add_prefix_space": True}, False),
    (None, {"type": "Sequence", "pretokenizers": [DIGITS, GPT2]}, True),
    (None, {"type": "Sequence", "pretokenizers": [DIGITS, LETTERS]}, False),
    (None, {"type": "Sequence", "pretokenizers": [split(r"\s?\w+"), LETTERS]}, False),
    (None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}, False),
    ({"type": "NFC"}, GPT2, True),
    ({"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]}, GPT2, True),
    ({"type": "Prepend", "prepend": "▁"}, GPT2, False),
    ({"type": "Strip", "strip_left": True, "strip_right": True}, GPT2, False),
]


@pytest.mark.parametrize("normalizer, pre_tokenizer, expected", CUTS)
def test_only_known_steps_let_text_be_cut(normalizer: Any, pre_tokenizer: Any, expected: bool) -> None:
    body = {**byte_level_json(), "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    assert FileTokenizer(body, None, None).cuts_at_words is expected


def test_an_added_token_over_a_cut_forbids_it() -> None:
    body = byte_level_json()
    shape = {"id": 341, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for more, expected in (({"content": "  "}, True), ({"content": "a b"}, False), ({"content": "x", "rstrip": True}, False)):
        changed = {**body, "added_tokens": [*body["added_tokens"], {**shape, **more}]}
        assert FileTokenizer(changed, None, None).cuts_at_words is expected


@given(text=st.text(alphabet="aZ9 \n\t'.-é日\u00a0/", max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_cut_between_word_and_space_changes_no_id(text: str) -> None:
    for tokenizer in READY.values():
        if not tokenizer.cuts_at_words:
            continue
        whole = tokenizer.encode(text).tolist()
        for place in range(1, len(text)):
            if text[place - 1].isascii() and text[place - 1].isalnum() and text[place] in " \t\n":
                assert [*tokenizer.encode(text[:place]), *tokenizer.encode(text[place:])] == whole
