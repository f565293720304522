"""What the package imports is what setup.cfg asks for, pinned in constraints.txt and named with its licence in NOTICE."""

from __future__ import annotations

import ast
import re
import sys
from importlib import metadata

from helpers.scripts import ROOT, load_script
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMPORT_NAMES = {"hydra": "hydra-core", "yaml": "pyyaml"}
"""Packages that are imported under another name than they are installed by."""
GPU_PACKAGES = {"flash_attn", "flash_attn_interface"}
"""Imported where a GPU is; they come with the extra flash-attn, or from source."""

licences = load_script("licences")


def names(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def noted() -> dict[str, str]:
    return dict(re.findall(r"^  (\S+) +(\S.*)$", (ROOT / "NOTICE").read_text(encoding="utf-8"), flags=re.M))


def imported() -> set[str]:
    found = set()
    for file in (ROOT / "llmtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.partition(".")[0])
    return {IMPORT_NAMES.get(name, name) for name in found - set(sys.stdlib_module_names) - {"llmtrain"}}


def test_imports_are_the_requirements() -> None:
    wanted = licences.requirements()
    extras = {name for extra in licences.RUNTIME_EXTRAS for name in names(wanted[extra])}
    assert imported() - GPU_PACKAGES == names(wanted[""]) | extras


def test_base_install_stays_small_and_takes_any_torch() -> None:
    lines = licences.requirements()[""]
    assert len(lines) <= 7
    assert "torch>=2.11" in lines


def test_everything_installed_is_pinned_exactly_as_it_was_tested() -> None:
    wanted = [line for lines in licences.requirements().values() for line in lines]
    assert sorted(licences.closure(wanted) - set(pinned())) == []


def test_every_dependency_has_its_licence_in_the_notice() -> None:
    rows = noted()
    wanted = [line for lines in licences.requirements().values() for line in lines]
    # Licences change between releases: only a package in its pinned version says what NOTICE has to say.
    tested = {name for name in licences.closure(wanted) if metadata.version(name).partition("+")[0] == pinned()[name]}
    assert {name: licences.licence(name) for name in tested} == {name: rows.get(name) for name in tested}
    assert sorted(set(rows) - set(pinned())) == []
    assert "not stated" not in rows.values()
