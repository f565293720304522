"""The verbs that compute: what they pass on, what they print, and one run from the command line to its text."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import ROOT

from llmtrain.cli import request
from llmtrain.cli.arguments import parse_arguments
from llmtrain.cli.dispatch import dispatch
from llmtrain.cli.verbs import VERBS
from llmtrain.config.compose import Composed
from llmtrain.config.errors import ConfigError
from llmtrain.config.keys import leaves
from llmtrain.config.typed import Config
from llmtrain.metrics.console import PlainConsole
from llmtrain.train import saved_run

RESULT = {"run": "runs/a", "step": 7, "loss": 1.25, "targets": 4096}


@pytest.fixture
def a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/a")
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    return folder


def scored(folder: Path, composed: Composed, progress: Callable[[str], None]) -> dict[str, Any]:
    config = composed.config
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


class BothEndsOfATerminal:
    """A terminal that standard output and standard error of this process both go to, as in a shell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._screen, writer = pty.openpty()
        monkeypatch.setenv("TERM", "xterm-256color")
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, open(os.dup(writer), "w", encoding="utf-8"))  # noqa: SIM115
        os.close(writer)

    def received(self) -> str:
        sys.stdout.close()
        sys.stderr.close()
        data = b""
        try:
            while part := os.read(self._screen, 1 << 16):
                data += part
        except OSError:  # how Linux says that nobody writes any more
            os.close(self._screen)
        return data.decode().replace("\r\n", "\n")


def slowly_written(folder: Path, config: Config) -> Iterator[str]:
    """Loads until the status has been drawn, then takes a few redraws' time for each piece."""
    time.sleep(0.6)
    for piece in ("one ", "two ", "three"):
        yield piece
        time.sleep(0.6)


def test_generate_on_a_terminal_ends_the_status_before_the_text_begins(a_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_run, "generate_text", slowly_written)
    terminal = BothEndsOfATerminal(monkeypatch)
    assert dispatch(["generate", "runs/a", "generate.prompt='zero '"]) == 0
    before, prompt, after = terminal.received().partition("zero ")
    assert "loading the checkpoint" in before and prompt
    assert after == "one two three\n", "nothing is drawn over the text, and no cursor moves"


def test_generate_as_json_on_a_terminal_ends_the_status_before_the_document(
    a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_run, "generate_text", slowly_written)
    terminal = BothEndsOfATerminal(monkeypatch)
    assert dispatch(["generate", "runs/a", "output=json"]) == 0
    received = terminal.received()
    assert "generating" in received
    assert json.loads(received[received.index("{") :])["text"] == "one two three"


def test_generate_without_a_terminal_says_nothing_once_the_text_has_begun(
    a_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def pieces(folder: Path, config: Config) -> Iterator[str]:
        for piece in ("one ", "two"):
            time.sleep(0.3)
            said.append(capsys.readouterr().err)
            yield piece

    monkeypatch.setitem(PlainConsole.__init__.__kwdefaults__, "silence_seconds", 0.02)
    monkeypatch.setattr(saved_run, "generate_text", pieces)
    assert dispatch(["generate", "runs/a"]) == 0
    assert "loading the checkpoint" in said[0] and said[1] == ""


@pytest.mark.parametrize("word", ["optimizer.lr=1", "+precision=fp32", "model=tiny", "generate.seed=1"])
def test_b56_a_key_the_verb_does_not_read_is_refused(a_run: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert dispatch(["evaluate", "runs/a", "evaluate.tokens=96", word]) == 2
    assert f"error: {word}\n  rule  evaluate reads evaluate, data, prepare, launch and output only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "word", "rule", "cure"),
    [
        (
            ["train"],
            "evaluate.tokens=9",
            "train reads neither evaluate, convert, generate.step, generate.prompt nor prepare.path",
            "llmtrain evaluate",
        ),
        ([], "generate.step=3", "train reads neither", "llmtrain generate RUN_FOLDER generate.step=3"),
        ([], "+generate.prompt=a b", "train reads neither", "llmtrain generate RUN_FOLDER '+generate.prompt=a b'"),
        (["-m", "train.steps=1,2"], "evaluate.step=1,2", "train reads neither", "llmtrain evaluate"),
        (["--cfg", "job"], "evaluate.step=1", "train reads neither", "llmtrain evaluate"),
        (["evaluate", "runs/a"], "launch.env.NCCL_DEBUG=INFO", "evaluate does not read", "leave it out"),
        (["generate", "runs/a"], "+launch.timeout_seconds=9", "generate does not read launch.timeout_seconds", "leave it out"),
        (["doctor"], "train.steps=3", "doctor reads launch and output only\n", "leave it out"),
        (["doctor"], "+experiment=smoke", "doctor reads launch and output only\n", "leave it out"),
    ],
)
def test_b56_train_and_doctor_refuse_what_they_do_not_read(
    a_run: Path, capsys: pytest.CaptureFixture[str], argv: list[str], word: str, rule: str, cure: str
) -> None:
    assert dispatch([*argv, word]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {word}\n  rule  {rule}") and cure in told


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of one of two ranks."""
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)


VERBS_OF_ONE_PROCESS = (
    ["evaluate", "runs/a"],
    ["generate", "runs/a"],
    ["prepare", "data=text", "data.path=texts"],
    ["convert", "runs/a", "hf:there"],
)


@pytest.mark.parametrize("argv", VERBS_OF_ONE_PROCESS, ids=lambda argv: argv[0])
def test_a_verb_of_one_process_is_refused_on_several_ranks(
    a_run: Path, two_ranks: None, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert dispatch(argv) == 2
    assert capsys.readouterr().err == (
        f"error: WORLD_SIZE=2\n  rule  {argv[0]} runs in one process: each of these would do the whole work\n"
        f"  try   llmtrain {argv[0]} by itself, without torchrun or srun\n"
    )
    assert dispatch([argv[0], "--cfg", "job"]) == 0, "a page is shown anywhere"


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_a_verb_of_one_process_starts_no_ranks(a_run: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert dispatch([verb, "runs/a", "launch.nproc=2"]) == 2
    assert capsys.readouterr().err == (
        f"error: launch.nproc=2\n  rule  {verb} runs in one process\n  try   launch.nproc=1\n  set   command line, word 3\n"
    )


@pytest.mark.usefixtures("a_run")
def test_ranks_that_a_file_asks_for_are_no_matter_of_a_verb_that_starts_none() -> None:
    """One file serves the training and the preparation of its text."""
    primary = (ROOT / "configs/train.yaml").read_text()
    Path("mine.yaml").write_text(f"{primary}\nlaunch:\n  nproc: 2\n")
    own = ["--config-dir=.", "--config-name=mine"]
    assert request.compose(parse_arguments(["prepare", *own, "data=text", "data.path=texts"])).config.launch.nproc == 2
    with pytest.raises(
        ConfigError, match=r"launch.nproc=2\n  rule  evaluate runs in one process\n  try .*\n  set   .*mine.yaml:"
    ):
        request.compose(parse_arguments(["evaluate", "runs/a", *own]))


def test_b56_every_key_is_read_by_a_verb() -> None:
    """And the two verbs on a run folder read no key that a training decides."""
    for key in leaves():
        section = key.partition(".")[0]
        readers = {name for name, verb in VERBS.items() if verb.built and verb.reads(key)}
        assert readers & {"train", "evaluate", "generate", "prepare", "convert"}, key
        if section in ("data", "tokenizer", "prepare"):
            assert readers <= {"train", "evaluate", "prepare"}, key
        elif section not in ("evaluate", "generate", "convert", "launch", "output"):
            assert readers == {"train"}, key
    assert VERBS["train"].reads("generate.max_tokens") and not VERBS["train"].reads("evaluate")


def test_b56_a_file_may_hold_what_another_verb_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ngenerate:\n  prompt: abc\nevaluate:\n  tokens: 9\n"
    )
    assert dispatch([f"--config-dir={tmp_path}", "+experiment=mine", "--cfg", "job", "output=json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["generate"]["prompt"] == "abc"


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_what_is_no_run_folder_gets_one_kind_of_message(
    a_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    (a_run / "notes.txt").touch()
    (Path("runs/empty")).mkdir()
    look = Path.is_file

    def refusing(self: Path) -> bool:
        if "closed" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        return look(self)

    monkeypatch.setattr(Path, "is_file", refusing)
    for folder in ("runs/none", "runs/empty", "runs", "runs/a/notes.txt", "runs/a/config.yaml", "closed", "n" * 300):
        assert dispatch([verb, folder]) == 2, folder
        told = capsys.readouterr().err
        assert told.startswith(f"error: {folder}\n  rule  ") and "  try   " in told
        assert ("runs/a" in told) == folder.startswith("runs")


def test_the_folder_of_a_sweep_names_its_runs(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Path("runs/grid/0-run.seed-1")
    job.mkdir(parents=True)
    (job / "config.yaml").touch()
    assert dispatch(["evaluate", "runs/grid"]) == 2
    assert capsys.readouterr().err.endswith("  try   runs/grid/0-run.seed-1\n")


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
