"""The tokenizer of a Hugging Face folder in a run folder: its files are kept as they are, so that they can be given back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.files import Files, storage_error, write_file
from llmtrain.config.errors import DataError, Problem
from llmtrain.data.tokenizer import FileTokenizer, IdTokenizer, Tokenizer
from llmtrain.data.tokenizer_export import bos_in_front, tokenizer_of_folder

FOLDER = "tokenizer"
"""Where a run folder has them."""
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "encoder.json",
    "vocab.bpe",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class ForeignTokenizer:
    """What is known of the tokenizer of a folder."""

    tokenizer: Tokenizer
    """Plain ids where the folder has none."""
    files: Mapping[str, bytes]
    """By name; empty where the folder has none."""
    adds_bos: bool
    """Whether it puts a begin-of-text token before every text."""

    def settings(self, run_folder: Path) -> dict[str, Any]:
        """Keys of the config, dotted, for a run folder that has the files below FOLDER."""
        tokenizer, path = self.tokenizer, run_folder.absolute() / FOLDER
        if isinstance(tokenizer, IdTokenizer):
            return {"data.kind": "synthetic", "tokenizer.kind": "ids", "tokenizer.eos_id": tokenizer.eos_id}
        if isinstance(tokenizer, FileTokenizer):
            spelled = {number: name for name, number in tokenizer.special.items()}
            marks = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
            keys = {role: None if number is None else spelled[number] for role, number in marks.items()}
            keys |= {"kind": "file", "path": str(path)}
        else:
            keys = {"kind": tokenizer.to_json()["kind"], "path": str(path / "tokenizer.model")}
        return {**{f"tokenizer.{name}": value for name, value in keys.items()}, "data.bos": self.adds_bos}


def read_foreign_tokenizer(folder: Path, *, vocab_size: int, eos_id: int | None) -> ForeignTokenizer:
    """The tokenizer of a Hugging Face folder.

    Args:
        vocab_size: rows of the model's embedding; they may be more than there are tokens.
        eos_id: of config.json, for a folder without tokenizer.

    Raises:
        DataError: it cannot be read, or has more tokens than the model.
        StorageError: a file cannot be read now.
    """
    tokenizer = tokenizer_of_folder(folder)
    if tokenizer is None:
        return ForeignTokenizer(IdTokenizer(vocab_size, eos_id), {}, adds_bos=False)
    if tokenizer.vocab_size > vocab_size:
        rule = f"at most the {vocab_size:,} rows of the model's embedding (vocab_size in config.json)"
        raise DataError(
            Problem(f"the tokenizer of {folder} has {tokenizer.vocab_size:,} tokens", rule, "the model's own tokenizer")
        )
    files = {name: _read(folder / name) for name in FILES if (folder / name).is_file()}
    return ForeignTokenizer(tokenizer, files, adds_bos(files, tokenizer))


def adds_bos(files: Mapping[str, bytes], tokenizer: Tokenizer) -> bool:
    """Whether the library puts a begin-of-text token before every text, with these files of `tokenizer`."""
    if tokenizer.bos_id is None:
        return False
    if "tokenizer.json" in files:
        import tokenizers

        ids = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode()).encode("a", add_special_tokens=True).ids
        return bool(ids) and ids[0] == tokenizer.bos_id
    settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    # A SentencePiece model of the library does it unless it is told not to.
    return bool(settings.get("add_bos_token", "tokenizer.model" in files))


def with_bos(files: Mapping[str, bytes], tokenizer: Tokenizer, adds: bool) -> dict[str, bytes]:
    """The files of a tokenizer, changed so that they do, or do not, put the begin-of-text token before every text."""
    changed = dict(files)
    if "tokenizer.json" in files and isinstance(tokenizer, FileTokenizer):
        description = json.loads(files["tokenizer.json"])
        name, bos_id = next((name, number) for name, number in tokenizer.special.items() if number == tokenizer.bos_id)
        before = description.get("post_processor")
        description["post_processor"] = _with(before, name, bos_id) if adds else _without(before, name)
        changed["tokenizer.json"] = json.dumps(description, ensure_ascii=False, indent=2).encode()
    settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    changed["tokenizer_config.json"] = json.dumps({**settings, "add_bos_token": adds}, ensure_ascii=False, indent=2).encode()
    return changed


def _with(processor: Any, name: str, number: int) -> Any:
    """A post-processor that puts the special token `name` in front, after whatever it does already."""
    front = bos_in_front(name, number)
    return front if processor is None else {"type": "Sequence", "processors": [processor, front]}


def _without(processor: Any, name: str) -> Any:
    """A post-processor that never puts the special token `name` anywhere; None where it can do nothing else."""
    if processor is None or processor["type"] == "ByteLevel":
        return processor
    if processor["type"] == "Sequence":
        left = [_without(one, name) for one in processor["processors"]]
        return {**processor, "processors": [one for one in left if one is not None]}
    if processor["type"] != "TemplateProcessing":
        return None
    pieces = {
        side: [one for one in processor[side] if one.get("SpecialToken", {}).get("id") != name] for side in ("single", "pair")
    }
    return {**processor, **pieces}


def _read(path: Path) -> bytes:
    try:
        return Files().read(path)
    except OSError as error:
        raise storage_error(Files(), error, "read", path) from error


def write_files(folder: Path, files: Mapping[str, bytes], system: Files) -> None:
    """Write files into a folder that has none of them; raises OSError."""
    for name, data in files.items():
        write_file(system, folder / name, data)
