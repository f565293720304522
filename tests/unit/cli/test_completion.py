"""Tab completion: what is offered where, and that the shells' scripts work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.scripts import ROOT

from llmtrain.cli.completion import SCRIPTS, candidates
from llmtrain.cli.dispatch import dispatch
from llmtrain.config.compose import group_options
from llmtrain.config.schema import GROUPS


def offered(line: str) -> list[str]:
    return candidates(f"llmtrain {line}")


def test_the_first_word_is_a_verb_a_group_or_a_section() -> None:
    found = offered("")
    assert {"train", "evaluate", "doctor", "precision=", "optimizer.", "output="} <= set(found)
    assert "bench" not in found
    assert offered("ev") == ["evaluate"]
    assert offered("train ev") == [], "a training refuses the keys of an evaluation"


@pytest.mark.parametrize("sign", ["", "+"])
def test_groups_and_their_options_with_and_without_a_plus(sign: str) -> None:
    assert set(offered(f"{sign}")) >= {f"{sign}{group}=" for group in GROUPS}
    assert offered(f"{sign}prec")[0] == f"{sign}precision="
    assert offered(f"{sign}precision=") == [f"{sign}precision={option}" for option in group_options()["precision"]]
    assert offered(f"{sign}precision=bf") == [f"{sign}precision=bf16"]


def test_the_next_value_of_a_sweep() -> None:
    assert offered("-m precision=fp32,b") == ["precision=fp32,bf16"]


def test_dotted_keys_one_level_at_a_time() -> None:
    assert offered("model.att") == ["model.attention."]
    assert "model.attention.num_heads=" in offered("model.attention.")
    assert offered("optimizer.l") == ["optimizer.lr="]
    assert "generate.seed=" in offered("generate.") and "generate.prompt=" not in offered("generate.")
    assert "generate.prompt=" in offered("generate runs/a generate.")
    assert offered("doctor op") == [] and offered("doctor lau") == ["launch=", "launch."]


def test_legal_words_of_a_key() -> None:
    assert offered("train.deterministic=") == ["train.deterministic=true", "train.deterministic=false"]
    assert offered("run.on_change=") == ["run.on_change=refuse", "run.on_change=continue"]
    assert offered("accumulation.micro_batch_size=") == ["accumulation.micro_batch_size=auto"]
    assert offered("optimizer.kind=") == ["optimizer.kind=adamw"]
    assert offered("no.such.key=") == []


def test_options_and_their_values() -> None:
    assert offered("--he") == ["--help"]
    assert offered("--cfg ") == ["job"]
    assert offered("--completion f") == ["fish"]
    assert "optimizer" in offered("-h opt")


def test_a_verb_on_a_run_folder_is_offered_folders_and_its_own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "config.yaml").touch()
    (tmp_path / "runs" / "group").mkdir()
    monkeypatch.chdir(tmp_path)
    assert {"runs/demo", "runs/group/", "evaluate.", "launch."} <= set(offered("evaluate "))
    assert "optimizer." not in offered("evaluate ") and "precision=" not in offered("evaluate ")
    assert offered("evaluate runs/d") == ["runs/demo"]
    assert offered("generate ru") == ["runs/"]


def test_own_options_are_offered(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("# mine\nlr: 1e-4\n")
    assert "optimizer=mine" in offered(f"--config-dir {tmp_path} optimizer=")
    assert "optimizer=mine" in offered(f"--config-dir={tmp_path} optimizer=m")


def run_shell(shell: str, script: str, tmp_path: Path) -> str:
    """Run a script in a shell in which `llmtrain` is this checkout."""
    command = tmp_path / "llmtrain"
    command.write_text(f'#!/bin/sh\ncd "{ROOT}" && exec {sys.executable} -m llmtrain "$@"\n')
    command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_bash(line: str, tmp_path: Path) -> list[str]:
    """Replies of bash's completion function for a line with the cursor at its end."""
    setup = "COMP_WORDBREAKS=$' \\t\\n\"\\'><=;|&(:'; compopt() { :; }; eval \"$(llmtrain --completion bash)\""
    ask = f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _llmtrain; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return run_shell("bash", f"{setup}; {ask}", tmp_path).splitlines()


def test_bash_gets_what_follows_the_equals_sign(tmp_path: Path) -> None:
    assert in_bash("llmtrain eval", tmp_path) == ["evaluate"]
    assert in_bash("llmtrain +precision=bf", tmp_path) == ["bf16"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(tmp_path: Path) -> None:
    asked = run_shell("fish", "llmtrain --completion fish | source; complete -C 'llmtrain +precision=bf'", tmp_path)
    assert asked.split() == ["+precision=bf16"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_accepts_the_script(tmp_path: Path) -> None:
    asked = 'eval "$(llmtrain --completion zsh)"; whence _llmtrain; print -r -- "llmtrain: ${_comps[llmtrain]}"'
    said = run_shell("zsh", f"autoload -U compinit; compinit -u -D; {asked}", tmp_path)
    assert said.splitlines() == ["_llmtrain", "llmtrain: _llmtrain"], "the function is there and completes the command"


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_scripts_are_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["--completion", shell]) == 0
    assert "llmtrain --complete" in capsys.readouterr().out
