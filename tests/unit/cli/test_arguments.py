"""The grammar of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.cli.arguments import parse_arguments
from llmtrain.cli.verbs import VERBS
from llmtrain.config.errors import ConfigError, ExitCode


def message(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(argv)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value)


def test_train_is_the_default_verb() -> None:
    parsed = parse_arguments(["+precision=bf16", "optimizer.lr=1e-3"])
    assert (parsed.verb, parsed.verb_given, parsed.words) == ("train", False, ["+precision=bf16", "optimizer.lr=1e-3"])
    assert parse_arguments(["train"]).verb_given
    assert parse_arguments([]).verb == "train"


def test_verb_then_folder_then_overrides() -> None:
    parsed = parse_arguments(["generate", "runs/a", "generate.prompt=the end", "~tracker"])
    assert (parsed.verb, parsed.folders, parsed.words) == (
        "generate",
        [Path("runs/a")],
        ["generate.prompt=the end", "~tracker"],
    )
    assert parse_arguments(["launch.device=cpu", "evaluate", "train"]).folders == [Path("train")]


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["-h"], "help", True),
        (["--help", "optimizer"], "help_topic", "optimizer"),
        (["--version"], "version", True),
        (["--cfg", "job"], "cfg", True),
        (["--cfg=job", "--resolve"], "resolve", True),
        (["-m", "precision=fp32,bf16"], "multirun", True),
        (["--config-dir", "a", "--config-dir=b"], "config_dirs", [Path("a"), Path("b")]),
        (["--config-name", "mine.yaml"], "config_name", "mine"),
        (["--completion", "zsh"], "completion", "zsh"),
        (["--complete", "llmtrain pre"], "complete", "llmtrain pre"),
        (["--complete", ""], "complete", ""),
    ],
)
def test_options(argv: list[str], field: str, value: object) -> None:
    assert getattr(parse_arguments(argv), field) == value


def test_a_page_is_shown_whatever_else_was_typed() -> None:
    assert parse_arguments(["evaluate", "--help"]).verb == "evaluate"
    assert parse_arguments(["--resolve", "runs=a", "--help"]).help


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["trian"], ("error: trian", "no verb of this name", "try   train", "command line, word 1")),
        (["+precision=bf16", "evalaute", "runs/a"], ("error: evalaute", "try   evaluate", "word 2")),
        (["zzz"], ("one of doctor, prepare, train, evaluate, generate, convert",)),
        (["--halp"], ("error: --halp", "try   --help")),
        (["--mulitrun"], ("try   --multirun",)),
        (["-x"], ("error: -x", "llmtrain --help")),
        (["--cfg"], ("needs a value", "--cfg job")),
        (["--cfg", "hydra"], ("error: --cfg hydra", "one of job")),
        (["--completion", "tcsh"], ("bash, zsh, fish",)),
        (["--config-dir"], ("--config-dir VALUE",)),
        (["--version=1"], ("takes no value",)),
        (["--help=optimizer"], ("takes no value",)),
        (["--resolve"], ("only with --cfg job",)),
        (["-m", "evaluate", "runs/a"], ("only for the verb train, here verb evaluate",)),
        (["-m", "--cfg", "job"], ("here --cfg job",)),
        (["evaluate"], ("error: no folder", "evaluate takes RUN_FOLDER", "llmtrain evaluate runs/NAME")),
        (["generate", "runs/a", "runs/b"], ("error: runs/a runs/b",)),
        (["train", "runs/a"], ("train takes no run folder", "run.name=a run.dir=runs")),
        (["runs/a"], ("run folders follow it", "llmtrain evaluate runs/a", "run.name=a")),
        (["precision", "bf16"], ("error: precision", "precision=OPTION", "--help precision")),
        (["optimizer.lr", "3"], ("error: optimizer.lr", "optimizer.lr=VALUE")),
    ],
)
def test_mistakes_name_the_word_the_rule_and_the_cure(argv: list[str], told: tuple[str, ...]) -> None:
    text = message(*argv)
    assert all(part in text for part in told), text
    assert "  rule  " in text and "  try   " in text


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS.values() if not verb.built])
def test_verbs_of_later_versions_are_refused(verb: str) -> None:
    assert {"plan", "prepare", "check", "bench", "convert", "report"} >= {verb}
    assert "not available in this version" in message(verb)
