"""Asks every part what it can do here and writes it into the plain record the planner reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata

from llmtrain.config.plugins import Installed, installed
from llmtrain.config.typed import LaunchConfig
from llmtrain.data import records, tokenizer
from llmtrain.dist.devices import cuda_capability, cuda_missing_reason, detect_devices
from llmtrain.dist.world import read_launch
from llmtrain.metrics import trackers
from llmtrain.optim import build as optimizer
from llmtrain.plan import attention
from llmtrain.plan.plan import Availability, Machine


def detect_machine(launch: LaunchConfig, environ: Mapping[str, str] = os.environ) -> Machine:
    """Describe this host, this process's place in the run, and which options work.

    Raises:
        ConfigError: a named device is not there, or more than one process is asked for.
        PlanError: two sources name different world sizes.
    """
    facts = read_launch(environ, launch.nproc)
    devices = detect_devices(launch.device)
    return Machine(
        device=devices.device,
        device_reason=devices.reason,
        device_name=devices.name,
        num_devices=devices.num_devices,
        memory_bytes=devices.memory_bytes,
        cores=devices.cores,
        world_size=facts.world_size,
        world_source=facts.source,
        bf16_native=devices.bf16_native,
        options=options_here(devices.device),
        capability=cuda_capability(devices.device),
        packages=attention_packages(),
    )


def options_here(device: str) -> dict[str, Availability]:
    """Availability by `group=option` or `key=option` of everything that depends on the machine or on what is installed."""
    no_cuda = cuda_missing_reason()
    answers = {
        "launch": {"cpu": Availability(True), "cuda": Availability(not no_cuda, no_cuda)},
        "attention.backend": attention.availability(device, cuda_capability(device), attention_packages()),
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
