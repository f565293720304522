"""Whole runs inside the test process: composed from words, on a small text, told to a string."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from llmtrain.checkpoint.store import CheckpointStore, Loaded
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ExitCode
from llmtrain.metrics import throughput
from llmtrain.metrics.console import PlainConsole
from llmtrain.train.build import train

SMALL = (
    "data=text",
    "data.sequence_length=24",
    "model.dim=32",
    "model.num_layers=2",
    "model.attention.num_heads=4",
    "precision.kind=fp32",
    "launch.device=cpu",
    "launch.threads=1",
    "train.log_every=100",
    "train.eval_every=0",
    "generate.max_tokens=8",
)
TIMES_AND_MEMORY = (
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "exposed_comm_seconds",
    "peak_memory_bytes",
    "memory",
    "activations_peak_bytes",
    "loss_peak_bytes",
)
"""What may differ between two equal trainings."""


def write_text(folder: Path, num_documents: int = 37, *, seed: int = 0, bytes_per_document: int = 24) -> Path:
    """A folder of short text files of unequal lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for index in range(num_documents):
        length = int(generator.integers(bytes_per_document // 2, 3 * bytes_per_document // 2))
        words = "".join(generator.choice(list("abcdefgh \n"), length))
        (folder / f"{index:02}.txt").write_text(f"{index} {words}")
    return folder


def run_words(text: Path, runs: Path, name: str, *words: str) -> tuple[str, ...]:
    """The command line of a small run; later words win."""
    return (*SMALL, f"data.path={text}", f"data.cache_dir={runs / 'cache'}", f"run.dir={runs}", f"run.name={name}", *words)


def run(*words: str) -> tuple[ExitCode, str]:
    """Train in this process; (exit code, what was printed)."""
    stream = io.StringIO()
    console = PlainConsole(stream, 160)
    try:
        # No test looks at the speed of the machine, so it is not measured for long.
        with mock.patch.object(throughput, "MEASURE_SECONDS", 0.0):
            code = train(compose_config(words), console)
    finally:
        console.close()
        torch.use_deterministic_algorithms(False)
    return code, stream.getvalue()


def records(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what may differ between equal trainings."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES_AND_MEMORY} for line in lines]


def saved(folder: Path, step: int | None = None) -> Loaded:
    """A checkpoint of a run folder."""
    return CheckpointStore(folder / "checkpoints", keep=1).load(step)


def assert_same_training(ours: Path, theirs: Path) -> None:
    """Final weights, moments, counters and every record are equal to the bit."""
    mine, other = saved(ours), saved(theirs)
    assert mine.step == other.step and mine.state == other.state
    assert list(mine.tensors) == list(other.tensors)
    for name, tensor in mine.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert records(ours) == records(theirs)
