"""Tokenizer files of every kind, made in a moment from a few kilobytes: what published models come with, but small."""

from __future__ import annotations

import base64
import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

SPELLED = "<s>a</s> <|endoftext|> <|begin_of_text|><|end_of_text|> <unk> [BOS]<|im_end|>x"
"""Text that spells special tokens."""
NASTY = [
    "",
    " ",
    "\n",
    "a\n  ",
    "  lead and trail \r\n\t ",
    "don't I'LL we'Re 'S ſ'ſ",
    "1234567 ½² 3.14",
    "naïve e\u0301 日本語 \U0001f600\u200d\U0001f525",
    "\0\x01\x7f\x85\u2028",
    "a" * 300,
    " " * 300 + "x",
    "--- !!! \n\n\n ///\r\n",
    SPELLED,
]
NUM_TOKENS = 340
"""Of a byte-level tokenizer, without special tokens that follow."""
_WORDS = "the cat sat on a mat with naïve 日本 don't they'll run 12 345 times; 'quoted' words, and\tmore\nlines — ok!".split(
    " "
)


@cache
def corpus(num_words: int = 3000) -> tuple[str, ...]:
    """Lines of repeating words."""
    draw = random.Random(0)
    words = [draw.choice(_WORDS) for _ in range(num_words)]
    return tuple(" ".join(words[place : place + 12]) for place in range(0, num_words, 12))


@cache
def _byte_level_json(special: tuple[str, ...], first: bool) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    begins = list(special) if first else []
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=alphabet, special_tokens=begins, show_progress=False)
    library.train_from_iterator([*corpus(), *[SPELLED] * 50], trainer)
    if not first:
        library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return library.to_str()


def byte_level_json(special: tuple[str, ...] = ("<|endoftext|>",), *, first: bool = False) -> dict[str, Any]:
    """A byte-level tokenizer.json; `first` numbers its special tokens from 0, else they follow the others."""
    return json.loads(_byte_level_json(special, first))


@cache
def _metaspace_json(model: str) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>"]
    if model == "bpe":
        library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    else:
        library = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")
    library.train_from_iterator([*corpus(), *[SPELLED] * 50], trainer)
    return library.to_str()


def metaspace_json(model: str) -> dict[str, Any]:
    """A tokenizer.json that writes blanks as U+2581; `model` is `bpe` or `unigram`."""
    return json.loads(_metaspace_json(model))


def adds_marks(description: dict[str, Any], bos: str, eos: str) -> dict[str, Any]:
    """The same with a post-processor that puts both tokens around every text."""
    ids = {token["content"]: token["id"] for token in description["added_tokens"]}
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    single.append({"SpecialToken": {"id": eos, "type_id": 0}})
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (bos, eos)}
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    return {**description, "post_processor": template}


def write(folder: Path, **files: Any) -> Path:
    """Write JSON files; `tokenizer_config={…}` becomes tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def ranks() -> list[bytes]:
    """Tokens by rank: the 256 bytes, then what was merged."""
    from llmtrain.data.tokenizer_json import byte_alphabet

    byte_of = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    vocabulary = byte_level_json(())["model"]["vocab"]
    return [bytes(byte_of[letter] for letter in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def rank_lines() -> list[bytes]:
    """The lines of a `.tiktoken` file."""
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks())]


@cache
def sentencepiece_model(algorithm: str = "bpe", **options: Any) -> bytes:
    """A model file; by default with byte fallback and a normaliser that changes nothing, as in Llama."""
    import sentencepiece

    settings = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in corpus() for line in text.split("\n")]),
        model_writer=model,
        model_type=algorithm,
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()
