"""What a rank says by itself before it has met the others."""

from __future__ import annotations

import pytest

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.errors import ExitCode

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optimizer.lrr=1"], "optimizer.lrr"),
        (["launch.nproc=3"], "WORLD_SIZE says 8 processes, launch.nproc says 3"),
        (["launch.env.LD_PRELOAD=x"], "launch.env.LD_PRELOAD=x"),
    ],
)
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_what_every_rank_finds_is_said_by_the_first_of_a_host(monkeypatch, capsys, words, told, local_rank):
    for name, value in (TORCHRUN | {"LOCAL_RANK": local_rank, "RANK": str(4 + int(local_rank))}).items():
        monkeypatch.setenv(name, value)
    assert dispatch(words) == ExitCode.CONFIG
    errors = capsys.readouterr().err
    assert errors.count(told) == (1 if local_rank == "0" else 0)
    assert (errors == "") == (local_rank == "1")


@pytest.mark.parametrize(("local", "count"), [({}, 1), ({"SLURM_LOCALID": "0"}, 1), ({"SLURM_LOCALID": "2"}, 0)])
def test_a_process_alone_and_a_task_of_slurm(monkeypatch, capsys, local, count):
    for name, value in local.items():
        monkeypatch.setenv(name, value)
    assert dispatch(["optimizer.lrr=1"]) == ExitCode.CONFIG
    assert capsys.readouterr().err.count("error: ") == count
