"""B56: options that are accepted and ignored, or that arrive as something else than was typed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config import schema
from llmtrain.config.compose import compose_config, config_from_wire
from llmtrain.config.errors import ConfigError
from llmtrain.config.keys import leaves, sections
from llmtrain.config.settle import flatten

pytestmark = pytest.mark.usefixtures("remembered_files")

REFUSED = object()

# A word, and the value of its key in the resolved config; its exact type counts.
TABLE: list[tuple[str, Any]] = [
    ("run.name=1e5", "1e5"),
    ("run.name=123e456", "123e456"),
    ("run.name=true", "true"),
    ("run.name=0x10", "0x10"),
    ("run.name=007", "007"),
    ("run.name=1_000", "1_000"),
    ("run.name='null'", "null"),
    ("run.name=null", None),
    ("run.name=nan", "nan"),
    ("generate.prompt=import ", "import "),
    ("generate.prompt=[1,2]", "[1,2]"),
    ("generate.prompt=x = {y: 1}", "x = {y: 1}"),
    ("generate.prompt=a\\,b", "a,b"),
    ("train.steps=1e3", 1000),
    ("train.steps=1.5e3", 1500),
    ("train.steps=1_000", 1000),
    ("train.steps=1000.0", REFUSED),
    ("train.steps=1e-3", REFUSED),
    ("train.steps=010", REFUSED),
    ("train.steps=0x10", REFUSED),
    ("train.steps='10'", REFUSED),
    ("train.steps=true", REFUSED),
    ("train.steps=1e400", REFUSED),
    ("train.steps=9223372036854775808", REFUSED),
    ("optimizer.lr=1e-4", 1e-4),
    ("optimizer.lr=1", 1.0),
    ("optimizer.lr=1e400", REFUSED),
    ("optimizer.lr=inf", REFUSED),
    ("train.deterministic=TRUE", True),
    ("train.deterministic=1", REFUSED),
    ("accumulation.micro_batch_size=auto", "auto"),
    ("accumulation.micro_batch_size=8", 8),
    ("accumulation.micro_batch_size=automatic", REFUSED),
    ("+train.log_every=7", 7),
    ("++train.log_every=7", 7),
    ("+model.n_lyaer=3", REFUSED),
    ("model.n_lyaer=3", REFUSED),
]


@pytest.mark.parametrize("word,expected", TABLE, ids=[word for word, _ in TABLE])
def test_b56_a_value_arrives_as_typed_or_is_refused(word: str, expected: Any, refusal: Callable[..., str]) -> None:
    if expected is REFUSED:
        assert word in refusal(word)
        return
    value = dict(flatten(compose_config([word]).wire))[word.partition("=")[0].lstrip("+")]
    assert value == expected and type(value) is type(expected)


# The same scalars in a file: generic YAML readers make 100000.0, True, 8 or text of some of them.
IN_FILES: list[tuple[str, str, Any]] = [
    ("run.name", "1e5", "1e5"),
    ("run.name", "true", "true"),
    ("run.name", "007", "007"),
    ("run.name", "12:30:45", "12:30:45"),
    ("run.name", "2024-01-01", "2024-01-01"),
    ("run.name", "no", "no"),
    ("run.name", "'null'", "null"),
    ("run.name", "~", None),
    ("train.steps", "1e3", 1000),
    ("train.steps", "010", REFUSED),
    ("train.steps", "'10'", REFUSED),
    ("optimizer.lr", "1e-4", 1e-4),
    ("optimizer.lr", ".nan", REFUSED),
    ("train.deterministic", "yes", REFUSED),
]


@pytest.mark.parametrize("key,text,expected", IN_FILES)
def test_b56_a_file_is_read_like_a_word(
    tmp_path: Path, key: str, text: str, expected: Any, refusal: Callable[..., str]
) -> None:
    section, _, name = key.partition(".")
    (tmp_path / "mine.yaml").write_text(f"{section}:\n  {name}: {text}\n", encoding="utf-8")
    primary = {"config_name": "mine", "config_dirs": [tmp_path]}
    if expected is REFUSED:
        assert f"{key}={text}" in refusal(**primary)
        return
    value = compose_config([], **primary).wire[section][name]
    assert value == expected and type(value) is type(expected)


def test_b56_a_misspelt_name_is_never_dropped() -> None:
    """Two letters swapped in every group, section and key: on the command line with each sign, and in a saved config."""
    names = list(dict.fromkeys([*schema.GROUPS, *sorted(sections()), *leaves()]))
    words = [f"{('', '+', '++')[number % 3]}{misspelt(name)}=1" for number, name in enumerate(names)]
    with pytest.raises(ConfigError) as caught:
        compose_config(words)
    problems = caught.value.problems
    assert [problem.what for problem in problems] == words
    for name, problem in zip(names, problems, strict=True):
        assert problem.rule == "no such group, section or key" and name in problem.cure, problem

    saved: dict[str, Any] = {}
    for name in leaves():
        *parents, last = name.split(".")
        section = saved
        for parent in parents:
            section = section.setdefault(parent, {})
        section[misspelt(last)] = 1
    with pytest.raises(ConfigError) as caught:
        config_from_wire(saved)
    assert len(caught.value.problems) == len(leaves())


def test_b56_a_misspelt_key_in_a_file_is_never_dropped(tmp_path: Path) -> None:
    lines, places, above = [], {}, []
    for name in leaves():
        *parents, last = name.split(".")
        shared = next(
            (n for n, (one, two) in enumerate(zip(above, parents, strict=False)) if one != two), min(len(above), len(parents))
        )
        lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(shared, len(parents))]
        lines.append(f"{'  ' * len(parents)}{misspelt(last)}: 1")
        places[name], above = len(lines), parents
    (tmp_path / "mine.yaml").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        compose_config([], config_name="mine", config_dirs=[tmp_path])
    problems = caught.value.problems
    assert [problem.origin for problem in problems] == [f"{tmp_path}/mine.yaml:{line}" for line in places.values()]
    for name, problem in zip(places, problems, strict=True):
        assert problem.rule == "no such group, section or key" and name in problem.cure, problem


def misspelt(name: str) -> str:
    """The name with two neighbouring letters of its last part swapped, or one letter more where they are equal."""
    start = len(name) - len(name.rpartition(".")[2])
    middle = start + (len(name) - start) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return swapped if swapped not in (name, *leaves(), *sections(), *schema.GROUPS) else f"{name}x"


def test_b56_the_working_folder_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["data=text", "data.path=texts/a.txt", "run.dir=out"]
    here = compose_config(words)
    monkeypatch.chdir(tmp_path)
    assert compose_config(words).config == here.config
    assert Path.cwd() == tmp_path
