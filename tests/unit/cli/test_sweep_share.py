"""What jobs that run at the same time get of the machine: threads, and devices that no other has."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from llmtrain.cli import sweep_share
from llmtrain.cli.arguments import parse_arguments
from llmtrain.cli.sweep_layout import lay_out
from llmtrain.cli.sweep_share import Host, Share, SharedMachine, WholeMachine, ask_host, share_machine, visible_devices
from llmtrain.config.errors import PlanError
from llmtrain.config.typed import LaunchConfig
from llmtrain.dist.devices import available_cores

CPU = Host(16, ())


def launch(nproc: int | None = None, device: str = "auto", threads: int | None = None, **env: str) -> LaunchConfig:
    return LaunchConfig(nproc, device, threads, env=env)


@pytest.mark.parametrize(
    ("nproc", "num_slots", "threads"), [(None, 2, 8), (1, 2, 8), (2, 2, 4), (3, 2, 2), (2, 16, 1), (None, 3, 5)]
)
def test_cores_are_shared_by_all_ranks_of_all_jobs(nproc: int | None, num_slots: int, threads: int) -> None:
    shared = SharedMachine([launch(nproc)], num_slots, CPU)
    assert shared.share(0, num_slots - 1) == Share((f"launch.threads={threads}",), {})


def test_threads_that_were_asked_for_stay_and_each_job_counts_its_own_ranks() -> None:
    shared = SharedMachine([launch(2, threads=7), launch(1), launch(4), None], 2, CPU)
    words = [shared.share(index, 0).words for index in range(4)]
    assert words == [(), ("launch.threads=8",), ("launch.threads=2",), ()]


def test_no_device_has_two_jobs() -> None:
    """Jobs of one to three ranks in three slots: whichever run at the same time, in whichever slots."""
    launches = [launch(1), launch(2), launch(3), launch(3)]
    shared = SharedMachine(launches, 3, Host(64, tuple(map(str, range(9)))))
    for jobs in itertools.permutations(range(4), 3):
        given = [shared.share(job, slot).environment["CUDA_VISIBLE_DEVICES"].split(",") for slot, job in enumerate(jobs)]
        assert [len(names) for names in given] == [launches[job].nproc for job in jobs]
        assert len(set(itertools.chain(*given))) == sum(map(len, given))
    assert shared.share(2, 1).environment == {"CUDA_VISIBLE_DEVICES": "3,4,5"}


def test_devices_are_those_that_were_visible_to_the_sweep() -> None:
    names = ("GPU-8932f937", "7", "3", "0")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": " GPU-8932f937, 7,3,0,nonsense,1"}, 4) == names
    assert visible_devices({}, 3) == ("0", "1", "2") and visible_devices({"CUDA_VISIBLE_DEVICES": ""}, 0) == ()
    shared = SharedMachine([launch(2)], 2, Host(8, names))
    assert [shared.share(0, slot).environment["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["GPU-8932f937,7", "3,0"]


def test_jobs_on_the_cpu_have_no_devices() -> None:
    host = Host(8, ("0",))
    shared = SharedMachine([launch(8, "cpu"), launch(1, "mps"), launch(1, "cuda")], 1, host)
    assert [shared.share(index, 0).environment for index in range(3)] == [{}, {}, {"CUDA_VISIBLE_DEVICES": "0"}]
    assert SharedMachine([launch(4, "cpu")], 4, host).share(0, 3).environment == {}
    assert SharedMachine([launch(4)], 4, CPU).share(0, 3).environment == {}


@pytest.mark.parametrize(
    ("nproc", "num_slots", "told"),
    [
        (2, 3, "sweep.jobs=3\n  rule  3 jobs of 2 ranks need 6 CUDA devices, and there are 4: .*\n  try   sweep.jobs=2, or"),
        (None, 5, "sweep.jobs=5\n  rule  5 jobs need 5 CUDA devices, and there are 4: .*\n  try   sweep.jobs=4, or"),
        (8, 2, "sweep.jobs=2\n  rule  2 jobs of 8 ranks .*\n  try   sweep.jobs=1 launch.nproc=4, or launch.device=cpu"),
    ],
)
def test_more_ranks_than_devices_are_refused(nproc: int | None, num_slots: int, told: str) -> None:
    host = Host(64, ("0", "1", "2", "3"))
    with pytest.raises(PlanError, match=told):
        SharedMachine([launch(1, "cpu"), launch(nproc), None], num_slots, host)


def test_a_job_that_chooses_its_devices_itself_is_refused() -> None:
    chosen = launch(1, CUDA_VISIBLE_DEVICES="0")
    with pytest.raises(PlanError, match=r"launch.env.CUDA_VISIBLE_DEVICES=0\n  rule  .*devices of their own"):
        SharedMachine([chosen], 2, Host(8, ("0", "1")))
    SharedMachine([chosen], 2, CPU)


def test_one_job_after_another_needs_to_know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_share, "ask_host", lambda environ: pytest.fail("asked"))
    sharing = share_machine(lay_out(parse_arguments(["-m", "run.seed=1,2"])))
    assert isinstance(sharing, WholeMachine) and sharing.share(1, 0) == Share()


def test_each_job_is_composed_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_share, "ask_host", lambda environ: CPU)
    sharing = share_machine(lay_out(parse_arguments(["-m", "launch.nproc=1,2", "optimizer.lr=0.1,-1", "sweep.jobs=2"])))
    assert [sharing.share(index, 0).words for index in range(4)] == [
        *(("launch.threads=8",), ()),
        *(("launch.threads=4",), ()),
    ]


def test_the_machine_is_asked_in_a_process_of_its_own() -> None:
    host = ask_host({"PATH": "", "PYTHONPATH": str(Path(__file__).parents[3])})
    assert host.cores == available_cores()


def test_a_machine_that_cannot_be_asked_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PlanError, match=r"cannot be counted\n  rule  exit code 1\n  try   llmtrain doctor"):
        ask_host({})
