"""Ranks that are connected and nothing more: what a test of sums and gradients needs of a world, without watch or launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.dist.collectives import Collectives, GroupCollectives, NoCollectives
from llmtrain.dist.position import Position

CPU = torch.device("cpu")


@dataclass
class Group:
    """The part of a world that engines use."""

    rank: int
    size: int
    position: Position
    collectives: Collectives


def single() -> Group:
    """One rank."""
    position = Position()
    return Group(0, 1, position, NoCollectives(position))


@contextmanager
def grouped(place: Any, folder: str) -> Iterator[Group]:
    """This rank among those of `place` (as `ranks.run` gives it); `folder` is shared by all and new for each job."""
    if place.world_size == 1:
        yield single()
        return
    position = Position()
    store = dist.FileStore(f"{folder}/store", place.world_size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield Group(place.rank, place.world_size, position, GroupCollectives(group, position, CPU))
    finally:
        dist.destroy_process_group()
