"""Begin and end tokens in the token files, for every pair of settings and every kind of foreign tokenizer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tokenizer_files import (
    SPELLED,
    adds_marks,
    byte_level_json,
    corpus,
    metaspace_json,
    rank_lines,
    sentencepiece_model,
    write,
)

from llmtrain.config.typed_data import (
    DataConfig,
    FileTokenizerConfig,
    Packing,
    SentencePieceTokenizerConfig,
    TextData,
    TiktokenTokenizerConfig,
    TokenizerConfig,
)
from llmtrain.data.corpus import build_corpus

DOCUMENTS = [SPELLED, corpus()[0], "<s>" * 5, "</s><|endoftext|>", "x"]


def config_of(kind: str, folder: Path) -> TokenizerConfig:
    both = ("<s>", "</s>")
    bodies: dict[str, dict[str, Any]] = {
        "plain": byte_level_json(both),
        "adds marks": adds_marks(byte_level_json(both), *both),
        "bos is eos": byte_level_json(("<|endoftext|>",)),
        "unigram": metaspace_json("unigram"),
    }
    if kind in bodies:
        return FileTokenizerConfig(str(write(folder, tokenizer=bodies[kind])), None, None)
    folder.mkdir()
    model = folder / "tokenizer.model"
    if kind == "sentencepiece":
        model.write_bytes(sentencepiece_model("bpe"))
        return SentencePieceTokenizerConfig(str(model))
    model.write_bytes(b"\n".join(rank_lines()))
    return TiktokenTokenizerConfig(str(model), kind)


@pytest.mark.parametrize("kind", ["plain", "adds marks", "bos is eos", "unigram", "sentencepiece", "gpt2", "llama3"])
def test_b31_marks_stand_once_around_every_document(kind: str, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / name).mkdir()
        for number, text in enumerate(DOCUMENTS):
            (tmp_path / name / f"{number}.txt").write_text(text + name[0], encoding="utf-8")
    tokenizer = config_of(kind, tmp_path / "tokenizer")
    for bos, eos in itertools.product((True, False, None), (True, False)):
        cache = tmp_path / f"cache {bos} {eos}"
        source = TextData(str(tmp_path / "train"), str(tmp_path / "validation"), 0.05, str(cache))
        data = DataConfig(source, 16, Packing.CONCAT, bos, eos)
        made = build_corpus(data, tokenizer, seed=0, vocab_size=None, progress=lambda line: None).tokenizer
        begins = made.bos_id != made.eos_id if bos is None else bos
        expected: list[int] = []
        for text in DOCUMENTS:
            expected += [made.bos_id] * begins + made.encode(text + "t").tolist() + [made.eos_id] * eos  # type: ignore[list-item]
        (file,) = cache.rglob("train*.tokens")
        assert np.fromfile(file, dtype=np.uint16).tolist() == expected
