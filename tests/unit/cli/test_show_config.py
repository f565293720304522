"""`--cfg job`: what is printed is the config, and is read back as the same config."""

from __future__ import annotations

import json

import pytest
import yaml

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.compose import compose_config, config_from_wire

WORDS = [
    "+precision=bf16",
    "recompute=selective",
    "optimizer.lr=3e-4",
    "train.steps=1e3",
    "run.name=1e5",
    "train.eval_every=${checkpoint.every}",
    "recompute.keep=[attention]",
    "+experiment=demo",
]


@pytest.mark.parametrize("resolve", [[], ["--resolve"]])
def test_what_is_printed_composes_to_the_same_config(resolve: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--cfg", "job", *resolve, *WORDS]) == 0
    wire = yaml.safe_load(capsys.readouterr().out)
    composed = compose_config(WORDS)
    assert wire == composed.wire
    assert config_from_wire(wire) == composed.config
    assert wire["run"]["name"] == "1e5" and wire["train"]["eval_every"] == composed.wire["checkpoint"]["every"]


@pytest.mark.parametrize("resolve", [[], ["--resolve"]])
def test_text_of_any_form_is_printed_as_it_is(resolve: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate.prompt='line one: # no comment\nline two'", "generate.seed=1"]
    assert dispatch(["generate", "--cfg", "job", *resolve, *words]) == 0
    wire = yaml.safe_load(capsys.readouterr().out)
    assert wire == compose_config(words).wire and wire["generate"]["prompt"] == "line one: # no comment\nline two"


def test_origins_are_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--cfg", "job", *WORDS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  lr: 0.0003  # command line, word 5" in lines
    assert any(line.startswith("  kind: bf16  # configs/precision/bf16.yaml:") for line in lines)
    assert "  weight_decay: 0.1" in lines


def test_resolve_prints_values_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--cfg", "job", "--resolve", "optimizer.lr=3e-4"]) == 0
    assert "#" not in capsys.readouterr().out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--cfg", "job", "output=json", "optimizer.lr=3e-4"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["config"]["optimizer"]["lr"] == 3e-4 and document["origins"]["optimizer.lr"] == "command line, word 4"
    assert dispatch(["--cfg", "job", "--resolve", "output=json"]) == 0
    assert "origins" not in json.loads(capsys.readouterr().out)
