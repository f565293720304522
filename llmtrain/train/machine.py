"""Asks every part what it can do here and writes it into the plain record the planner reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from importlib import metadata
from typing import Any

from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.plugins import Installed, installed
from llmtrain.config.typed import LaunchConfig
from llmtrain.data import records, tokenizer
from llmtrain.dist.devices import (
    core_limits,
    cuda_capability,
    cuda_missing_reason,
    detect_devices,
    host_name,
    memory_limits,
    mps_missing_reason,
    smallest,
)
from llmtrain.dist.world import LaunchFacts, read_launch
from llmtrain.metrics import trackers
from llmtrain.optim import build as optimizer
from llmtrain.plan import attention
from llmtrain.plan.plan import Availability, HostLimit, Machine


def detect_machine(launch: LaunchConfig, facts: LaunchFacts | None = None) -> Machine:
    """Describe this host, this process's place in the run, and which options work.

    One process cannot see what others are bounded by: here all ranks of a host share its cores and memory, until
    `agreed_machine` knows better.

    Args:
        facts: the place of this process; None = read from the environment.

    Raises:
        ConfigError: a named device is not there.
        PlanError: two sources name different world sizes, or a host has more ranks than devices.
    """
    place = read_launch(os.environ, launch.nproc) if facts is None else facts
    devices = detect_devices(launch.device, place)
    cores, memory = core_limits(), memory_limits(place.host_memory)
    return Machine(
        device=devices.device,
        device_reason=devices.reason,
        device_name=devices.name,
        num_devices=devices.num_devices,
        memory_bytes=devices.memory_bytes or smallest(memory) // place.local_world_size,
        cores=smallest(cores),
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
        core_ranks=place.local_world_size,
        host_jobs=place.host_jobs,
        host=host_name(),
        core_limits=cores,
        memory_limits=memory,
    )


def shared_facts(machine: Machine) -> dict[str, Any]:
    """What the other ranks have to know of this one's machine, as plain JSON values."""
    facts = {name: getattr(machine, name) for name in ("device", "device_unit", "memory_bytes", "bf16_native", "bf16", "host")}
    limits = {name: [astuple(limit) for limit in getattr(machine, name)] for name in ("core_limits", "memory_limits")}
    return facts | limits


def agreed_machine(machine: Machine, everyone: Sequence[Mapping[str, Any]]) -> Machine:
    """The machine that all ranks plan with: what `auto` becomes may not depend on the rank.

    The free memory of a host, say, is another number on each of its ranks, and so would be the size of a micro-batch.

    Args:
        everyone: `shared_facts` of each rank, by rank.

    Returns:
        The machine with the least memory of any rank, and bf16 only where all have it. The cores are its own: ranks that the batch
        system has bound to cores of their own share them with nobody, nor do they share the limits of a control group of their own.

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
    cores, core_ranks = machine.cores, machine.core_ranks
    if machine.core_limits:
        cores, core_ranks = _tightest(machine.core_limits, _on_host(machine.host, "core_limits", everyone))
    return replace(
        machine,
        memory_bytes=min(_memory_bytes(facts, everyone) for facts in everyone),
        cores=cores,
        core_ranks=core_ranks,
        bf16_native=all(facts["bf16_native"] for facts in everyone),
        bf16=all(facts["bf16"] for facts in everyone),
    )


def _memory_bytes(facts: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> int:
    """Memory of a device, or a rank's share of that of its host."""
    if facts["device"] != "cpu" or not facts["memory_limits"]:
        return int(facts["memory_bytes"])
    on_host = _on_host(facts["host"], "memory_limits", everyone)
    amount, num_ranks = _tightest(_limits(facts["memory_limits"]), on_host)
    return amount // num_ranks


def _on_host(host: str, name: str, everyone: Sequence[Mapping[str, Any]]) -> list[list[HostLimit]]:
    """The limits of each rank of a host."""
    return [_limits(facts[name]) for facts in everyone if facts["host"] == host]


def _limits(values: Sequence[Sequence[Any]]) -> list[HostLimit]:
    return [HostLimit(*value) for value in values]


def _tightest(limits: Sequence[HostLimit], on_host: Sequence[Sequence[HostLimit]]) -> tuple[int, int]:
    """The amount of the limit that leaves each rank the least, and how many ranks share that."""
    shared = [(limit.amount, sum(any(limit.is_shared_with(other) for other in rank) for rank in on_host)) for limit in limits]
    return min(shared, key=lambda pair: pair[0] / pair[1])


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
