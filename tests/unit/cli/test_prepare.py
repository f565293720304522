"""`llmtrain prepare`: the card, the command it ends with, one JSON document, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.compose import compose_config
from llmtrain.data.corpus import build_corpus

TEXTS = [f"document {i}, some words in it" for i in range(60)]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "null\n")
    return ["data=jsonl", f"data.path={path}", f"data.cache_dir={tmp_path / 'cache'}", "data.on_bad=skip"]


def last_command(output: str) -> list[str]:
    """The words of the command after `next`, without the program."""
    program, *found = shlex.split(output.rpartition("next  ")[2].replace("\\\n", " "))
    assert program == "llmtrain"
    return found


def corpus_of(words: list[str]) -> str:
    config = compose_config(words).config
    return build_corpus(
        config.data, config.tokenizer, seed=0, vocab_size=None, progress=lambda line: None, prepare=config.prepare
    ).fingerprint


def test_the_card_and_the_command_that_trains_on_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["prepare", *words, "prepare.workers=2", "prepare.shard_bytes=500"]) == 0
    output = capsys.readouterr().out
    for part in ("text.jsonl", "60: ", "tokens", "uint16", "258 ids", "1 bad record (", f"text.jsonl:{len(TEXTS) + 1}", "MB/s"):
        assert part in output, part
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name[:4] in output, "the end of a long path may be cut"
    # The same words find what was prepared: nothing is made a second time.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert last_command(output) == [*words, "prepare.shard_bytes=500"]
    first = corpus_of(last_command(output))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert dispatch(["prepare", *words, "prepare.shard_bytes=500"]) == 0
    assert "prepared already" in capsys.readouterr().out
    assert corpus_of([*words, "prepare.shard_bytes=500"]) == first


def test_a_folder_of_its_own(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "my tokens"
    assert dispatch(["prepare", *words, "prepare.shard_bytes=500", f"prepare.path={own}"]) == 0
    command = last_command(capsys.readouterr().out)
    assert command == ["data=tokens", f"data.path={own}"]
    assert corpus_of(command) == corpus_of([*words, "prepare.shard_bytes=500"])


def test_json_is_one_document(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["prepare", *words, "output=json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["new"] is True and document["dtype"] == "uint16"
    assert sum(split["documents"] for split in document["splits"].values()) == 60
    assert sum(split["source_bytes"] for split in document["splits"].values()) == sum(map(len, TEXTS))
    (facts,) = document["bad"].values()
    assert facts["count"] == 1 and facts["places"] == [f"{tmp_path / 'text.jsonl'}:61"]
    assert shlex.split(document["command"])[1:] == words
    assert dispatch(["prepare", *words, "output=json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == {**document, "new": False}


@pytest.mark.parametrize(
    ("word", "code", "told"),
    [
        ("data=synthetic", 2, "prepare turns text into tokens"),
        ("train.steps=3", 2, "prepare reads data, tokenizer, prepare and output only"),
        ("data.sequence_length=64", 2, "data.sequence_length"),
        ("data.on_bad=error", 65, "text.jsonl:61"),
    ],
)
def test_what_it_refuses(words: list[str], capsys: pytest.CaptureFixture[str], word: str, code: int, told: str) -> None:
    given = [word] if word.startswith("data=") else [*words, word]
    assert dispatch(["prepare", *given]) == code
    assert told in capsys.readouterr().err
