"""The machine as a rank sees it, and what the ranks make of theirs together before they plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.tiny import MACHINE

from llmtrain.config.compose import compose_config
from llmtrain.config.errors import PlanError
from llmtrain.config.typed import LaunchConfig
from llmtrain.dist import devices
from llmtrain.dist.world import LaunchFacts, job_environment, read_launch
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import HostLimit, Machine
from llmtrain.train import machine as machine_module
from llmtrain.train.machine import agreed_machine, detect_machine, options_here, shared_facts

GIB = 2**30
ON_CPU = LaunchConfig(nproc=None, device="cpu", threads=None)


def test_the_place_of_a_rank_is_that_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "memory_limits", lambda of_job: (HostLimit(9000, "host"),))
    place = LaunchFacts(5, 1, 6, "SLURM_STEP_NUM_TASKS", local_world_size=2, num_nodes=3, node_rank=2)
    machine = detect_machine(ON_CPU, place)
    assert (machine.world_size, machine.world_source) == (6, "SLURM_STEP_NUM_TASKS")
    assert (machine.local_world_size, machine.num_nodes, machine.device_index) == (2, 3, 0)
    assert machine.memory_bytes == 4500 and machine.core_ranks == 2 and machine.device == "cpu"


def test_without_a_place_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    machine = detect_machine(ON_CPU)
    assert (machine.world_size, machine.local_world_size, machine.num_nodes) == (1, 1, 1)
    assert machine.world_source == "one process"


def test_every_device_of_the_launch_group_has_an_answer() -> None:
    answers = options_here("cpu")
    assert answers["launch=cpu"].available
    assert answers["launch=mps"].reason == devices.mps_missing_reason()
    assert answers["launch=cuda"].reason == devices.cuda_missing_reason()
    assert options_here("mps")["attention.backend=blocked"].reason == "runs on cpu, not on mps"


def test_ranks_plan_with_the_least_memory_of_any() -> None:
    """The host's free memory is another number at each look; a micro-batch of another size on each rank would never end well."""
    config = compose_config(["launch.device=cpu", "precision.kind=fp32", "parallelism.dp_replicate=2"]).config
    roomy = replace(MACHINE, world_size=2, local_world_size=2, memory_bytes=2**33)
    tight = replace(roomy, memory_bytes=2**27)
    alone = [make_plan(config, machine).batch.micro_batch_size for machine in (roomy, tight)]
    assert alone[0] != alone[1], "this is what must not happen"
    everyone = [json.loads(json.dumps(shared_facts(machine))) for machine in (roomy, tight)]
    together = [make_plan(config, agreed_machine(machine, everyone)) for machine in (roomy, tight)]
    assert together[0] == together[1] and together[0].batch.micro_batch_size == alone[1]


def test_bf16_is_taken_only_where_all_ranks_have_it() -> None:
    able, unable = replace(MACHINE, bf16_native=True), replace(MACHINE, bf16_native=False, bf16=False)
    both = agreed_machine(able, [shared_facts(able), shared_facts(unable)])
    assert (both.bf16_native, both.bf16) == (False, False)
    assert agreed_machine(able, [shared_facts(able)] * 2) == able


def test_ranks_on_different_devices_are_refused() -> None:
    cpu, cuda = MACHINE, replace(MACHINE, device="cuda", device_unit="unit-0")
    with pytest.raises(PlanError) as caught:
        agreed_machine(cpu, [shared_facts(machine) for machine in (cpu, cpu, cuda)])
    assert caught.value.problems[0].what == "rank 0 computes on cpu, rank 2 on cuda"


def test_two_ranks_on_one_gpu_are_refused_wherever_they_think_they_are() -> None:
    """Each of them may see a single device and call it number 0."""
    first, second, third = (replace(MACHINE, device="cuda", device_unit=unit) for unit in ("unit-0", "unit-1", "unit-0"))
    agreed_machine(first, [shared_facts(machine) for machine in (first, second)])
    with pytest.raises(PlanError) as caught:
        agreed_machine(first, [shared_facts(machine) for machine in (first, second, third)])
    assert caught.value.problems[0].what == "ranks 0 and 2 have the same CUDA device unit-0"


def rank(cpus: int, *more: HostLimit, host: str = "a", memory: tuple[HostLimit, ...] = ()) -> Machine:
    """One of a run on hosts of 64 GiB; bit i of `cpus` = may use core i."""
    bound = HostLimit(cpus.bit_count(), "cpus", cpus)
    return replace(MACHINE, host=host, core_limits=(bound, *more), memory_limits=(HostLimit(64 * GIB, "host"), *memory))


def agreed(*ranks: Machine) -> list[Machine]:
    """What each plans with once they have met."""
    everyone = [json.loads(json.dumps(shared_facts(machine))) for machine in ranks]
    return [agreed_machine(machine, everyone) for machine in ranks]


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([0x0F, 0x0F], [(4, 2), (4, 2)]),
        ([0x0F, 0xF0], [(4, 1), (4, 1)]),
        ([0x0F, 0x3C, 0xF0], [(4, 2), (4, 3), (4, 2)]),
        ([0x3F, 0x03, 0xC0], [(6, 2), (2, 2), (2, 1)]),
    ],
    ids=["equal", "disjoint", "a chain", "one inside another"],
)
def test_cores_are_shared_with_ranks_whose_set_overlaps(sets: list[int], expected: list[tuple[int, int]]) -> None:
    """Slurm binds each task to cores of its own; a launcher leaves them all to all."""
    one_host = [rank(cpus) for cpus in sets]
    assert [(machine.cores, machine.core_ranks) for machine in agreed(*one_host)] == expected
    two_hosts = [*one_host, *(rank(cpus, host="b") for cpus in sets)]
    assert [(machine.cores, machine.core_ranks) for machine in agreed(*two_hosts)] == 2 * expected
    alone = [rank(cpus, host=str(number)) for number, cpus in enumerate(sets)]
    assert all(machine.core_ranks == 1 for machine in agreed(*alone)), "a core of another host has the same number"


@pytest.mark.parametrize("threads", [None, 8])
def test_each_rank_has_the_threads_of_the_cores_it_is_bound_to(threads: int | None) -> None:
    """As with --ntasks-per-node=8 --cpus-per-task=8."""
    words = [] if threads is None else [f"launch.threads={threads}"]
    config = compose_config(["launch.device=cpu", "precision.kind=fp32", *words]).config
    place = {"world_size": 8, "local_world_size": 8, "core_ranks": 8}
    bound = agreed(*(replace(rank(0xFF << 8 * number), **place) for number in range(8)))
    assert [make_plan(config, machine).threads for machine in bound] == [8] * 8


def test_a_quota_is_divided_among_the_ranks_of_its_control_group() -> None:
    everything, own = 0xFFFF, [HostLimit(4, f"cgroup {number}") for number in range(3)]
    job = HostLimit(6, "cgroup 99")
    tasks = agreed(*(rank(everything, quota) for quota in own))
    assert [(machine.cores, machine.core_ranks) for machine in tasks] == [(4, 1)] * 3
    together = agreed(*(rank(everything, job) for _ in range(3)))
    assert [(machine.cores, machine.core_ranks) for machine in together] == [(6, 3)] * 3
    both = agreed(*(rank(everything, quota, job) for quota in own))
    assert [(machine.cores, machine.core_ranks) for machine in both] == [(6, 3)] * 3, "the tighter of two"


def test_memory_is_divided_among_those_who_share_it() -> None:
    own = [(HostLimit(8 * GIB, f"cgroup {number}"),) for number in range(4)]
    job = (HostLimit(20 * GIB, "cgroup 99"),)
    free = [rank(1) for _ in range(4)]
    assert [machine.memory_bytes for machine in agreed(*free)] == [16 * GIB] * 4
    assert {machine.memory_bytes for machine in agreed(*(rank(1, memory=limit) for limit in own))} == {8 * GIB}
    assert {machine.memory_bytes for machine in agreed(*(rank(1, memory=job) for _ in range(4)))} == {5 * GIB}
    assert {machine.memory_bytes for machine in agreed(*(rank(1, memory=limit + job) for limit in own))} == {5 * GIB}
    two_hosts = agreed(*free[:3], rank(1, host="b"))
    assert {machine.memory_bytes for machine in two_hosts} == {64 * GIB // 3}, "all plan with that of the tightest host"


def test_a_device_of_its_own_has_memory_of_its_own() -> None:
    ranks = [replace(rank(1), device="cuda", device_unit=unit, memory_bytes=80 * GIB) for unit in ("u0", "u1")]
    assert [machine.memory_bytes for machine in agreed(*ranks)] == [80 * GIB] * 2


def test_one_rank_has_what_it_saw() -> None:
    machine = detect_machine(ON_CPU, LaunchFacts(0, 0, 1, "one process"))
    assert agreed(machine) == [machine]
    assert (machine.cores, machine.memory_bytes) == (devices.available_cores(), machine.host_memory_bytes)


@pytest.mark.parametrize("nproc", [1, 2])
def test_jobs_of_a_sweep_plan_alike_whichever_started_first(monkeypatch: pytest.MonkeyPatch, nproc: int) -> None:
    """The second of two finds what the first has left, and may not take less for that."""
    place = read_launch(job_environment(2, 64 * GIB), nproc)
    monkeypatch.setattr(devices, "_memory_left", lambda folder: None)

    def job(left: int) -> Machine:
        monkeypatch.setattr(devices, "_host_available", lambda root: left)
        return agreed(*[detect_machine(ON_CPU, place)] * nproc)[0]

    first, second = job(64 * GIB), job(40 * GIB)
    assert first.memory_bytes == second.memory_bytes == 32 * GIB // nproc
    assert job(3 * GIB).memory_bytes == 3 * GIB // nproc, "what is not there cannot be had"
    config = compose_config(["launch.device=cpu", "precision.kind=fp32"]).config
    assert make_plan(config, replace(first, cores=12)).threads == 6 // nproc
