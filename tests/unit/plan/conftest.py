"""Configs and machines for the plan's tests, made without Hydra and without looking at the real machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest

from llmtrain.config import schema
from llmtrain.config.freeze import build_config
from llmtrain.config.typed import Config
from llmtrain.plan.plan import Availability, Machine

GIB = 2**30


def _config(words: dict[str, Any] | None = None) -> Config:
    wire = schema.Config()
    for key, value in (words or {}).items():
        *sections, name = key.split(".")
        section = reduce(getattr, sections, wire)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return build_config(wire)


def _machine(**changes: Any) -> Machine:
    facts: dict[str, Any] = dict(
        device="cpu",
        device_reason="auto: no CUDA device",
        device_name="Some CPU",
        num_devices=1,
        memory_bytes=8 * GIB,
        cores=4,
        world_size=1,
        world_source="one process",
        bf16_native=True,
        options={"attention.backend=sdpa": Availability(True), "attention.backend=reference": Availability(True)},
    )
    return Machine(**(facts | changes))


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """dotted key → value ↦ typed config; keys not named keep their defaults."""
    return _config


@pytest.fixture
def make_machine() -> Callable[..., Machine]:
    """A CPU with 4 cores and 8 GiB in one process, but for the fields named."""
    return _machine
