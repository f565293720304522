"""What the launch environment says: torchrun, Slurm, our launcher, launch.nproc, and how they may contradict each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.config.errors import ConfigError, PlanError
from llmtrain.dist.world import LaunchFacts, first_node, job_environment, rank_environment, read_launch

# As `torchrun --nproc-per-node 2` of torch 2.13 sets them; static, standalone and c10d rendezvous set the same names.
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "45219",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/job_l/attempt_0/1/error.json",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "d70c657d",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TORCHRUN_FACTS = LaunchFacts(
    1,
    1,
    2,
    "WORLD_SIZE",
    local_world_size=2,
    master_addr="localhost",
    master_port=45219,
    run_id="d70c657d",
    served=True,
    error_file=Path("/tmp/torchelastic_a/job_l/attempt_0/1/error.json"),
)
# As `srun -N2 -n3` of Slurm 22.05 set them for task 2.
SRUN = {
    "SLURM_JOB_ID": "4712",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2,1",
}
ONE_TASK = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
MPI_SCRIPT = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
PLACE = LaunchFacts(
    1,
    1,
    4,
    "launch.nproc",
    local_world_size=4,
    master_port=40001,
    run_id="3f2a",
    launcher_pid=4242,
    report_folder=Path("/tmp/reports of it"),
)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_plain_start_is_one_process() -> None:
    assert read_launch({}, None) == LaunchFacts(0, 0, 1, "one process")


def test_one_process_needs_nothing_but_its_number() -> None:
    assert read_launch(ONE_RANK, None) == LaunchFacts(0, 0, 1, "WORLD_SIZE")
    assert read_launch(ONE_TASK, 4).starts_ranks, "a shell in a step of one task may start ranks"
    assert read_launch(ONE_TASK, None) == LaunchFacts(0, 0, 1, "SLURM_STEP_NUM_TASKS", "4711")
    assert read_launch({}, 1) == LaunchFacts(0, 0, 1, "launch.nproc")
    assert not any(read_launch(environ, nproc).starts_ranks for environ, nproc in ((ONE_RANK, 1), (ONE_TASK, 1), ({}, 1)))


def test_torchrun_tells_everything() -> None:
    assert read_launch(TORCHRUN, None) == TORCHRUN_FACTS
    assert not read_launch(TORCHRUN, None).is_main


def test_ranks_of_torchrun_do_not_start_ranks() -> None:
    assert read_launch(TORCHRUN, 2) == TORCHRUN_FACTS
    assert not read_launch(TORCHRUN, 2).starts_ranks


def test_torchrun_on_the_second_of_two_nodes_after_a_restart() -> None:
    changed = {"RANK": "5", "WORLD_SIZE": "6", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}
    facts = read_launch(TORCHRUN | changed, None)
    expected = replace(TORCHRUN_FACTS, rank=5, world_size=6, node_rank=1, num_nodes=2, attempt=3)
    assert facts == expected


def test_a_store_that_torchrun_does_not_serve_is_rank_0s() -> None:
    assert not read_launch(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, None).served


def test_a_script_of_ones_own_can_set_the_customary_variables() -> None:
    expected = LaunchFacts(3, 1, 4, "WORLD_SIZE", None, 2, node_rank=1, num_nodes=2, master_addr="a", master_port=1)
    assert read_launch(MPI_SCRIPT, None) == expected


def test_an_allocation_without_a_step_starts_no_tasks() -> None:
    batch_script = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_launch(batch_script, None) == LaunchFacts(0, 0, 1, "one process", "4711")


@pytest.fixture
def scontrol(tmp_path: Path) -> dict[str, str]:
    """A PATH with an scontrol that knows nodes n1 and n03, whose names DNS does not."""
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/sh\n[ "$1 $2 $4" = "show node -o" ] || exit 2\ncase $3 in n1|n03) ;; *) exit 1;; esac\n'
        "echo NodeName=$3 Arch=x86_64 Gres=gpu:2 NodeAddr=10.0.0.7 NodeHostName=vm Port=16819\n"
    )
    program.chmod(0o755)
    return {"PATH": str(tmp_path)}


def test_srun_with_one_task_a_rank_tells_everything(scontrol: dict[str, str]) -> None:
    facts = read_launch(SRUN | {"SLURM_STEP_NODELIST": "n[03-04]"} | scontrol, None)
    assert facts == LaunchFacts(
        2,
        0,
        3,
        "SLURM_STEP_NUM_TASKS",
        "4712",
        local_world_size=1,
        node_rank=1,
        num_nodes=2,
        master_addr="10.0.0.7",
        master_port=24712,
        run_id="4712.0",
    )


def test_a_step_on_one_node_meets_on_loopback_without_asking_anybody() -> None:
    one_node = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_LOCALID": "2"}
    facts = read_launch(SRUN | one_node | {"PATH": ""}, None)
    assert (facts.master_addr, facts.local_world_size, facts.num_nodes) == ("127.0.0.1", 3, 1)


def test_two_steps_of_a_job_have_two_ports_and_two_names() -> None:
    two_steps = [read_launch(SRUN | {"SLURM_STEP_ID": step, "PATH": ""}, None) for step in ("0", "1")]
    neighbour = read_launch(SRUN | {"SLURM_JOB_ID": "4713", "PATH": ""}, None)
    assert len({facts.master_port for facts in (*two_steps, neighbour)}) == 3
    assert len({facts.run_id for facts in (*two_steps, neighbour)}) == 3
    assert all(20000 <= facts.master_port < 30000 for facts in two_steps)


@pytest.mark.parametrize(("node_list", "name"), [("n9", "n9"), ("n[8-9]", "n8")])
def test_a_node_that_slurm_does_not_know_goes_by_its_name(scontrol: dict[str, str], node_list: str, name: str) -> None:
    assert read_launch(SRUN | {"SLURM_STEP_NODELIST": node_list} | scontrol, None).master_addr == name
    assert read_launch(SRUN | {"SLURM_STEP_NODELIST": node_list, "PATH": ""}, None).master_addr == name


def test_a_named_meeting_place_wins_over_slurms() -> None:
    facts = read_launch(SRUN | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "29500"}, None)
    assert (facts.master_addr, facts.master_port) == ("10.1.1.1", 29500)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("n[0-1],m3", "n0"),
        ("n[03-05,9]-ib,m1", "n03-ib"),
        ("m3,n[0-1]", "m3"),
        ("r[1-2]n[07,9]", "r1n07"),
        ("host-a", "host-a"),
    ],
)
def test_first_of_a_list_of_nodes(node_list: str, first: str) -> None:
    assert first_node(node_list) == first


@pytest.mark.parametrize(("node", "local_world_size"), [(0, 2), (1, 2), (2, 1), (3, 4), (4, 4)])
def test_tasks_of_a_node_in_slurms_short_form(node: int, local_world_size: int) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "13", "SLURM_STEP_NUM_NODES": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,4(x2)"}
    facts = read_launch(SRUN | step | {"SLURM_NODEID": str(node), "PATH": ""}, None)
    assert facts.local_world_size == local_world_size


def test_torchrun_inside_srun_counts_ranks_and_not_hosts() -> None:
    assert read_launch(SRUN | TORCHRUN, None) == replace(TORCHRUN_FACTS, job_id="4712")


def test_a_requeued_job_keeps_its_number_and_counts_its_starts() -> None:
    facts = read_launch(ONE_TASK | {"SLURM_RESTART_COUNT": "2"}, None)
    assert (facts.job_id, facts.attempt) == ("4711", 2)


def test_every_task_of_an_array_is_a_job_of_its_own() -> None:
    # As Slurm 22.05 set them: the numbers of the tasks are 3 and 1, of which the last has the number of the array.
    tasks = [
        {"SLURM_JOB_ID": job, "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": task} for job, task in (("3", "0"), ("1", "1"))
    ]
    assert [read_launch(environ, None).job_id for environ in tasks] == ["1_0", "1_1"]


def test_nproc_makes_this_process_the_launcher() -> None:
    facts = read_launch({}, 4)
    assert facts.starts_ranks
    assert (facts.world_size, facts.local_world_size, facts.source) == (4, 4, "launch.nproc")
    assert read_launch({"SLURM_JOB_ID": "7"}, 2).starts_ranks, "a batch script may start ranks on its node"


@pytest.mark.parametrize("place", [PLACE, replace(PLACE, rank=0, local_rank=0, listen_fd=5)])
def test_what_the_launcher_sets_is_read_back(place: LaunchFacts) -> None:
    assert read_launch(rank_environment(place), 4) == place
    assert not read_launch(rank_environment(place), 4).starts_ranks
    job = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"}
    assert read_launch(job | rank_environment(place), 4) == replace(place, job_id="4711", attempt=1)
    assert read_launch(ONE_TASK | rank_environment(place), 4) == replace(place, job_id="4711"), "one task may be a launcher"


def test_a_job_of_a_sweep_and_its_ranks_know_their_part_of_the_host() -> None:
    part = job_environment(3, 1000)
    job = read_launch(part, 2)
    assert (job.host_jobs, job.host_memory, job.starts_ranks) == (3, 333, True)
    assert read_launch(part | rank_environment(PLACE), 4) == replace(PLACE, host_jobs=3, host_memory=333)
    alone = read_launch({}, 2)
    assert (alone.host_jobs, alone.host_memory) == (1, None)
    with pytest.raises(ConfigError, match="LLMTRAIN_HOST_JOBS is 'x'"):
        read_launch({"LLMTRAIN_HOST_JOBS": "x"}, None)


@pytest.mark.parametrize("name", ["LLMTRAIN_RUN_ID", "LLMTRAIN_REPORTS", "LLMTRAIN_LAUNCHER"])
def test_half_a_launcher_is_none(name: str) -> None:
    broken = rank_environment(PLACE) | {name: ""}
    with pytest.raises(ConfigError, match=name):
        read_launch(broken, None)


@pytest.mark.parametrize(
    ("environ", "nproc", "named"),
    [
        (TORCHRUN, 4, ("WORLD_SIZE says 2", "launch.nproc says 4")),
        (SRUN | {"PATH": ""}, 4, ("SLURM_STEP_NUM_TASKS says 3", "launch.nproc says 4")),
        (MPI_SCRIPT | ONE_TASK, None, ("WORLD_SIZE says 4", "SLURM_STEP_NUM_TASKS says 1")),
        (rank_environment(PLACE), 2, ("launch.nproc says 4", "launch.nproc says 2")),
    ],
)
def test_two_sources_that_differ_are_both_named(environ: dict[str, str], nproc: int | None, named: tuple[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        read_launch(environ, nproc)
    assert all(text in str(caught.value) for text in named)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "0"}, "LOCAL_RANK"),
        ({"WORLD_SIZE": "4"}, "RANK"),
        (ONE_RANK | {"WORLD_SIZE": "four"}, "WORLD_SIZE"),
        (ONE_RANK | {"RANK": "-1"}, "RANK"),
        (TORCHRUN | {"RANK": "١"}, "RANK is"),
        (ONE_RANK | {"RANK": "3"}, "RANK=3"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is unset"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is unset"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is unset"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1, LOCAL_WORLD_SIZE=1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
        (TORCHRUN | {"GROUP_RANK": "x"}, "GROUP_RANK"),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "?"}, "TORCHELASTIC_RESTART_COUNT"),
        (without(ONE_TASK, "SLURM_PROCID"), "SLURM_PROCID"),
        (without(SRUN, "SLURM_NODEID"), "SLURM_NODEID is unset"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is unset"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2,1x"}, "SLURM_STEP_TASKS_PER_NODE is '2,1x'"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2,2"}, "SLURM_STEP_TASKS_PER_NODE=2,2"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3"}, "SLURM_STEP_TASKS_PER_NODE=3"),
        (SRUN | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        (SRUN | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1"),
    ],
)
def test_incomplete_or_impossible_variables_are_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read_launch(environ, None)
    assert str(caught.value).count("error:") == 1
