"""slurm.sbatch and torchrun.sh as jobs of a real Slurm of two nodes, with a stand-in for llmtrain that starts at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.scripts import ROOT
from helpers.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm

STAND_IN = Path(__file__).parent / "stand_in"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10")
SECONDS = 90.0


class Job:
    """A submitted job: its folder, what it printed, how it ended."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, *words: str, options: tuple[str, ...] = (), script: Path | None = None
    ):
        self._slurm, self._folder = slurm, folder
        more = {"PYTHON": sys.executable, "PYTHONPATH": str(STAND_IN)}
        file = str(script or ROOT / "launch" / "slurm.sbatch")
        self.number = slurm.submit(f"--chdir={folder}", *TWO_BY_TWO, *options, file, *words, more=more)
        self.run = folder / "runs" / f"slurm-{self.number}"

    @property
    def printed(self) -> str:
        return (self._folder / f"llmtrain-{self.number}.out").read_text()

    def log(self, rank: int) -> list[str]:
        file = self.run / f"rank-{rank}.log"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for_start(self, count: int = 1) -> None:
        """Until all ranks of this start have handlers for signals."""
        self._slurm.wait_for(
            lambda: len([line for line in self.log(0) if "start" in line]) == count and (self.run / "status.json").exists(),
            SECONDS,
            f"start {count} of job {self.number}",
        )
        self._slurm.wait_for(lambda: not list(self.run.glob("here-*")), SECONDS, f"all ranks of job {self.number}")

    def wait_for_end(self, seconds: float = SECONDS) -> tuple[str, str, str]:
        """State, exit code and number of requeues."""
        told = self._slurm.wait_for_end(self.number, seconds)
        return told["JobState"], told["ExitCode"], told["Restarts"]


def test_one_task_a_rank(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "steps=3", "text=two words")
    assert job.wait_for_end() == ("COMPLETED", "0:0", "0"), job.printed
    for rank in range(4):
        assert f"start rank {rank} of 4" in job.log(rank)[0] and "'text=two words'" in job.log(rank)[0]
        assert job.log(rank)[1] == "exit 0 signals []"


def test_a_signal_saves_and_requeues(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Rank 0 is still saving when the others have ended: srun must not end it."""
    job = Job(slurm, tmp_path, "steps=50", "save=2")
    job.wait_for_start()
    slurm.call("scancel", "--signal=USR1", job.number)
    assert job.wait_for_end() == ("COMPLETED", "0:0", "1"), job.printed
    assert [line for line in job.log(0) if "exit" in line] == ["exit 75 signals [10]", "exit 0 signals []"]
    assert "requeued" in job.printed and "start 2" in job.printed, "the second start adds to the output"


def test_a_failing_job_ends_with_its_code(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Rank 3 fails first and rank 0 learns of it a second later: srun's SIGTERM must not make it a run that asks for a requeue."""
    job = Job(slurm, tmp_path, "steps=600", "fail=3:65:0", "notice=1")
    assert job.wait_for_end() == ("FAILED", "65:0", "0"), job.printed
    assert job.log(0)[1] == "exit 65 signals []" and "exit code 65: not requeued" in job.printed


def test_a_job_that_is_killed_at_every_start_ends(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "steps=600", "fail=0:-9:0")
    assert job.wait_for_end(3 * SECONDS) == ("FAILED", "71:0", "2"), job.printed
    assert "3 starts in a row without a new saved step (step 0)" in job.printed


def test_a_job_that_gets_further_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Killed at three starts, nine saved steps later each: the fourth one is done."""
    job = Job(slurm, tmp_path, "steps=35", "fail=2:-9:9")
    assert job.wait_for_end(3 * SECONDS) == ("COMPLETED", "0:0", "3"), job.printed


def test_a_lost_node_requeues(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm ends the script with the job; the start after that goes on from what is saved."""
    job = Job(slurm, tmp_path, "steps=60")
    job.wait_for_start()
    slurm.call("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    slurm.wait_for(lambda: slurm.job(job.number)["Restarts"] == "1", SECONDS, "the requeue")
    slurm.run("scontrol", "update", "nodename=n1", "state=resume")  # refused where the node came back by itself
    assert job.wait_for_end() == ("COMPLETED", "0:0", "1"), job.printed
    assert len([line for line in job.log(0) if "start" in line]) == 2


def test_a_cancelled_job_is_not_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "steps=600", "save=1")
    job.wait_for_start()
    slurm.call("scancel", job.number)
    slurm.wait_for(lambda: any("exit" in line for line in job.log(0)), SECONDS, "the save of rank 0")
    state, _, requeues = job.wait_for_end()
    assert (state, requeues) == ("CANCELLED", "0") and "exit 75 signals [15]" in job.log(0)[1]


def test_tasks_of_an_array_each_run_one_combination(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Three jobs in the folder of the sweep; one after another two are asked to save, and only these are requeued."""
    words = ("-m", "seed=0,1,2", "steps=120", "run.name=sweep")
    job = Job(slurm, tmp_path, *words, options=("--array=0-2", "--nodes=1", "--ntasks-per-node=2"))
    for task in (2, 1):
        status = tmp_path / "runs" / "sweep" / f"{task}-seed-0" / "status.json"
        slurm.wait_for(status.exists, SECONDS, f"the start of task {task}")
        slurm.call("scancel", "--signal=USR1", f"{job.number}_{task}")
    restarts = []
    for task in range(3):
        told = slurm.wait_for_end(f"{job.number}_{task}", SECONDS)
        restarts.append(told["Restarts"])
        folder = tmp_path / "runs" / "sweep" / f"{task}-seed-0"
        assert told["JobState"] == "COMPLETED" and f"sweep.only={task}" in (folder / "rank-1.log").read_text()
    assert restarts == ["0", "1", "1"]


def test_torchrun_in_a_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The line for torchrun filled in: two nodes of two ranks, saved at a signal, requeued, and ended by the code of status.json."""
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    script = tmp_path / "mine.sbatch"
    line = "# command=(launch/torchrun.sh)"
    assert text.count(line) == 1
    script.write_text(text.replace(line, f"command=({ROOT}/launch/torchrun.sh)"))
    options = ("--ntasks-per-node=1", "--export=ALL,NPROC_PER_NODE=2")
    job = Job(slurm, tmp_path, "steps=60", "save=2", options=options, script=script)
    job.wait_for_start()
    slurm.call("scancel", "--signal=USR1", job.number)
    assert job.wait_for_end() == ("COMPLETED", "0:0", "1"), job.printed
    assert "start rank 3 of 4" in job.log(3)[0]
    assert job.log(0)[1].startswith("exit 75 signals [10")
    failing = Job(slurm, tmp_path, "steps=60", "fail=0:65:1", options=options, script=script)
    assert failing.wait_for_end() == ("FAILED", "65:0", "0"), failing.printed
