"""Asks every part what it can do here and writes it into the plain record the planner reads."""

from __future__ import annotations

import os
from collections.abc import Mapping

from llmtrain.config.typed import LaunchConfig
from llmtrain.data import tokenizer
from llmtrain.dist.devices import cuda_missing_reason, detect_devices
from llmtrain.dist.world import read_launch
from llmtrain.ops import attention
from llmtrain.optim import build as optimizer
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
    )


def options_here(device: str) -> dict[str, Availability]:
    """Availability by `group=option` or `key=option` of everything that depends on the machine or on what is installed."""
    no_cuda = cuda_missing_reason()
    answers = {
        "launch": {"cpu": Availability(True), "cuda": Availability(not no_cuda, no_cuda)},
        "attention.backend": attention.availability(device),
        "tokenizer": tokenizer.availability(),
        "optimizer": optimizer.availability(),
    }
    return {f"{key}={option}": answer for key, options in answers.items() for option, answer in options.items()}
