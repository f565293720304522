"""The doctor's report: every option of every group has an answer, and the answers are those of the parts."""

from __future__ import annotations

import json

import pytest

from llmtrain.cli.dispatch import dispatch
from llmtrain.cli.doctor import PACKAGES, option_table
from llmtrain.config.compose import group_options
from llmtrain.config.keys import choice_key
from llmtrain.config.schema import GROUPS
from llmtrain.dist.world import LaunchFacts
from llmtrain.plan.plan import Availability
from llmtrain.train.machine import options_here


def test_report_covers_every_group_option_and_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["doctor", "output=json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["versions"]) == {"python", *PACKAGES}
    assert report["machine"]["device"] in ("cpu", "cuda", "mps") and report["machine"]["cores"] >= 1
    assert report["machine"]["host_memory_bytes"] > 2**26 and not any("limits" in name for name in report["machine"])
    for group in GROUPS:
        info = choice_key(group)
        words = {*info.choices, *info.later} if info else set()
        assert set(report["options"][group]) == set(group_options().get(group, {})) | words
    for options in report["options"].values():
        assert all(found["available"] == (found["reason"] == "") for found in options.values())
    assert report["options"]["precision"]["fp8"]["reason"] == "not available in this version"


def test_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["doctor"]) == 0
    page = capsys.readouterr().out
    assert all(option in page for options in group_options().values() for option in options)
    assert "torch" in page and "(auto: " in page


def test_reasons_come_from_the_parts() -> None:
    reason = Availability(False, "not installed")
    listed = {"tokenizer": ["byte", "bpe"], "attention": ["sdpa"]}
    table = option_table(listed, {"tokenizer=bpe": reason, "attention.backend=sdpa": reason})
    assert table["tokenizer"]["bpe"] == reason and table["attention"]["sdpa"] == reason
    assert table["tokenizer"]["byte"].available and not table["precision"]["fp16"].available
    assert table["cluster"] == {}


def test_parts_answer_for_options_that_exist() -> None:
    known = {f"{group}={option}" for group in GROUPS for option in group_options().get(group, {})}
    known |= {f"{info.name}={word}" for info in map(choice_key, GROUPS) if info for word in info.choices}
    answers = options_here("cpu")
    assert set(answers) <= known
    assert {"attention.backend=sdpa", "tokenizer=bpe", "optimizer=adamw", "launch=cuda"} <= set(answers)


def test_what_cannot_train_here_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert dispatch(["doctor", "launch.device=cpu"]) == 0
    assert "flex (no training on cpu)" in " ".join(capsys.readouterr().out.split())
    assert dispatch(["doctor", "launch.device=cpu", "output=json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]["attention"]
    assert options["flex"] == {"available": True, "reason": "", "limit": "no training on cpu"}
    assert "limit" not in options["sdpa"] and "limit" not in options["flash_attn"]


def page_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], facts: LaunchFacts) -> str:
    monkeypatch.setattr("llmtrain.train.machine.read_launch", lambda environ, nproc: facts)
    monkeypatch.setenv("COLUMNS", "140")
    assert dispatch(["doctor", "launch.device=cpu"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_page_says_what_started_the_ranks_and_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = LaunchFacts(3, 1, 4, "SLURM_STEP_NUM_TASKS", local_world_size=2, num_nodes=2)
    page = page_with(monkeypatch, capsys, slurm)
    assert "processes 4 (SLURM_STEP_NUM_TASKS, of srun; 2 on this host, 2 hosts)" in page and "GiB for each rank" in page
    own = LaunchFacts(0, 0, 2, "launch.nproc", local_world_size=2)
    assert "processes 2 (launch.nproc; 2 on this host, 1 host)" in page_with(monkeypatch, capsys, own)
    alone = page_with(monkeypatch, capsys, LaunchFacts(0, 0, 1, "one process"))
    assert "processes 1 (one process)" in alone and "for each rank" not in alone


def test_mps_is_an_option_with_a_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("llmtrain.train.machine.mps_missing_reason", lambda: "not a Mac")
    assert dispatch(["doctor", "output=json", "launch.device=cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["options"]["launch"]["mps"] == {"available": False, "reason": "not a Mac"}
    assert report["options"]["launch"]["cpu"]["available"] is True
