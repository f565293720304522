"""Small runs for tests: a wire config by dotted keys, its plan on a fixed machine, and an engine."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.config import schema
from llmtrain.config.freeze import build_config
from llmtrain.config.typed import Config
from llmtrain.data.loader import Batch
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Machine, Plan

VOCAB_SIZE = 64
IGNORE = -100

TINY: dict[str, Any] = {
    "model.dim": 32,
    "model.num_layers": 2,
    "model.attention.num_heads": 4,
    "data.kind": "synthetic",
    "data.sequence_length": 24,
    "accumulation.global_batch_size": 8,
    "accumulation.micro_batch_size": 8,
    "precision.kind": "fp32",
    "attention.backend": "reference",
    "loss.kind": "reference",
    "train.steps": 12,
    "launch.threads": 1,
}

MACHINE = Machine(
    device="cpu",
    device_reason="test",
    device_name="test cpu",
    num_devices=1,
    memory_bytes=8 * 2**30,
    cores=4,
    world_size=1,
    world_source="one process",
    bf16_native=True,
    options={},
)


def config_of(keys: dict[str, Any] | None = None) -> Config:
    """The typed config of TINY with dotted keys on top."""
    wire = schema.Config()
    for dotted, value in (TINY | (keys or {})).items():
        *path, leaf = dotted.split(".")
        section = wire
        for name in path:
            section = getattr(section, name)
        assert hasattr(section, leaf), dotted
        setattr(section, leaf, value)
    return build_config(wire)


def plan_of(config: Config) -> Plan:
    """The plan of a config on the test machine."""
    return make_plan(config, MACHINE, vocab_size=VOCAB_SIZE)


def rows(num_rows: int, sequence_length: int, packing: str, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Batch:
    """Rows of random tokens as the loader would give them for a packing, with unequal numbers of targets per row."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, vocab_size, (num_rows, sequence_length + 1), generator=generator)
    tokens, targets = stream[:, :-1].clone(), stream[:, 1:].clone()
    index = torch.arange(num_rows)
    if packing == "concat":
        return Batch(tokens, targets, None, None, index)
    positions = torch.arange(sequence_length).repeat(num_rows, 1)
    documents = torch.zeros_like(positions)
    for row in range(num_rows):
        if packing == "padded":
            length = 3 + (7 * row) % (sequence_length - 3)
            tokens[row, length:] = 0
            targets[row, length - 1 :] = IGNORE
            documents[row, length:] = -1
        else:
            for border in (5 + row, 14 + row % 3):
                targets[row, border - 1] = IGNORE
                positions[row, border:] = torch.arange(sequence_length - border)
                documents[row, border:] += 1
    return Batch(tokens, targets, positions, documents, index)


def cut(batch: Batch, micro_batch_size: int) -> list[Batch]:
    """A batch as micro-batches."""

    def part(tensor: torch.Tensor | None, start: int) -> torch.Tensor | None:
        return None if tensor is None else tensor[start : start + micro_batch_size]

    fields = (batch.tokens, batch.targets, batch.positions, batch.document_ids, batch.sample_index)
    return [Batch(*(part(field, start) for field in fields)) for start in range(0, len(batch.tokens), micro_batch_size)]
