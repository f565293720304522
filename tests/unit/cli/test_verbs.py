"""The verbs that compute: what they pass on, what they print, and one run from the command line to its text."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import ROOT

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.typed import Config
from llmtrain.train import saved_run

RESULT = {"run": "runs/a", "step": 7, "loss": 1.25, "targets": 4096}


@pytest.fixture
def a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/a")
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    return folder


def scored(folder: Path, config: Config, progress: Callable[[str], None]) -> dict[str, Any]:
    assert (folder, config.evaluate.tokens, config.launch.threads) == (Path("runs/a"), 96, 1)
    progress("scoring")
    return RESULT


def written(folder: Path, config: Config) -> Iterator[str]:
    assert (folder, config.generate.temperature) == (Path("runs/a"), 0.0)
    yield from ("one ", "two\x1b[2J")


def test_evaluate_prints_a_table_or_one_document(
    a_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saved_run, "evaluate_run", scored)
    words = ["evaluate", "runs/a", "evaluate.tokens=96", "launch.threads=1"]
    assert dispatch(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["loss", "1.2500"] in [line.split() for line in lines]
    assert dispatch([*words, "output=json"]) == 0
    assert json.loads(capsys.readouterr().out) == RESULT


def test_generate_prints_prompt_and_text_or_one_document(
    a_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saved_run, "generate_text", written)
    words = ["generate", "runs/a", "generate.temperature=0", "generate.prompt=zero "]
    assert dispatch(words) == 0
    assert capsys.readouterr().out == "zero one two\x1b[2J\n"
    assert dispatch([*words, "output=json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "runs/a", "prompt": "zero ", "text": "one two\x1b[2J"}


def test_generate_sends_a_terminal_nothing_it_would_obey(a_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(saved_run, "generate_text", written)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert dispatch(["generate", "runs/a", "generate.temperature=0"]) == 0
    assert "\x1b" not in screen.getvalue() and screen.getvalue().startswith("one two")


@pytest.mark.parametrize("word", ["optimizer.lr=1", "+precision=fp32", "model=tiny", "generate.seed=1"])
def test_b56_a_key_the_verb_does_not_read_is_refused(a_run: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert dispatch(["evaluate", "runs/a", "evaluate.tokens=96", word]) == 2
    assert f"error: {word}\n  rule  evaluate reads evaluate, launch and output only" in capsys.readouterr().err


def test_a_folder_that_is_no_run_names_those_that_are(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["evaluate", "runs/b"]) == 2
    assert capsys.readouterr().err == "error: runs/b\n  rule  not a run folder: it has no config.yaml\n  try   runs/a\n"
    assert dispatch(["generate", "elsewhere/b"]) == 2
    assert "train a run first" in capsys.readouterr().err


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    def llmtrain(*words: str) -> subprocess.CompletedProcess[str]:
        script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from llmtrain.__main__ import main; sys.exit(main())"
        return subprocess.run([sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True, check=False)

    words = ["+experiment=smoke", "run.name=first", "train.steps=3", "launch.threads=1"]
    trained = llmtrain(*words)
    assert trained.returncode == 0, trained.stderr
    assert len((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()) == 3
    again = llmtrain(*words, "output=json")
    assert again.returncode == 0 and json.loads(again.stdout)["code"] == 0
    result = llmtrain("evaluate", "runs/first", "output=json", "evaluate.tokens=512")
    assert json.loads(result.stdout)["step"] == 3, result.stderr
    refused = llmtrain(*words, "model.dim=32")
    assert refused.returncode == 2 and "error: model.dim" in refused.stderr
