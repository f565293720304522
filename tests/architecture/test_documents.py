"""Every command that the documents show is one: it parses, composes, and its make target or file exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers.scripts import ROOT

from llmtrain.cli.arguments import parse_arguments
from llmtrain.cli.help import topic_page
from llmtrain.cli.request import compose
from llmtrain.cli.sweep import lay_out
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def code(text: str) -> list[str]:
    """Lines of fenced and indented blocks, continued ones joined, and code inside sentences."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    blocks += re.findall(r"(?:^    .*\n)+", rest, flags=re.M)
    inline = re.findall(r"`([^`\n]+)`", rest)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()] + inline


def commands(program: str) -> list[str]:
    """What the documents tell to type after the name of a program; `…` marks a form and no command."""
    found = []
    # The commands of docs/plugins.md need the package of that page: tests/config/test_plugins.py types them.
    for document in (document for document in DOCUMENTS if document.name != "plugins.md"):
        for line in code(document.read_text(encoding="utf-8")):
            match = re.match(rf"(?:\$ )?(?:\.venv/bin/|python -m )?{program}(?: (.*))?$", line)
            if match and "…" not in line:
                found.append((match[1] or "").partition(" > ")[0])
    return sorted(set(found))


def test_there_are_commands() -> None:
    assert len(commands("llmtrain")) >= 8 and "demo" in {line.split()[0] for line in commands("make") if line}


@pytest.mark.parametrize("line", commands("llmtrain"))
def test_llmtrain_commands_compose(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_configs" / "optimizer").mkdir(parents=True)
    (tmp_path / "my_configs" / "optimizer" / "gentle.yaml").write_text("# an option of the reader's own\nlr: 1e-4\n")
    arguments = parse_arguments(shlex.split(line, comments=True))
    if arguments.multirun:
        assert len(lay_out(arguments).jobs) > 1
    elif arguments.help_topic:
        assert topic_page(arguments.help_topic, [], 100)
    elif arguments.runs_verb:
        compose(arguments)


def test_the_message_shown_is_the_message() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"(?:^    error: .*\n)(?:^    .*\n)+", text, flags=re.M)
    with pytest.raises(ConfigError) as caught:
        compose_config([shown.split()[1]])
    assert str(caught.value).splitlines() == [line.removeprefix("    ") for line in shown.splitlines()]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = {word for line in commands("make") for word in shlex.split(line, comments=True) if "=" not in word}
    assert wanted <= set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


def test_the_first_screen_is_a_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 40
