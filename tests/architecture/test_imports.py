"""What is not imported: torch where nothing is computed, anything heavy where a page or a message is all that is wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.scripts import ROOT


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter that ran the code; what it prints is dropped."""
    tail = "\nimport sys\nsys.stderr.write('\\nMODULES ' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code + tail], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize("package", ["config", "plan"])
def test_config_and_plan_import_no_torch(package: str) -> None:
    modules = sorted(file.stem for file in (ROOT / "llmtrain" / package).glob("*.py") if file.stem != "__init__")
    loaded = loaded_after("\n".join(f"import llmtrain.{package}.{module}" for module in modules))
    assert "llmtrain" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "rich"})


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["--cfg", "job"], ["trian"], ["train.stesp=3"], ["evaluate", "runs/none"]]
)
def test_pages_and_messages_import_no_torch(words: list[str]) -> None:
    loaded = loaded_after(f"from llmtrain.cli.dispatch import dispatch\ndispatch({words!r})")
    assert loaded.isdisjoint({"torch", "numpy"})


def test_importing_every_module_has_no_effect() -> None:
    modules = sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in (ROOT / "llmtrain").rglob("*.py")
        if file.stem not in ("__init__", "__main__")
    )
    code = "\n".join(
        [
            "import os, signal, torch, warnings",
            "def state():",
            "    return (dict(os.environ), os.getcwd(), torch.get_rng_state().tolist(), torch.get_num_threads(),",
            "            torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), signal.getsignal(signal.SIGINT),",
            "            list(warnings.filters))",
            "import hydra, numpy, rich, safetensors.torch, tokenizers, yaml",
            "before = state()",
            *(f"import {module}" for module in modules),
            "assert state() == before",
        ]
    )
    assert "llmtrain" in loaded_after(code)
