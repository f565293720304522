"""Wheel and source archive hold every option file, and an installed package works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.scripts import ROOT

SOURCES = ("llmtrain", "configs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the archives, built from a copy without network: building writes beside the sources."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    backend = "import sys, setuptools.build_meta as b; out = sys.argv[1]; b.build_wheel(out); b.build_sdist(out)"
    done = subprocess.run([sys.executable, "-c", backend, str(out)], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def option_files() -> set[str]:
    return {f"llmtrain/{file.relative_to(ROOT)}" for file in (ROOT / "configs").rglob("*.yaml")}


def test_configs_is_a_link_into_the_package() -> None:
    assert (ROOT / "llmtrain" / "configs").resolve() == ROOT / "configs"
    assert option_files()


def test_wheel_holds_code_options_and_licence(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    code = {str(file.relative_to(ROOT)) for file in (ROOT / "llmtrain").rglob("*.py")}
    assert option_files() | code | {"llmtrain/py.typed"} <= files
    assert {Path(name).name for name in files} >= {"LICENSE", "NOTICE", "entry_points.txt"}
    assert not [name for name in files if name.startswith(("tests/", "scripts/", "configs/"))]


def test_source_archive_holds_the_options(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    assert option_files() <= files


def test_installed_command_works_from_any_folder(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "--cfg", "job", "+precision=bf16", "output=json"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"kind": "bf16"' in done.stdout
    assert list(elsewhere.iterdir()) == []
    from importlib.metadata import PathDistribution

    (entry,) = PathDistribution(next(site.glob("*.dist-info"))).entry_points
    assert (entry.group, entry.name, entry.value) == ("console_scripts", "llmtrain", "llmtrain.__main__:main")
