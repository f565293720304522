"""The schema and the option files agree with each other and with their own rules of form."""

from __future__ import annotations

import re

import pytest
import yaml

from llmtrain.config import schema
from llmtrain.config.compose import group_options
from llmtrain.config.files import Folders
from llmtrain.config.keys import KeyInfo, ValueKind, choice_key, leaves, sections
from llmtrain.config.rules import check_rules
from llmtrain.config.values import convert

LEAVES = list(leaves().values())
OPTIONS = [(group, option) for group, options in group_options().items() for option in options]
# `none` of groups that cannot be switched on yet needs no file.
WITHOUT_FILE = {("profile", "none")}


@pytest.mark.parametrize("info", LEAVES, ids=lambda info: info.name)
def test_every_key_is_documented_and_its_default_is_legal(info: KeyInfo) -> None:
    assert info.doc and info.doc == info.doc.strip() and not info.doc.endswith(".")
    if info.default is not None:
        assert convert(info, info.default) == info.default
    else:
        assert info.optional
    assert not set(info.choices) & set(info.later)


@pytest.mark.parametrize("info", [info for info in LEAVES if info.kinds], ids=lambda info: info.name)
def test_a_key_of_some_kinds_is_not_given_by_default(info: KeyInfo) -> None:
    assert info.default is None and info.optional
    assert set(info.kinds) <= set(leaves()[f"{info.section}.kind"].choices)


def test_the_defaults_break_no_rule() -> None:
    assert check_rules(schema.Config()) == []


def test_every_key_and_section_is_in_exactly_one_place() -> None:
    assert not set(leaves()) & sections()
    assert set(schema.GROUPS) - {"experiment"} <= sections()
    assert not set(leaves()) & set(schema.GROUPS)


@pytest.mark.parametrize("group", [group for group in schema.GROUPS if choice_key(group) is not None])
def test_every_available_word_of_a_group_is_an_option(group: str) -> None:
    info = choice_key(group)
    assert info is not None
    missing = {(group, word) for word in info.choices} - set(OPTIONS)
    assert missing <= WITHOUT_FILE


@pytest.mark.parametrize("group,option", OPTIONS)
def test_an_option_says_in_one_line_what_it_trades(group: str, option: str) -> None:
    summary = group_options()[group][option]
    assert re.fullmatch(r"saves [^;]+; costs [^;]+; changes training: (no|rounding|yes)", summary), summary
    lines = (Folders().shipped / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    first = lines[1] if group == "experiment" else lines[0]
    assert first == f"# {summary}"
    assert all(len(line) <= 128 for line in lines)


NAMED_AFTER_A_WORD = [(group, option) for group, option in OPTIONS if choice_key(group) is not None]


@pytest.mark.parametrize("group,option", NAMED_AFTER_A_WORD)
def test_an_option_sets_the_word_it_is_named_after(group: str, option: str) -> None:
    info = choice_key(group)
    assert info is not None and info.kind is ValueKind.TEXT
    values = yaml.safe_load((Folders().shipped / group / f"{option}.yaml").read_text(encoding="utf-8"))
    assert values[info.name.rpartition(".")[2]] == option


def test_experiments_override_lists_only() -> None:
    """`override /precision: bf16` instead of `[bf16]` would make `+precision=fp32` fail beside the experiment."""
    for path in Folders().options("experiment"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# @package _global_\n")
        for entry in yaml.safe_load(text).get("defaults", []):
            ((name, options),) = entry.items()
            assert re.fullmatch(r"override /\w+", name), (path, name)
            assert isinstance(options, list) and len(options) == 1, (path, options)


def test_the_primary_file_lists_every_group_once_in_order() -> None:
    listed = yaml.safe_load((Folders().shipped / "train.yaml").read_text(encoding="utf-8"))
    entries = listed.pop("defaults")
    assert not listed, "values live in the schema and in options"
    assert [name for entry in entries if isinstance(entry, dict) for name in entry] == list(schema.GROUPS)
    assert all(options == [] for entry in entries if isinstance(entry, dict) for options in entry.values())
    assert entries.index("_self_") == len(entries) - 2
