"""Exit codes and messages: what `llmtrain` answers, whatever happens below it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from helpers.scripts import ROOT

from llmtrain import __version__
from llmtrain.cli import dispatch as dispatch_module
from llmtrain.cli.dispatch import dispatch
from llmtrain.config import errors
from llmtrain.dist.failure import mark_told


def verb_that(monkeypatch: pytest.MonkeyPatch, behave: Callable[[], int]) -> None:
    """Every verb does this instead."""
    monkeypatch.setattr(dispatch_module, "import_module", lambda name: SimpleNamespace(run=lambda arguments: behave()))


def raising(error: BaseException) -> Callable[[], int]:
    def behave() -> int:
        raise error

    return behave


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--version"]) == 0
    assert capsys.readouterr().out == f"llmtrain {__version__}\n"


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_verbs_own_code_comes_through(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    verb_that(monkeypatch, lambda: code)
    assert dispatch(["train"]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError(errors.Problem("a=1", "less than 1")), 2),
        (errors.PlanError("does not fit"), 2),
        (errors.DataError("no text"), 65),
        (errors.StorageError("disk full"), 74),
        (errors.NumericsError("not finite"), 77),
        (errors.OutOfMemoryError("too much"), 78),
    ],
)
def test_errors_of_the_user_are_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: errors.LlmtrainError, code: int
) -> None:
    verb_that(monkeypatch, raising(error))
    assert dispatch(["train"]) == code
    out, err = capsys.readouterr()
    assert out == "" and err == f"{error}\n" and err.startswith("error: ")
    assert "Traceback" not in err


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verb_that(monkeypatch, raising(KeyError("lost")))
    assert dispatch(["train"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "KeyError: 'lost'" in err and "a fault of llmtrain" in err
    assert __version__ in err


@pytest.mark.parametrize(
    ("error", "code"), [(KeyError("lost"), 70), (errors.DataError("no text"), 65), (KeyboardInterrupt(), 130)]
)
def test_what_a_rank_has_told_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    mark_told(error)
    verb_that(monkeypatch, raising(error))
    assert dispatch(["train"]) == code
    assert capsys.readouterr() == ("", "")


def test_interrupt_outside_the_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verb_that(monkeypatch, raising(KeyboardInterrupt()))
    assert dispatch(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_goes_away_makes_no_noise() -> None:
    command = f"{sys.executable} -m llmtrain --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    # head may have read everything before it left.
    assert done.stdout.splitlines()[-1] in ("0", "141")


def test_a_closed_standard_output_makes_no_noise() -> None:
    command = f"{sys.executable} -m llmtrain --version | true; echo ${{PIPESTATUS[0]}}"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=buffered, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout in ("0\n", "141\n")


@pytest.mark.parametrize(
    "words", [["train.stesp=3"], ["+precison=bf16"], ["precision=bf17"], ["trian"], ["evaluate", "runs/none"]]
)
def test_mistakes_leave_with_two_and_a_message(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert dispatch(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "  try   " in err and "Traceback" not in err
