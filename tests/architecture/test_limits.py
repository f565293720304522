"""The size limits are kept, and the script that says so finds what breaks them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def check_limits() -> ModuleType:
    return load_script("check_limits")


def test_the_repository_keeps_them(check_limits: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_limits.main(ROOT) == 0, capsys.readouterr().out


def nested(depth: int, head: str) -> str:
    lines = ["def f(x):", *("    " * level + head for level in range(1, depth + 1)), "    " * (depth + 1) + "pass"]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x = 1\n" * 401, "401 lines, limit 400"),
        ("def f():\n" + "    x = 1\n" * 60, "f has 61 lines, limit 60"),
        ("class A:\n    def g(self):\n" + "        x = 1\n" * 60, "g has 61 lines, limit 60"),
        (nested(5, "if x:"), "f is nested 5 deep, limit 4"),
        (
            nested(4, "for y in x:").replace(
                "pass", "try:\n                        pass\n                    finally:\n                        x()"
            ),
            "5 deep",
        ),
        (nested(5, "with x:"), "5 deep"),
    ],
)
def test_what_is_over_is_found(check_limits: ModuleType, tmp_path: Path, source: str, told: str) -> None:
    file = tmp_path / "over.py"
    file.write_text(source)
    assert told in "\n".join(check_limits.violations(file))


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n" * 400,
        'def f():\n    """One.\n' + "    more\n" * 30 + '    """\n' + "    x = 1\n" * 59,
        nested(4, "while x:"),
        "def f(x):\n    if x == 1:\n        pass\n" + "".join(f"    elif x == {n}:\n        pass\n" for n in range(2, 9)),
    ],
)
def test_what_is_within_is_not(check_limits: ModuleType, tmp_path: Path, source: str) -> None:
    file = tmp_path / "within.py"
    file.write_text(source)
    assert list(check_limits.violations(file)) == []


def test_ruff_looks_at_every_source_file() -> None:
    # Its own list of excluded folders has "dist", which is a package here.
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seen = {Path(line) for line in done.stdout.splitlines()}
    sources = {file for folder in ("llmtrain", "scripts", "tests") for file in (ROOT / folder).rglob("*.py")}
    assert sorted(map(str, sources - seen)) == []
