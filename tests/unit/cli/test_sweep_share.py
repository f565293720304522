"""What jobs that run at the same time get of the machine: their part of cores and memory, and devices that no other has."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from llmtrain.cli import sweep_share
from llmtrain.cli.arguments import parse_arguments
from llmtrain.cli.sweep_layout import lay_out
from llmtrain.cli.sweep_share import Host, SharedMachine, WholeMachine, ask_host, share_machine, visible_devices
from llmtrain.config.errors import PlanError
from llmtrain.config.typed import LaunchConfig
from llmtrain.dist.devices import available_cores
from llmtrain.dist.world import read_launch

GIB = 2**30
CPU = Host(16, 64 * GIB, ())


def devices_of(shared: SharedMachine, index: int, slot: int) -> str | None:
    return shared.environment(index, slot).get("CUDA_VISIBLE_DEVICES")


def launch(nproc: int | None = None, device: str = "auto", threads: int | None = None, **env: str) -> LaunchConfig:
    return LaunchConfig(nproc, device, threads, env=env)


@pytest.mark.parametrize("num_slots", [2, 3])
def test_each_job_is_told_its_part_of_the_host_whatever_its_ranks(num_slots: int) -> None:
    shared = SharedMachine([launch(), launch(2), launch(2, threads=1), None], num_slots, CPU)
    for index, slot in itertools.product(range(4), range(num_slots)):
        place = read_launch(shared.environment(index, slot), None)
        assert (place.host_jobs, place.host_memory) == (num_slots, 64 * GIB // num_slots)


@pytest.mark.parametrize(
    ("nproc", "threads", "num_slots", "told"),
    [
        (None, 9, 2, "16 cores of this host for 2 jobs of 1 rank of 9 threads = 18: .*\n  try   launch.threads=8 or auto"),
        (2, 5, 2, "16 cores of this host for 2 jobs of 2 ranks of 5 threads = 20: .*\n  try   launch.threads=4 or auto"),
        (
            None,
            2,
            99,
            "for 99 jobs of 1 rank of 2 threads = 198: .*\n  try   launch.threads=1 or auto, or a smaller sweep.jobs",
        ),
    ],
)
def test_more_threads_than_the_jobs_have_cores_are_refused(nproc: int | None, threads: int, num_slots: int, told: str) -> None:
    asked = launch(nproc, threads=threads)
    with pytest.raises(PlanError, match=rf"launch.threads={threads}\n  rule  at most the .*{told}"):
        SharedMachine([asked, None, asked], num_slots, CPU)
    SharedMachine([launch(nproc), asked, None], num_slots, CPU)
    fitting = launch(nproc, threads=max(1, 16 // (num_slots * (nproc or 1))))
    SharedMachine([fitting], num_slots, CPU)


def test_no_device_has_two_jobs() -> None:
    """Jobs of one to three ranks in three slots: whichever run at the same time, in whichever slots."""
    launches = [launch(1), launch(2), launch(3), launch(3)]
    shared = SharedMachine(launches, 3, Host(64, GIB, tuple(map(str, range(9)))))
    for jobs in itertools.permutations(range(4), 3):
        given = [str(devices_of(shared, job, slot)).split(",") for slot, job in enumerate(jobs)]
        assert [len(names) for names in given] == [launches[job].nproc for job in jobs]
        assert len(set(itertools.chain(*given))) == sum(map(len, given))
    assert devices_of(shared, 2, 1) == "3,4,5"


def test_devices_are_those_that_were_visible_to_the_sweep() -> None:
    names = ("GPU-8932f937", "7", "3", "0")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": " GPU-8932f937, 7,3,0,nonsense,1"}, 4) == names
    assert visible_devices({}, 3) == ("0", "1", "2") and visible_devices({"CUDA_VISIBLE_DEVICES": ""}, 0) == ()
    shared = SharedMachine([launch(2)], 2, Host(8, GIB, names))
    assert [devices_of(shared, 0, slot) for slot in (0, 1)] == ["GPU-8932f937,7", "3,0"]


def test_jobs_on_the_cpu_have_no_devices() -> None:
    host = Host(8, GIB, ("0",))
    shared = SharedMachine([launch(8, "cpu"), launch(1, "mps"), launch(1, "cuda")], 1, host)
    assert [devices_of(shared, index, 0) for index in range(3)] == [None, None, "0"]
    assert devices_of(SharedMachine([launch(4, "cpu")], 4, host), 0, 3) is None
    assert devices_of(SharedMachine([launch(4)], 4, CPU), 0, 3) is None


@pytest.mark.parametrize(
    ("nproc", "num_slots", "told"),
    [
        (2, 3, "sweep.jobs=3\n  rule  3 jobs of 2 ranks need 6 CUDA devices, and there are 4: .*\n  try   sweep.jobs=2, or"),
        (None, 5, "sweep.jobs=5\n  rule  5 jobs need 5 CUDA devices, and there are 4: .*\n  try   sweep.jobs=4, or"),
        (8, 2, "sweep.jobs=2\n  rule  2 jobs of 8 ranks .*\n  try   sweep.jobs=1 launch.nproc=4, or launch.device=cpu"),
    ],
)
def test_more_ranks_than_devices_are_refused(nproc: int | None, num_slots: int, told: str) -> None:
    host = Host(64, GIB, ("0", "1", "2", "3"))
    with pytest.raises(PlanError, match=told):
        SharedMachine([launch(1, "cpu"), launch(nproc), None], num_slots, host)


def test_a_job_that_chooses_its_devices_itself_is_refused() -> None:
    chosen = launch(1, CUDA_VISIBLE_DEVICES="0")
    with pytest.raises(PlanError, match=r"launch.env.CUDA_VISIBLE_DEVICES=0\n  rule  .*devices of their own"):
        SharedMachine([chosen], 2, Host(8, GIB, ("0", "1")))
    SharedMachine([chosen], 2, CPU)


def test_one_job_after_another_needs_to_know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_share, "ask_host", lambda environ: pytest.fail("asked"))
    sharing = share_machine(lay_out(parse_arguments(["-m", "run.seed=1,2"])))
    assert isinstance(sharing, WholeMachine) and sharing.environment(1, 0) == {}


def test_each_job_is_composed_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_share, "ask_host", lambda environ: Host(16, GIB, ("0", "1", "2", "3")))
    sharing = share_machine(lay_out(parse_arguments(["-m", "launch.nproc=1,2", "optimizer.lr=0.1,-1", "sweep.jobs=2"])))
    assert [sharing.environment(index, 1).get("CUDA_VISIBLE_DEVICES") for index in range(4)] == ["2", None, "2,3", None]


def test_the_machine_is_asked_in_a_process_of_its_own() -> None:
    host = ask_host({"PATH": "", "PYTHONPATH": str(Path(__file__).parents[3])})
    assert host.cores == available_cores() and host.memory_bytes > 2**26


def test_a_machine_that_cannot_be_asked_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PlanError, match=r"cannot be counted\n  rule  exit code 1\n  try   llmtrain doctor"):
        ask_host({})
