"""Names and files of a run folder, and what a start into it means."""

import errno
import json
import os
import re

import pytest
import torch
import yaml
from helpers.faulty_files import FailingFiles, UnsyncedFiles
from helpers.run_folders import decide, plan_of, start, wire

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.errors import ConfigError, ExitCode, StorageError
from llmtrain.train.run_folder import RunFolder, Start, describe_environment, existing_run_folder, resolve_run_folder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "demo", UnsyncedFiles())


# --- name ---


def test_drawn_name_has_label_time_and_four_digits(tmp_path):
    names = {resolve_run_folder(tmp_path, None, "small llama/x").path.name for _ in range(20)}
    assert len(names) > 1
    assert all(re.fullmatch(r"small-llama-x-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)


def test_given_names_are_kept(tmp_path):
    for name in ("demo", "1e5", "sweep/0-lr=1e-3", "ü b"):
        assert resolve_run_folder(tmp_path, name, "tiny").path == tmp_path / name


def test_a_batch_job_finds_its_folder_again(tmp_path):
    assert {resolve_run_folder(tmp_path, None, "tiny", job_id="4711").path.name for _ in range(3)} == {"tiny-4711"}
    assert resolve_run_folder(tmp_path, "demo", "tiny", job_id="4711").path.name == "demo"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/../../b", "/etc", "a\nb", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="run.name="):
        resolve_run_folder(tmp_path, name, "tiny")


# --- files ---


def test_every_file_has_a_format_version_and_comes_back(folder):
    config = wire(run__name="1e5", optimizer__eps=1e-12, data__kind="text", data__path="null", train__stop_after=7)
    start(folder, config)
    for name in ("plan.json", "environment.json", "status.json"):
        assert json.loads((folder.path / name).read_text())["format_version"] == 1
    for name in ("config.yaml", "overrides.yaml"):
        assert yaml.safe_load((folder.path / name).read_text())["format_version"] == 1
    assert folder.read_config() == config
    status = folder.read_status()
    assert (status.code, status.step, status.reason) == (None, 0, "running")
    assert {path.name for path in folder.path.iterdir()} == {
        *("config.yaml", "overrides.yaml", "plan.json", "environment.json", "status.json", "checkpoints")
    }


def test_overrides_keep_the_words_of_every_start(folder):
    start(folder, wire(), saved=[250])
    start(folder, wire(checkpoint__every=10))
    starts = yaml.safe_load((folder.path / "overrides.yaml").read_text())["starts"]
    assert [entry["words"] for entry in starts] == [["model=tiny"]] * 2
    assert [entry["changed"] for entry in starts] == [{}, {"checkpoint.every": [250, 10]}]


def test_environment_names_versions_and_no_variables(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "canary-7d1f")
    plan = plan_of(wire())
    facts = describe_environment(plan, "a cpu", [("a", 2), ("a", 2), ("b", 1)])
    assert facts["packages"]["torch"] == torch.__version__ and facts["device"] == "cpu" and facts["threads"] == plan.threads
    assert facts["ranks"] == 3 and facts["hosts"] == ["a", "b"] and facts["threads_by_rank"] == [2, 2, 1]
    assert "canary" not in json.dumps(facts)


@pytest.mark.parametrize("name", ["config.yaml", "status.json"])
def test_a_newer_file_is_refused_naming_both_versions(folder, name):
    start(folder, wire(), saved=[1])
    path = folder.path / name
    path.write_text(re.sub(r"format_version(\"?): 1", r"format_version\1: 4", path.read_text()))
    with pytest.raises(StorageError, match=r"format_version 4.*up to 1"):
        decide(folder, wire())


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "code: [", "{}", '{"format_version": 1}', '{"format_version": "x"}', "\x00"]
)
@pytest.mark.parametrize("name", ["config.yaml", "status.json"])
def test_a_spoilt_file_is_told_by_name(folder, name, content):
    start(folder, wire(), saved=[1])
    (folder.path / name).write_text(content)
    if (name, content) == ("config.yaml", '{"format_version": 1}'):
        assert decide(folder, wire()).start is Start.RESUME  # every key is younger than this file: all defaults
        return
    with pytest.raises(StorageError, match=name):
        decide(folder, wire())


def test_no_run_in_a_folder(tmp_path):
    with pytest.raises(StorageError, match="no run folder"):
        existing_run_folder(tmp_path)
    start(RunFolder(tmp_path / "r"), wire())
    assert existing_run_folder(tmp_path / "r").path == tmp_path / "r"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path, number):
    folder = RunFolder(tmp_path / "demo", FailingFiles(number, 1, for_ever=True))
    with pytest.raises(StorageError) as caught:
        folder.create()
    assert os.strerror(number) in str(caught.value) and "run.dir" in str(caught.value)
    assert caught.value.exit_code == ExitCode.STORAGE


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "demo").write_text("")
    with pytest.raises(StorageError, match="demo"):
        RunFolder(tmp_path / "demo").create()


# --- fresh, resume, finished ---


def test_fresh_until_something_was_saved(folder):
    assert start(folder, wire()).start is Start.FRESH
    # It died before the first save: nothing is lost by another config.
    assert start(folder, wire(optimizer__lr=0.5, model__dim=64)).start is Start.FRESH
    assert start(folder, wire(optimizer__lr=0.5, model__dim=64), saved=[250]).start is Start.FRESH
    opening = decide(folder, wire(optimizer__lr=0.5, model__dim=64))
    assert (opening.start, opening.changes) == (Start.RESUME, ()) and "250" in opening.message


@pytest.mark.parametrize("code", [None, 75, 77, 74])
def test_a_run_that_did_not_end_well_resumes(folder, code):
    start(folder, wire(), saved=[250, 1000], code=code, step=1000)
    assert decide(folder, wire()).start is Start.RESUME


def test_finished_says_so(folder):
    start(folder, wire(), saved=[1000], code=0, step=1000)
    opening = decide(folder, wire(output="json", generate__seed=3, evaluate__tokens=5, run__on_change="continue", run__dir="x"))
    assert opening.start is Start.FINISHED and opening.changes == ()
    assert str(folder.path) in opening.message and "1000" in opening.message


def test_stop_after_is_an_end_until_it_moves(folder):
    start(folder, wire(train__stop_after=500), saved=[500], code=0, step=500)
    opening = decide(folder, wire(train__stop_after=500))
    assert opening.start is Start.FINISHED and "train.stop_after=500" in opening.message
    assert decide(folder, wire(train__stop_after=700)).start is Start.RESUME
    assert decide(folder, wire()).start is Start.RESUME


def test_checkpoints_without_a_config_are_not_ours(folder):
    folder.create()
    CheckpointStore(folder.checkpoints, 1).save(4, {}, {})
    with pytest.raises(StorageError, match="no config.yaml"):
        decide(folder, wire())


def test_a_damaged_checkpoint_is_no_fresh_start(folder):
    start(folder, wire(), saved=[250])
    (folder.checkpoints / "step-00000250" / "MANIFEST.json").unlink()
    assert decide(folder, wire()).start is Start.RESUME  # and loading then says what is wrong


def test_deciding_writes_nothing(folder):
    start(folder, wire(), saved=[250])
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    decide(folder, wire(checkpoint__every=1))
    assert before == {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
