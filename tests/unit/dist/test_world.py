"""What the launch environment says: torchrun, Slurm, launch.nproc, and how they may contradict each other."""

from __future__ import annotations

import pytest

from llmtrain.config.errors import ConfigError, PlanError
from llmtrain.dist.world import LaunchFacts, read_launch

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def test_plain_start_is_one_process() -> None:
    assert read_launch({}, None) == LaunchFacts(0, 0, 1, "one process")


def test_each_source_is_named() -> None:
    assert read_launch(TORCHRUN, None) == LaunchFacts(0, 0, 1, "WORLD_SIZE")
    assert read_launch(SLURM, None) == LaunchFacts(0, 0, 1, "SLURM_STEP_NUM_TASKS", "4711")
    assert read_launch({}, 1) == LaunchFacts(0, 0, 1, "launch.nproc")


def test_an_allocation_without_a_step_starts_no_tasks() -> None:
    batch_script = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_launch(batch_script, None) == LaunchFacts(0, 0, 1, "one process", "4711")


def test_torchrun_inside_srun_counts_ranks_and_not_hosts() -> None:
    hosts = SLURM | {"SLURM_STEP_NUM_TASKS": "2"}
    assert read_launch(hosts | TORCHRUN, None).source == "WORLD_SIZE"


@pytest.mark.parametrize(
    ("environ", "nproc", "named"),
    [
        (TORCHRUN | {"WORLD_SIZE": "4"}, 2, ("WORLD_SIZE says 4", "launch.nproc says 2")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, 4, ("SLURM_STEP_NUM_TASKS says 8", "launch.nproc says 4")),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | SLURM,
            None,
            ("WORLD_SIZE says 2", "SLURM_STEP_NUM_TASKS says 1"),
        ),
    ],
)
def test_two_sources_that_differ_are_both_named(environ: dict[str, str], nproc: int | None, named: tuple[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        read_launch(environ, nproc)
    assert all(text in str(caught.value) for text in named)


@pytest.mark.parametrize(
    ("environ", "nproc"),
    [
        (TORCHRUN | {"WORLD_SIZE": "2"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, None),
        ({}, 2),
        (TORCHRUN | {"WORLD_SIZE": "2"}, 2),
    ],
)
def test_more_than_one_process_is_refused(environ: dict[str, str], nproc: int | None) -> None:
    with pytest.raises(ConfigError, match="not available in this version"):
        read_launch(environ, nproc)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "0"}, "LOCAL_RANK"),
        ({"WORLD_SIZE": "4"}, "RANK"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE"),
        (TORCHRUN | {"RANK": "-1"}, "RANK"),
        (TORCHRUN | {"RANK": "3"}, "RANK=3"),
        ({key: value for key, value in SLURM.items() if key != "SLURM_PROCID"}, "SLURM_PROCID"),
    ],
)
def test_incomplete_or_impossible_variables_are_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read_launch(environ, None)
    assert "try" in str(caught.value)
