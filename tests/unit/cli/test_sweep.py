"""Sweeps as a whole: how they are laid out, what is refused, what is left at the end. Jobs are played."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.played_jobs import Stage
from helpers.scripts import ROOT

from llmtrain.cli import sweep as sweep_module
from llmtrain.cli import sweep_share, train
from llmtrain.cli.arguments import Arguments, parse_arguments
from llmtrain.cli.dispatch import dispatch
from llmtrain.cli.request import compose
from llmtrain.cli.sweep_layout import job_suffix, lay_out, own_command, quoted
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError
from llmtrain.dist.devices import available_cores
from llmtrain.dist.world import read_launch
from llmtrain.train.run_lock import RunLock

GRID = ["-m", "+precision=fp32,bf16", "optimizer.lr=0.001,0.01", "run.name=grid"]

TWO_RANKS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
"""The environment of one of them."""


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_jobs_are_every_combination_in_folders_of_their_own() -> None:
    sweep = lay_out(parse_arguments(GRID))
    assert sweep.folder == Path("runs/grid")
    assert sweep.names == (
        "0-precision-fp32-optimizer.lr-0.001",
        "1-precision-fp32-optimizer.lr-0.01",
        "2-precision-bf16-optimizer.lr-0.001",
        "3-precision-bf16-optimizer.lr-0.01",
    )
    for index, name in enumerate(sweep.names):
        command = sweep.command(index)
        assert command[:4] == [*own_command(), "train"][:4] and command[4] == "train"
        parsed = parse_arguments(command[4:])
        assert parsed.config_name == "train" and not parsed.multirun
        run = compose_config(parsed.words).config.run
        assert (Path(run.dir), run.name) == (sweep.folder, name)
        assert [word for word in parsed.words if word.startswith("run.name")] == [f"run.name={name}"]
    assert compose_config(parse_arguments(sweep.command(3)[4:]).words).config.optimizer.lr == 0.01


def test_own_config_folders_reach_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    (tmp_path / "mine" / "optimizer" / "slow.yaml").write_text("# saves nothing\nlr: 1e-5\n")
    sweep = lay_out(parse_arguments(["-m", "--config-dir", "mine", "optimizer=slow", "run.seed=1,2"]))
    parsed = parse_arguments(sweep.command(0)[4:])
    assert compose_config(parsed.words, config_dirs=parsed.config_dirs).config.optimizer.lr == 1e-5
    assert sweep.folder.parent == Path("runs") and "-sweep-" in sweep.folder.name


def test_folder_names_can_be_typed_and_stay_short() -> None:
    assert "=" not in job_suffix({"a.b": "x=y z/..", "c": "[1,2]"}) and "/" not in job_suffix({"a": "x/y"})
    assert len(job_suffix({"key": "v" * 500})) <= 80
    assert quoted("/runs/a-b_1.x") == "/runs/a-b_1.x"
    for text in ("a,b", "it's", "x=y", "runs/täglich", "null", "1e3", "runs/a", "a b/c", "range(1,2)/x", "$x/y"):
        assert compose_config([f"run.dir={quoted(text)}"]).config.run.dir == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run.name=a,b"], "run.name swept"),
        (["run.dir=a,b"], "run.dir swept"),
        (["output=table,json"], "output swept"),
        (["sweep.jobs=1,2"], "sweep.jobs swept"),
        (["sweep.only=0,1"], "sweep.only swept"),
        (["sweep.jobs=0"], "sweep.jobs=0"),
        (["train.stesp=1,2"], "train.steps"),
        (["optimizer.lr=-1,-2"], "optimizer.lr=-1"),
    ],
)
def test_a_mistake_in_every_job_stops_the_sweep_before_the_first(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        lay_out(parse_arguments(["-m", *words]))
    assert not Path("runs").exists()


def test_one_illegal_combination_is_left_to_its_job() -> None:
    assert len(lay_out(parse_arguments(["-m", "optimizer.lr=-1,0.1"])).jobs) == 2


def on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)


def test_a_sweep_started_as_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_two_ranks(monkeypatch)
    with pytest.raises(ConfigError, match="WORLD_SIZE=2\n  rule  .*every rank would start them all\n  try   .*sweep.only=K"):
        lay_out(parse_arguments([*GRID, "launch.nproc=2"]))


def test_jobs_with_ranks_are_no_reason_to_refuse() -> None:
    sweep = lay_out(parse_arguments([*GRID[:-1], "launch.nproc=1,2"]))
    assert [word for word in sweep.words(1) if word.startswith("launch")] == ["launch.nproc=2"]


def test_the_keys_of_the_sweep_are_not_passed_on_to_its_jobs() -> None:
    sweep = lay_out(parse_arguments([*GRID, "sweep.jobs=3"]))
    assert sweep.num_slots == 3 and not any("sweep" in word for index in range(4) for word in sweep.command(index))
    assert lay_out(parse_arguments([*GRID, "sweep.jobs=99"])).num_slots == 4


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Arguments]:
    """The command lines that were trained, in place of training them."""
    calls: list[Arguments] = []

    def run(arguments: Arguments) -> int:
        calls.append(arguments)
        return 77

    monkeypatch.setattr(train, "run", run)
    return calls


def test_one_job_of_an_array_is_a_plain_training_in_this_process(
    trained: list[Arguments], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    (tmp_path / "mine" / "optimizer" / "slow.yaml").write_text("# saves nothing\nlr: 1e-5\n")
    on_two_ranks(monkeypatch)
    folder = Path("runs/grid")
    folder.mkdir(parents=True)
    more = ["--config-dir", "mine", "optimizer=slow", "output=json", "launch.nproc=2", "sweep.only=2"]
    with RunLock(folder):  # another job of the array, or whoever collects
        assert dispatch([*GRID, *more]) == 77, "the exit code of the training"
    (arguments,) = trained
    config = compose(arguments).config
    assert (Path(config.run.dir), config.run.name) == (folder, "2-precision-bf16-optimizer.lr-0.001")
    assert (config.output, config.launch.nproc, config.optimizer.lr) == ("json", 2, 0.001)
    assert not arguments.multirun and not any("sweep" in word for word in arguments.words)
    assert not (folder / "logs").exists()


def test_a_job_of_an_array_goes_where_the_sweep_looks_for_it(trained: list[Arguments]) -> None:
    dispatch([*GRID, "sweep.only=3"])
    sweep = lay_out(parse_arguments(GRID))
    assert compose(trained[0]).wire == compose_config(sweep.words(3)).wire


def test_words_of_one_job_keep_their_places_in_messages() -> None:
    typed = ["-m", "sweep.only=1", "run.name=grid", "optimizer.lr=0.1,-1", "train.steps=3"]
    arguments = parse_arguments(typed)
    with pytest.raises(ConfigError, match="set   command line, word 4"):
        compose(lay_out(arguments).plain_training(1, arguments.positions))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sweep.only=4"], "sweep.only=4\n  rule  the jobs of this sweep are numbered 0 to 3\n  try   sweep.only=3"),
        (["sweep.only=0", "sweep.jobs=2"], "sweep.jobs=2\n  rule  sweep.only=0 runs one job"),
        (["sweep.only=0", "run.name=null"], "sweep.only=0\n  rule  .*by its name\n  try   run.name=NAME"),
        (["sweep.only=-1"], "sweep.only=-1"),
    ],
)
def test_what_is_no_job_of_an_array_is_refused(trained: list[Arguments], words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        lay_out(parse_arguments([*GRID, *words]))
    assert dispatch([*GRID, *words]) == 2 and not trained


@pytest.mark.parametrize("argv", [["sweep.jobs=2"], ["train", "+sweep.only=1"], ["--cfg", "job", "sweep.jobs=2"]])
def test_b56_the_keys_of_a_sweep_are_refused_without_one(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {argv[-1]}\n  rule  only with -m") and f"llmtrain -m {argv[-1]}" in told


def test_jobs_at_the_same_time_share_the_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage([0] * 4, num_polls=[3] * 4)
    monkeypatch.setattr(sweep_module, "start_process", stage)
    monkeypatch.setattr(sweep_share, "ask_host", lambda environ: sweep_share.Host(12, 9000, ("4", "5", "6", "7")))
    assert dispatch([*GRID, "sweep.jobs=2", "launch.nproc=2"]) == 0
    places = [read_launch(environment, 2) for environment in stage.environments]
    assert {(place.host_jobs, place.host_memory) for place in places} == {(2, 4500)}
    assert not any("launch.threads" in word for command in stage.commands for word in command)
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in stage.environments} == {"4,5", "6,7"}
    assert "4 jobs, 2 at a time" in capsys.readouterr().out
    assert dispatch([*GRID[:-1], "run.name=wide", "sweep.jobs=3", "launch.nproc=2"]) == 2
    assert "try   sweep.jobs=2, or launch.device=cpu" in capsys.readouterr().err and not Path("runs/wide").exists()
    assert dispatch([*GRID[:-1], "run.name=many", "sweep.jobs=2", "launch.threads=7"]) == 2
    told = capsys.readouterr().err
    assert "12 cores of this host for 2 jobs of 1 rank of 7 threads = 14" in told and not Path("runs/many").exists()


@pytest.mark.parametrize(("codes", "code"), [([0, 0, 0, 0], 0), ([0, 1, 0, 0], 1)])
def test_exit_code_csv_and_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], codes: list[int], code: int
) -> None:
    stage = Stage(codes, [1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(sweep_module, "start_process", stage)
    assert dispatch([*GRID, "output=json"]) == code
    out, err = capsys.readouterr()
    jobs = json.loads(out)["jobs"]
    assert [job["val_loss"] for job in jobs] == [1.0, 2.0, 3.0, 4.0] and jobs[3]["precision"] == "bf16"
    assert "1/4" in err and "saved  runs/grid/sweep.csv" in err
    rows = list(csv.DictReader(Path("runs/grid/sweep.csv").open()))
    assert [row["optimizer.lr"] for row in rows] == ["0.001", "0.01", "0.001", "0.01"]
    assert [row["exit_code"] for row in rows] == [str(number) for number in codes]
    assert not any(word.startswith("output=") for command in stage.commands for word in command)


def test_a_job_that_was_told_to_stop_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage([0, 75], [1.0, 2.0])
    monkeypatch.setattr(sweep_module, "start_process", stage)
    assert dispatch(GRID) == 75
    assert len(stage.jobs) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "go on  the same command with run.name=grid"


def test_a_folder_that_cannot_be_made_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").write_text("in the way")
    assert dispatch(GRID) == 74
    assert "error: cannot write runs/grid" in capsys.readouterr().err


def test_a_second_sweep_in_the_folder_of_a_running_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/grid")
    folder.mkdir(parents=True)
    with RunLock(folder):
        assert dispatch(GRID) == 74
    assert "is in use" in capsys.readouterr().err and not (folder / "logs").exists()


def test_the_document_is_json_whatever_the_losses_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_module, "start_process", Stage([0] * 4, [math.nan, math.inf, -math.inf, 1.0]))
    assert dispatch([*GRID, "output=json"]) == 0

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    jobs = json.loads(capsys.readouterr().out, parse_constant=refuse)["jobs"]
    assert [job["val_loss"] for job in jobs] == ["NaN", "Infinity", "-Infinity", 1.0]


def test_a_home_folder_in_run_dir_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sweep = lay_out(parse_arguments([*GRID, "run.dir=~/rr"]))
    assert sweep.folder == tmp_path / "home" / "rr" / "grid"
    with pytest.raises(ConfigError, match="run.dir=~nosuchuser/rr"):
        lay_out(parse_arguments([*GRID, "run.dir=~nosuchuser/rr"]))


def test_a_sweep_waits_without_torch() -> None:
    code = "import sys, llmtrain.cli.sweep; sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def small(*words: str) -> list[str]:
    """A sweep whose jobs take a second of computing."""
    shape = [
        "model.num_layers=1",
        "model.attention.num_heads=2",
        "data.sequence_length=16",
    ]
    run = ["train.steps=2", "launch.device=cpu", "accumulation.global_batch_size=2", "generate.max_tokens=1"]
    return ["-m", "data=synthetic", *shape, *run, *words]


@pytest.mark.timeout(300)
def test_four_jobs_two_at_a_time_of_which_one_fails(tmp_path: Path) -> None:
    """Real processes; then the array job that a failed one can be repeated as, and the same command, which only collects."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from llmtrain.__main__ import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def llmtrain(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    words = small("optimizer.lr=1e-3,1e-2", "model.dim=16,15", "run.name=grid")
    done = llmtrain(*words, "sweep.jobs=2")
    assert done.returncode == 1, done.stderr
    rows = list(csv.DictReader((tmp_path / "runs/grid/sweep.csv").open()))
    assert [(row["optimizer.lr"], row["model.dim"]) for row in rows] == [
        *(("1e-3", "16"), ("1e-3", "15")),
        *(("1e-2", "16"), ("1e-2", "15")),
    ]
    assert [row["exit_code"] for row in rows] == ["0", "2", "0", "2"] and "15" in rows[1]["reason"]
    assert all(float(row["val_loss"]) > 0 for row in rows[::2])
    plan = json.loads((tmp_path / "runs/grid/0-optimizer.lr-1e-3-model.dim-16/plan.json").read_text())
    assert plan["threads"] == max(1, available_cores() // 2)
    log = tmp_path / "runs/grid/logs/0-optimizer.lr-1e-3-model.dim-16.log"
    printed = log.read_text()
    again = llmtrain(*words)
    assert again.returncode == 1 and log.read_text() == printed, "what is finished is not started again"
    assert again.stdout.count("finished before") == 2
    lines = [line.split() for line in again.stdout.splitlines()]
    best = min(rows[::2], key=lambda row: float(row["val_loss"]))
    header = next(number for number, line in enumerate(lines) if line[:1] == ["optimizer.lr"])
    assert lines[header + 1][:3] == [best["optimizer.lr"], "16", f"{float(best['val_loss']):.4f}"]
    one = llmtrain(*words, "sweep.only=0", "output=json")
    assert one.returncode == 0 and "is finished" in json.loads(one.stdout)["message"]
