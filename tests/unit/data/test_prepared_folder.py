"""Prepared folders are not trusted: damage, other versions and wrong ids are found when one is opened."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.prepared import NAMES, TEXTS, content, entries, ids, prepare_path

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import DataConfig
from llmtrain.data import formats as formats_module
from llmtrain.data.formats import open_prepared

MakeFolder = Callable[[Sequence[str]], Path]
MakeRecords = Callable[[Sequence[str]], Path]
MakeConfig = Callable[..., DataConfig]


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def drop_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], None]] = {"flipped": flip_bit, "short": drop_byte, "gone": Path.unlink}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_cache_is_said_and_made_again(
    make_folder: MakeFolder, data_config: MakeConfig, name: str, damage: str
) -> None:
    data = data_config(make_folder(TEXTS))
    before = ids(prepare_path(data).train)
    (folder,) = entries(data)
    assert sorted(content(folder)) == sorted(NAMES)
    DAMAGES[damage](folder / name)
    lines: list[str] = []
    assert ids(prepare_path(data, lines=lines).train) == before
    assert any("damaged" in line and name in line for line in lines)
    assert entries(data) == [folder]
    lines.clear()
    prepare_path(data, lines=lines)
    assert lines == []


def rewrite_metadata(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a description and make its checksum fit."""
    body = json.loads((folder / "metadata.json").read_text())
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / "metadata.json").write_text(json.dumps({"sha256": digest, **body}))


def test_a_changed_number_in_the_description_is_noticed(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(TEXTS))
    prepare_path(data)
    (folder,) = entries(data)
    body = json.loads((folder / "metadata.json").read_text())
    body["splits"]["validation"]["source_bytes"] += 1
    (folder / "metadata.json").write_text(json.dumps(body))
    lines: list[str] = []
    assert prepare_path(data, lines=lines).validation.source_bytes == body["splits"]["validation"]["source_bytes"] - 1
    assert "its checksum is wrong" in lines[0]


def test_b32_reading_with_another_width_is_refused(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    folder = prepare_path(data_config(make_folder(TEXTS))).folder
    rewrite_metadata(folder, lambda body: body.update(dtype="<u4"))
    with pytest.raises(DataError, match="<u4"):
        open_prepared(folder, None, lambda line: None)


def test_b32_an_id_outside_the_vocabulary_is_found_when_opened(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    folder = prepare_path(data_config(make_folder(TEXTS))).folder
    path = folder / "validation-00001.tokens"
    tokens = np.fromfile(path, dtype="<u2")
    tokens[2] = 300
    tokens.tofile(path)
    with pytest.raises(DataError, match="id 300 at byte 4 is outside the vocabulary of 258") as caught:
        open_prepared(folder, None, lambda line: None)
    assert path.name in str(caught.value)


def test_a_folder_of_another_version_is_refused_naming_both(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    folder = prepare_path(data_config(make_folder(TEXTS))).folder
    rewrite_metadata(folder, lambda body: body.update(format_version=2))
    with pytest.raises(DataError, match="format version 2.*reads 3"):
        open_prepared(folder, None, lambda line: None)


def test_a_large_folder_is_read_through_once_and_after_a_change(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything counted as large: nothing is read at a start until size or time of a file differ."""
    monkeypatch.setattr(formats_module, "FULL_CHECK_BYTES", 0)
    read: list[str] = []
    check = formats_module._Opener._check_tokens

    def note(opener: Any, split: str, shard: Any) -> None:
        read.append(split)
        check(opener, split, shard)

    monkeypatch.setattr(formats_module._Opener, "_check_tokens", note)
    data = data_config(make_folder(TEXTS))
    folder = prepare_path(data).folder
    assert read == [], "what was hashed while it was written is not read again"
    os.utime(folder / "train-00000.tokens")
    prepare_path(data)
    assert read == ["train", "validation"]
    prepare_path(data)
    assert len(read) == 2
    flip_bit(folder / "train-00000.tokens")
    with pytest.raises(DataError, match="train-00000.tokens"):
        open_prepared(folder, None, lambda line: None)
