"""The package of docs/plugins.md, put where Python finds it as if it were installed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.scripts import ROOT

from llmtrain.config import keys, plugins

PAGE = ROOT / "docs" / "plugins.md"


def page_files() -> dict[str, str]:
    """The files that the page shows, by path."""
    blocks = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    return dict(blocks)


def write_project(folder: Path) -> Path:
    """The source tree of the package, as one would type it."""
    for name, text in page_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def install_page(site: Path) -> Path:
    """The package in a folder of the import path, with the metadata that an installer writes."""
    project = tomllib.loads(page_files()["pyproject.toml"])["project"]
    modules = {name: text for name, text in page_files().items() if name.startswith("llmtrain_extras/")}
    return install(site, project["name"], project["version"], project["entry-points"]["llmtrain.plugins"], modules)


def install(site: Path, name: str, version: str, entry_points: Mapping[str, str], modules: Mapping[str, str]) -> Path:
    """Any package; the caller puts `site` on the import path."""
    for path, text in modules.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{entry} = {value}" for entry, value in entry_points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[llmtrain.plugins]", *lines, ""]))
    return site


def forget_plugins() -> None:
    """Look again for what is installed at the next question."""
    for remembered in (plugins.discover, plugins.schema_class, keys.leaves, keys.sections):
        remembered.cache_clear()


@contextmanager
def on_the_path(site: Path) -> Iterator[None]:
    """A folder of packages as part of this process's installation, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        forget_plugins()
        try:
            yield
        finally:
            patch.undo()
            forget_plugins()
