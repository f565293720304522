"""What the ranks of a run must have in common before they make a tensor together, and how they come to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llmtrain import __version__
from llmtrain.config.errors import Problem, StorageError
from llmtrain.config.settle import flatten
from llmtrain.data.corpus import Corpus
from llmtrain.dist.meeting import compare
from llmtrain.dist.ranks import World
from llmtrain.plan.plan import Plan
from llmtrain.plan.report import plan_to_dict
from llmtrain.train.run_folder import Opening, RunFolder, Start

OWN_OF_A_RANK = ("threads", "choices", "forecast")
"""Entries of a plan that may differ: they follow from the host a rank runs on."""
SHARED_FOLDER_SECONDS = 10.0
"""How long a network file system may take to show a new file on another host."""


def same_config(world: World, wire: Mapping[str, Any]) -> None:
    """Raise ConfigError where a rank composed another config, or runs another version; `world` says which and where.

    Under torchrun and Slurm every rank composes by itself, from files that may differ between hosts.
    """
    versions = {"version of llmtrain": __version__, "version of torch": torch.__version__}
    compare(world.meeting, "config", {**dict(flatten(wire)), **versions})


def same_plan(world: World, plan: Plan, corpus: Corpus) -> None:
    """Raise ConfigError where a rank settled on something else, or reads other data."""
    settled = {key: value for key, value in flatten_plan(plan_to_dict(plan)).items() if key.split(".")[0] not in OWN_OF_A_RANK}
    compare(world.meeting, "plan", {**settled, "fingerprint of the data": corpus.fingerprint})


def flatten_plan(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested document as dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat |= flatten_plan(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def share_folder(world: World, folder: RunFolder) -> None:
    """See that every rank sees the folder that rank 0 has made; raises StorageError on those that do not."""
    mark = Path(world.meeting.share("mark", lambda: str(_leave_mark(folder.path))))
    try:
        with world.meeting.together("folder"):
            _wait_for(mark, world, folder.path)
    finally:
        if world.is_main:
            mark.unlink(missing_ok=True)


def _leave_mark(folder: Path) -> Path:
    mark = folder / f".ranks-{secrets.token_hex(4)}"
    mark.touch()
    return mark


def _wait_for(mark: Path, world: World, folder: Path) -> None:
    deadline = time.monotonic() + SHARED_FOLDER_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline:
            what = f"rank {world.rank} does not see {folder}"
            rule = "all ranks read and write one run folder, on a file system that every host has"
            raise StorageError(Problem(what, rule, "run.dir=FOLDER on a shared file system"))
        time.sleep(0.1)


def share_opening(world: World, decided: Opening | None) -> Opening:
    """What rank 0 found that the start means, on every rank; the changes are told by rank 0 alone."""

    def told() -> dict[str, str]:
        assert decided is not None, "rank 0 decides"
        return {"start": decided.start.value, "message": decided.message}

    shared = world.meeting.share("what the start means", told)
    return decided if decided is not None else Opening(Start(shared["start"]), (), shared["message"])
