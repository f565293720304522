"""llmtrain from Python: docs/python.md is run and type-checked, names come without torch, the package `train` can be called."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.runs import run_words, write_text
from helpers.scripts import ROOT

import llmtrain
from llmtrain.config.errors import ExitCode
from llmtrain.train import api

PAGE = ROOT / "docs" / "python.md"


def page_script() -> str:
    (code,) = re.findall(r"^```python\n# \S+\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    return str(code)


@pytest.fixture
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("same_threads")
def test_the_page_trains_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page: dict[str, object] = {"__name__": "page"}
    exec(page_script(), page)
    folder = page["train"](write_text(tmp_path / "text", 60, bytes_per_document=200), tmp_path / "runs")  # type: ignore[operator]
    told = capsys.readouterr()
    assert told.out == "" and "20 of 20 steps" in told.err and "\x1b" not in told.err
    written = page["write"](folder, "The ")  # type: ignore[operator]
    assert written.startswith("The ") and len(written) > len("The ")
    run = llmtrain.load_run(folder, 20)
    assert run.step == 20 and isinstance(run.model, llmtrain.Transformer) and not run.model.training


def test_the_page_is_typed(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(page_script() + "\nreveal_type(llmtrain.train.__call__)\nreveal_type(llmtrain.load_run)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "setup.cfg"), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for revealed in ("-> llmtrain.config.errors.ExitCode", "-> llmtrain.train.saved_run.SavedRun"):
        assert revealed in done.stdout


def test_the_package_train_is_typed_as_a_function_and_as_a_package(tmp_path: Path) -> None:
    script = tmp_path / "uses.py"
    script.write_text(
        "from typing import assert_type\nimport llmtrain\nimport llmtrain.train.build\nimport llmtrain.train.api\n"
        "from llmtrain import train\nfrom llmtrain.config.errors import ExitCode\nfrom llmtrain.train import api, build\n"
        "composed = llmtrain.compose_config([])\n"
        "assert_type(llmtrain.train(composed), ExitCode)\nassert_type(train(composed), ExitCode)\n"
        "llmtrain.train.build.train\nllmtrain.train.api.load_run\nbuild.train\napi.train\n"
        "train(3)  # type: ignore[arg-type]\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "setup.cfg"), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_train_goes_to_other_processes() -> None:
    """As an argument of a process pool it is pickled, as a default of a config deep-copied."""
    code = "import copy, pickle, llmtrain\nassert pickle.loads(pickle.dumps(llmtrain.train)) is llmtrain.train"
    subprocess.run([sys.executable, "-c", f"{code} is copy.deepcopy(llmtrain.train)"], cwd=ROOT, check=True)


def test_names_come_without_torch() -> None:
    code = """
import sys, llmtrain
assert sorted(llmtrain.__all__) == llmtrain.__all__ and set(llmtrain.__all__) <= set(dir(llmtrain))
assert llmtrain.compose_config(["train.steps=3"]).config.train.steps == 3
assert llmtrain.make_plan.__module__ == "llmtrain.plan.make_plan" and callable(llmtrain.train)
assert "torch" not in sys.modules and "llmtrain.train.build" not in sys.modules
assert all(getattr(llmtrain, name) is not None for name in llmtrain.__all__)
assert "torch" in sys.modules
try:
    llmtrain.tranformer
except AttributeError as error:
    assert "tranformer" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("first", ["", "import llmtrain.train.build", "from llmtrain.train.machine import detect_machine"])
def test_train_is_the_same_whatever_was_imported_before(first: str) -> None:
    code = (
        f"{first}\nfrom llmtrain import train\nimport llmtrain.train.state\nassert train is llmtrain.train and callable(train)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_function_the_page_names_takes_the_arguments_it_names() -> None:
    rows = re.findall(r"^\| `(\w+)\(([^)]*)\)` ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert len(rows) >= 5
    for name, arguments in rows:
        function = api.train if name == "train" else getattr(llmtrain, name)
        known = inspect.signature(function).parameters
        for argument in filter(None, (part.strip() for part in arguments.split(","))):
            word, _, default = argument.partition("=")
            word = word.rpartition(".")[2]
            assert word in known or name == "detect_machine", (name, word)
            if default and default != "…":
                assert repr(known[word].default) == default.replace('"', "'")


@pytest.mark.usefixtures("same_threads")
def test_json_leaves_standard_output_to_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = run_words(write_text(tmp_path / "text"), tmp_path / "runs", "a", "train.steps=2", "output=json")
    assert llmtrain.train(llmtrain.compose_config(words)) is ExitCode.DONE
    told = capsys.readouterr()
    assert told.out.startswith("{") and '"step": 2' in told.out and "2 of 2 steps" in told.err
