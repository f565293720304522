"""Run folders in the state that a start leaves them in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from helpers.tiny import MACHINE, VOCAB_SIZE

from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config import schema
from llmtrain.config.compose import config_from_wire
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Machine, Plan
from llmtrain.train.run_folder import Opening, RunFolder, describe_environment


def wire(**keys: Any) -> dict[str, Any]:
    """A resolved config; keys as `train__steps=10`."""
    config = dataclasses.asdict(schema.Config())
    for name, value in keys.items():
        *path, leaf = name.split("__")
        section = config
        for part in path:
            section = section[part]
        assert leaf in section
        section[leaf] = value
    return config


def plan_of(config: dict[str, Any], machine: Machine = MACHINE) -> Plan:
    return make_plan(config_from_wire(config), machine, vocab_size=VOCAB_SIZE)


def decide(folder: RunFolder, config: dict[str, Any], machine: Machine = MACHINE) -> Opening:
    return folder.decide(config, plan_of(config, machine), origins={"optimizer.lr": "command line, word 3"})


def start(
    folder: RunFolder, config: dict[str, Any], *, saved: Sequence[int] = (), code: int | None = None, step: int = 0
) -> Opening:
    """A start that got so far: its files, its checkpoints, its last status."""
    folder.create()
    opening = decide(folder, config)
    folder.record_start(
        config, ["model=tiny"], plan_of(config), describe_environment(plan_of(config), "test", [("here", 1)]), opening
    )
    for number in saved:
        CheckpointStore(folder.checkpoints, 99, folder.files).save(number, {"w": torch.zeros(1)}, {})
    if code is not None:
        folder.write_status(code, step, "told")
    return opening
