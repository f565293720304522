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
from llmtrain.dist.world import LaunchFacts
from llmtrain.plan.make_plan import make_plan
from llmtrain.train.machine import agreed_machine, detect_machine, options_here, shared_facts

ON_CPU = LaunchConfig(nproc=None, device="cpu", threads=None)


def test_the_place_of_a_rank_is_that_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "host_memory_bytes", lambda: 9000)
    place = LaunchFacts(5, 1, 6, "SLURM_STEP_NUM_TASKS", local_world_size=2, num_nodes=3, node_rank=2)
    machine = detect_machine(ON_CPU, place)
    assert (machine.world_size, machine.world_source) == (6, "SLURM_STEP_NUM_TASKS")
    assert (machine.local_world_size, machine.num_nodes, machine.device_index) == (2, 3, 0)
    assert machine.memory_bytes == 4500 and machine.device == "cpu"


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
