"""Small files of every kind that data and tokenizers are read from."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers


def write_material(folder: Path) -> None:
    """good.jsonl, bad.jsonl, ids.bin, tokenizer.json, other.json and ranks.tiktoken."""
    lines = [json.dumps({"text": f"document {n} of {n % 7} words", "body": f"{n} another text"}) for n in range(60)]
    (folder / "good.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "bad.jsonl").write_text("\n".join([*lines[:30], '{"text": null}', *lines[30:]]) + "\n")
    generator = np.random.default_rng(0)
    generator.integers(0, 16, 4000).astype("<u2").tofile(folder / "ids.bin")
    for name, merges in (("tokenizer", [("d", "o"), ("do", "c")]), ("other", [("t", "h")])):
        write_tokenizer(folder / f"{name}.json", merges)
    ranks = [bytes([byte]) for byte in range(256)] + [b"do", b"doc"]
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    (folder / "ranks.tiktoken").write_text(text)


def write_tokenizer(path: Path, merges: list[tuple[str, str]]) -> None:
    """A byte-level BPE tokenizer with two special tokens that no well-known name stands for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<begin>", "<end>"])
    library.save(str(path))
