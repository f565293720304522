"""Asks every part what it can do here and writes it into the plain record the planner reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.plugins import Installed, installed
from llmtrain.config.typed import LaunchConfig
from llmtrain.data import records, tokenizer
from llmtrain.dist.devices import cuda_capability, cuda_missing_reason, detect_devices, mps_missing_reason
from llmtrain.dist.world import LaunchFacts, read_launch
from llmtrain.metrics import trackers
from llmtrain.optim import build as optimizer
from llmtrain.plan import attention
from llmtrain.plan.plan import Availability, Machine


def detect_machine(launch: LaunchConfig, facts: LaunchFacts | None = None) -> Machine:
    """Describe this host, this process's place in the run, and which options work.

    Args:
        facts: the place of this process; None = read from the environment.

    Raises:
        ConfigError: a named device is not there.
        PlanError: two sources name different world sizes, or a host has more ranks than devices.
    """
    place = read_launch(os.environ, launch.nproc) if facts is None else facts
    devices = detect_devices(launch.device, place)
    return Machine(
        device=devices.device,
        device_reason=devices.reason,
        device_name=devices.name,
        num_devices=devices.num_devices,
        memory_bytes=devices.memory_bytes,
        cores=devices.cores,
        world_size=place.world_size,
        world_source=place.source,
        bf16_native=devices.bf16_native,
        options=options_here(devices.device, devices.index),
        capability=cuda_capability(devices.device, devices.index),
        packages=attention_packages(),
        local_world_size=place.local_world_size,
        num_nodes=place.num_nodes,
        device_index=devices.index,
        device_unit=devices.unit,
        bf16=devices.bf16,
    )


def shared_facts(machine: Machine) -> dict[str, Any]:
    """What the other ranks have to know of this one's machine, as plain JSON values."""
    return {name: getattr(machine, name) for name in ("device", "device_unit", "memory_bytes", "bf16_native", "bf16")}


def agreed_machine(machine: Machine, everyone: Sequence[Mapping[str, Any]]) -> Machine:
    """The machine that all ranks plan with: what `auto` becomes may not depend on the rank.

    The free memory of a host, say, is another number on each of its ranks, and so would be the size of a micro-batch.

    Args:
        everyone: `shared_facts` of each rank, by rank.

    Returns:
        The machine with the least memory of any rank, and bf16 only where all have it.

    Raises:
        PlanError: ranks would compute on different kinds of devices, or two of them on one.
    """
    kinds = [facts["device"] for facts in everyone]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            what = f"rank 0 computes on {kinds[0]}, rank {rank} on {kind}"
            raise PlanError(Problem(what, "all ranks have the same kind of device", "launch.device=cpu"))
    units = [facts["device_unit"] for facts in everyone]
    for rank, unit in enumerate(units):
        if unit and units.index(unit) != rank:
            what = f"ranks {units.index(unit)} and {rank} have the same CUDA device {unit}"
            raise PlanError(
                Problem(what, "each rank has a device of its own", "fewer processes on a host or launch.device=cpu")
            )
    return replace(
        machine,
        memory_bytes=min(facts["memory_bytes"] for facts in everyone),
        bf16_native=all(facts["bf16_native"] for facts in everyone),
        bf16=all(facts["bf16"] for facts in everyone),
    )


def options_here(device: str, index: int = 0) -> dict[str, Availability]:
    """Availability by `group=option` or `key=option` of everything that depends on the machine or on what is installed."""
    no_cuda, no_mps = cuda_missing_reason(), mps_missing_reason()
    answers = {
        "launch": {
            "cpu": Availability(True),
            "cuda": Availability(not no_cuda, no_cuda),
            "mps": Availability(not no_mps, no_mps),
        },
        "attention.backend": attention.availability(device, cuda_capability(device, index), attention_packages()),
        "data": records.availability(),
        "tokenizer": tokenizer.availability(),
        "tracker": trackers.availability(),
        "optimizer": optimizer.availability(),
    }
    own = {f"{key}={option}": answer for key, options in answers.items() for option, answer in options.items()}
    return own | {name: answer for one in installed() for name, answer in _plugin_answers(one, device).items()}


def _plugin_answers(one: Installed, device: str) -> dict[str, Availability]:
    """Under both names that an option has, that of its group and that of the key which chooses it."""
    runs = device in one.plugin.devices
    answer = Availability(runs, "" if runs else f"runs on {', '.join(one.plugin.devices)}, not on {device}")
    return {f"{one.plugin.group}={one.plugin.name}": answer, f"{one.chooser}={one.word}": answer}


def attention_packages() -> tuple[str, ...]:
    """The packages of the attention table that are installed; none is imported for it."""
    return tuple(name for name in attention.packages() if _is_installed(name))


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
