"""Degrees: what is filled in, what is refused, and which legal degrees are proposed instead."""

from __future__ import annotations

from math import prod

import pytest

from llmtrain.config.errors import PlanError
from llmtrain.config.typed import DdpConfig, ParallelismConfig
from llmtrain.plan.degrees import AXES, nearest_degrees, settle_degrees
from llmtrain.plan.plan import Degrees


def asked(dp_replicate=None, dp_shard=1, cp=1, tp=1, pp=1) -> ParallelismConfig:
    return ParallelismConfig("ddp", dp_replicate, dp_shard, cp, tp, pp, DdpConfig(25.0, 1.0, True, False, "none"))


@pytest.mark.parametrize(
    ("world", "parallelism", "expected"),
    [
        (1, asked(), Degrees(1, 1, 1, 1, 1)),
        (8, asked(), Degrees(8, 1, 1, 1, 1)),
        (8, asked(tp=2), Degrees(4, 1, 1, 2, 1)),
        (12, asked(tp=2, pp=3), Degrees(2, 1, 1, 2, 3)),
        (8, asked(dp_replicate=2, dp_shard=None), Degrees(2, 4, 1, 1, 1)),
        (16, asked(dp_replicate=2, dp_shard=2, cp=2, tp=2), Degrees(2, 2, 2, 2, 1)),
    ],
)
def test_legal_degrees(make_machine, world, parallelism, expected) -> None:
    degrees, choices = settle_degrees(parallelism, make_machine(world_size=world, world_source="launch.nproc"))
    assert degrees == expected
    autos = [axis for axis in AXES if getattr(parallelism, axis) is None]
    assert [choice.key for choice in choices] == [f"parallelism.{axis}" for axis in autos]
    assert all(choice.reason == f"what is left of world size {world} (launch.nproc)" for choice in choices)


@pytest.mark.parametrize(
    ("world", "parallelism", "text"),
    [
        (
            8,
            asked(tp=3),
            "error: parallelism.tp=3\n"
            "  rule  dp_shard 1 × cp 1 × tp 3 × pp 1 = 3 must divide the world size 8 (launch.nproc)\n"
            "  try   parallelism.tp=4, which gives dp_replicate 2 × dp_shard 1 × cp 1 × tp 4 × pp 1",
        ),
        (
            1,
            asked(tp=2),
            "error: parallelism.tp=2\n"
            "  rule  dp_shard 1 × cp 1 × tp 2 × pp 1 = 2 must divide the world size 1 (launch.nproc)\n"
            "  try   parallelism.tp=1, which gives dp_replicate 1 × dp_shard 1 × cp 1 × tp 1 × pp 1",
        ),
        (
            4,
            asked(dp_replicate=2),
            "error: parallelism.dp_replicate=2\n"
            "  rule  dp_replicate 2 × dp_shard 1 × cp 1 × tp 1 × pp 1 = 2 must equal the world size 4 (launch.nproc)\n"
            "  try   parallelism.dp_replicate=4, which gives dp_replicate 4 × dp_shard 1 × cp 1 × tp 1 × pp 1",
        ),
        (
            4,
            asked(dp_replicate=1),
            "error: world size 4 (launch.nproc)\n"
            "  rule  dp_replicate 1 × dp_shard 1 × cp 1 × tp 1 × pp 1 = 1 must equal the world size 4 (launch.nproc)\n"
            "  try   parallelism.dp_replicate=4, which gives dp_replicate 4 × dp_shard 1 × cp 1 × tp 1 × pp 1",
        ),
        (
            8,
            asked(dp_replicate=None, dp_shard=None),
            "error: parallelism.dp_replicate=auto parallelism.dp_shard=auto\n"
            "  rule  at most one data axis takes what is left of the world size\n"
            "  try   parallelism.dp_shard=1",
        ),
    ],
)
def test_illegal_degrees(make_machine, world, parallelism, text) -> None:
    with pytest.raises(PlanError) as caught:
        settle_degrees(parallelism, make_machine(world_size=world, world_source="launch.nproc"))
    assert str(caught.value) == text


@pytest.mark.parametrize("world", [1, 2, 6, 7, 16, 16384])
def test_the_proposal_is_legal(world: int) -> None:
    for wanted in ({"tp": 3}, {"tp": 3, "pp": 5}, {"dp_replicate": 7, "cp": 2}):
        degrees = nearest_degrees(dict.fromkeys(AXES, 1) | wanted, world)
        assert prod(degrees.values()) == world
