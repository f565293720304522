"""Trainings as jobs of a real Slurm: two nodes of two ranks, saved, requeued and resumed, and equal to one nobody disturbed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from helpers.example_plugin import install
from helpers.runs import assert_same_training, run_words, saved, write_text
from helpers.scripts import ROOT
from helpers.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=20")
SECONDS = 240.0
STEPS, LONG_STEPS = 80, 600
PAUSE_SECONDS = 0.2
WORDS = ("accumulation.global_batch_size=8", "attention=reference", "checkpoint.every=10", "train.log_every=1")

SLOW = {
    "slow/__init__.py": '''
"""A tracker that makes every update take its time, or kills rank 0 after some: nothing that is computed depends on it."""
import os
import signal
import time
from dataclasses import dataclass

from llmtrain.metrics.trackers import Tracker
from llmtrain.plugins import Plugin, key


@dataclass(frozen=True)
class Options:
    seconds: float = key(0.0, "after each update", unit="seconds", ge=0)
    kill_after: int = key(0, "updates of each start; 0 = never", ge=0)


class Slow(Tracker):
    def __init__(self, options):
        self.options, self.count = options, 0

    def log(self, step, values):
        self.count += 1
        if self.count == self.options.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.options.seconds)

    def finish(self):
        pass


slow = Plugin(
    group="tracker",
    name="slow",
    summary="saves nothing; costs time; changes training: no",
    options=Options,
    build=lambda options, run: Slow(options),
)
'''
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text and, in `site`, the package above."""
    folder = tmp_path_factory.mktemp("training")
    write_text(folder / "text")
    install(folder / "site", "slow", "1", {"slow": "slow:slow"}, SLOW)
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path):
    """Run folder of a training of so many steps on four ranks of this machine."""

    def of(steps: int) -> Path:
        folder = place / "runs" / f"undisturbed-{steps}"
        if not folder.exists():
            words = run_words(place / "text", place / "runs", folder.name, *WORDS, f"train.steps={steps}", "launch.nproc=4")
            command = [sys.executable, "-m", "llmtrain", *words]
            variables = os.environ | {"OMP_NUM_THREADS": "1"}
            ended = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, timeout=SECONDS)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        return folder

    return of


@pytest.fixture
def jobs(slurm: SlurmCluster) -> Iterator[list[str]]:
    """Numbers of the jobs of a test; none of them goes on after it."""
    numbers: list[str] = []
    yield numbers
    slurm.run("scancel", *numbers)


class Job:
    """A training as a job; rank 0's log tells when each step was made."""

    def __init__(self, slurm: SlurmCluster, jobs: list[str], place: Path, name: str, *words: str, **how: object) -> None:
        self._slurm, self._place = slurm, place
        options, script = how.get("options", ()), how.get("script", ROOT / "launch" / "slurm.sbatch")
        assert isinstance(options, tuple)
        more = {"PYTHON": sys.executable, "PYTHONPATH": str(place / "site"), "NPROC_PER_NODE": "2"}
        all_words = [*how.get("before", ()), *run_words(place / "text", place / "runs", name, *WORDS, *words)]
        self.number = slurm.submit(f"--chdir={place}", *TWO_BY_TWO, *options, str(script), *all_words, more=more)
        jobs.append(self.number)
        self.run = place / "runs" / name

    @property
    def printed(self) -> str:
        return (self._place / f"llmtrain-{self.number}.out").read_text()

    @property
    def status(self) -> dict[str, object]:
        return json.loads((self.run / "status.json").read_text())

    def steps(self) -> list[tuple[float, int]]:
        """(time, step) of every update, in the order they were made, those after a resume too."""
        log = self.run / "logs" / "rank0.log"
        if not log.exists():
            return []
        found = re.findall(r"^(\S+)  step +(\d+)/", log.read_text(), flags=re.M)
        return [(datetime.fromisoformat(time).timestamp(), int(step)) for time, step in found]

    def wait_for_step(self, step: int) -> None:
        self._slurm.wait_for(lambda: any(made >= step for _, made in self.steps()), SECONDS, f"step {step}")

    def wait_for_end(self) -> tuple[str, str, str]:
        """State, exit code and number of requeues."""
        told = self._slurm.wait_for_end(self.number, 2 * SECONDS)
        return told["JobState"], told["ExitCode"], told["Restarts"]

    def gap(self) -> tuple[float, float]:
        """Times of the last step before the longest pause between two steps, and of the first one after it."""
        times = [time for time, _ in self.steps()]
        return max(zip(times, times[1:], strict=False), key=lambda pair: pair[1] - pair[0])


def with_torchrun(folder: Path) -> Path:
    """The script with the line for torchrun filled in."""
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    script = folder / "torchrun.sbatch"
    script.write_text(text.replace("# command=(launch/torchrun.sh)", f"command=({ROOT}/launch/torchrun.sh)"))
    return script


SLOWLY = ("tracker.slow.enabled=true", f"tracker.slow.seconds={PAUSE_SECONDS}")


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_b55_a_signal_saves_requeues_and_changes_nothing(slurm, jobs, place, undisturbed, tmp_path, launcher) -> None:
    how = {} if launcher == "srun" else {"script": with_torchrun(tmp_path), "options": ("--ntasks-per-node=1",)}
    job = Job(slurm, jobs, place, f"signal-{launcher}", f"train.steps={STEPS}", *SLOWLY, **how)
    job.wait_for_step(15)
    slurm.call("scancel", "--signal=USR1", job.number)
    assert job.wait_for_end() == ("COMPLETED", "0:0", "1"), job.printed
    assert job.status["code"] == 0 and job.status["step"] == STEPS
    assert [step for _, step in job.steps()] == list(range(1, STEPS + 1)), "no step is made twice or left out"
    assert all((job.run / "logs" / f"rank{rank}.log").exists() for rank in range(4))
    assert_same_training(job.run, undisturbed(STEPS))
    before, after = job.gap()
    print(f"{launcher}: {after - before:.1f} s from the signal to the first resumed step")


def test_b55_the_time_limit_changes_nothing(slurm, jobs, place, undisturbed) -> None:
    """Two minutes are too short for the run: Slurm signals, the ranks save, the job is requeued and ends as if nothing had been."""
    options = ("--time=2", "--signal=USR1@20")
    job = Job(slurm, jobs, place, "limit", f"train.steps={LONG_STEPS}", *SLOWLY, options=options)
    state, code, requeues = job.wait_for_end()
    assert (state, code) == ("COMPLETED", "0:0") and int(requeues) >= 1, job.printed
    assert "exit code 75" in job.printed and [step for _, step in job.steps()] == list(range(1, LONG_STEPS + 1))
    assert_same_training(job.run, undisturbed(LONG_STEPS))
    before, after = job.gap()
    print(f"time limit: {after - before:.1f} s from the last step before it to the first resumed one, {requeues} requeues")


def test_a_rank_that_is_killed_costs_the_steps_since_the_save(slurm, jobs, place, undisturbed) -> None:
    job = Job(slurm, jobs, place, "killed", f"train.steps={STEPS}", *SLOWLY)
    job.wait_for_step(15)
    os.kill(process_of_rank(job.number, 3), signal.SIGKILL)
    assert job.wait_for_end() == ("COMPLETED", "0:0", "1"), job.printed
    assert "rank 3" in job.printed
    assert_same_training(job.run, undisturbed(STEPS))
    before, after = job.gap()
    print(f"rank killed: {after - before:.1f} s from its last step to the first resumed one")


def process_of_rank(job: str, rank: int) -> int:
    """The Python process of a rank: it has the variables of its task, as the shell around it does."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()} <= set(variables)
        if ours and command[1:3] == [b"-m", b"llmtrain"]:
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank} of job {job}")


def test_a_missing_text_ends_the_job(slurm, jobs, place) -> None:
    job = Job(slurm, jobs, place, "missing", "train.steps=5", "data.path=/no/such/text")
    assert job.wait_for_end() == ("FAILED", "65:0", "0"), job.printed
    assert "/no/such/text" in job.printed and "exit code 65: not requeued" in job.printed


def test_a_job_that_dies_before_it_saves_is_not_requeued_for_ever(slurm, jobs, place) -> None:
    words = ("tracker.slow.enabled=true", "tracker.slow.kill_after=3")
    job = Job(slurm, jobs, place, "dying", f"train.steps={STEPS}", *words)
    assert job.wait_for_end() == ("FAILED", "71:0", "2"), job.printed
    assert "3 starts in a row without a new saved step (step 0)" in job.printed
    assert [step for _, step in job.steps()].count(1) == 3


def test_a_job_that_dies_after_each_save_gets_there(slurm, jobs, place, undisturbed) -> None:
    words = ("tracker.slow.enabled=true", "tracker.slow.kill_after=23")
    job = Job(slurm, jobs, place, "limping", f"train.steps={STEPS}", *words)
    assert job.wait_for_end() == ("COMPLETED", "0:0", "3"), job.printed
    assert_same_training(job.run, undisturbed(STEPS))


def test_an_array_runs_a_sweep(slurm, jobs, place) -> None:
    """Three jobs of one rank on each of two nodes, each one combination, in one folder."""
    job = Job(
        slurm,
        jobs,
        place,
        "sweep",
        "train.steps=6",
        "optimizer.lr=1e-3,1e-4,1e-5",
        before=("-m",),
        options=("--array=0-2", "--ntasks-per-node=1"),
    )
    for task in range(3):
        told = slurm.wait_for_end(f"{job.number}_{task}", SECONDS)
        assert (told["JobState"], told["ExitCode"], told["Restarts"]) == ("COMPLETED", "0:0", "0"), told
    folders = sorted(path.parent for path in job.run.glob("*/status.json"))
    assert [folder.name[0] for folder in folders] == ["0", "1", "2"] and all(
        "optimizer.lr" in folder.name for folder in folders
    )
    assert [saved(folder).step for folder in folders] == [6, 6, 6]
    assert all((folder / "logs" / "rank1.log").exists() for folder in folders)
