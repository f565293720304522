"""From a path as it is typed to files, against lists of names written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.records import line

from llmtrain.config.errors import ConfigError, DataError
from llmtrain.data import jsonl
from llmtrain.data.paths import find_files


def names(path: Path | str, suffixes: tuple[str, ...] = jsonl.SUFFIXES) -> list[str]:
    found = find_files(str(path), f"data.path={path}", suffixes)
    return [found.name(file) for file in found.paths]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name in ("b/1.jsonl", "a.jsonl.zst", "b/0.json", ".hidden.jsonl", ".git/x.jsonl", "c[1].ndjson.gz", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(line(name))
    return tmp_path


def test_files_of_a_folder_in_order_of_their_names(shards: Path) -> None:
    assert names(shards) == ["a.jsonl.zst", "b/0.json", "b/1.jsonl", "c[1].ndjson.gz"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["a.jsonl.zst", "c[1].ndjson.gz"]),
        ("*.md", ["README.md"]),
        ("**/*.json*", ["a.jsonl.zst", "b/0.json", "b/1.jsonl"]),
        ("**", ["a.jsonl.zst", "b/0.json", "b/1.jsonl", "c[1].ndjson.gz"]),
        ("b/[01].json?", ["1.jsonl"]),
        ("?/0.json", ["b/0.json"]),
        ("c[1].ndjson.gz", ["c[1].ndjson.gz"]),
    ],
)
def test_patterns(shards: Path, pattern: str, found: list[str]) -> None:
    assert names(f"{shards}/{pattern}") == found


def test_a_file_is_taken_whatever_it_is_called(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(shards / "README.md") == ["README.md"]
    assert names(shards / ".hidden.jsonl") == [".hidden.jsonl"]
    monkeypatch.setenv("HOME", str(shards))
    assert names("~/b/1.jsonl") == ["1.jsonl"] and names("~/b/*") == ["0.json", "1.jsonl"]
    with pytest.raises(ConfigError, match="~nobody_of_that_name"):
        names("~nobody_of_that_name/x")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("gone.jsonl", "gone.jsonl is not there; {root} has README.md, a.jsonl.zst, b/, c[1].ndjson.gz, x/"),
        ("b/*.parquet", "nothing matches {root}/b/*.parquet; {root}/b has 0.json, 1.jsonl"),
        ("x/y/*.jsonl", "nothing matches {root}/x/y/*.jsonl; {root}/x has nothing in it"),
        ("x", "{root}/x has no file that ends in .jsonl, .jsonl.gz"),
    ],
)
def test_nothing_found_says_what_lies_there(shards: Path, path: str, told: str) -> None:
    (shards / "x").mkdir()
    with pytest.raises(DataError) as caught:
        names(shards / path)
    assert told.format(root=shards) in str(caught.value)
