"""Reads what trackers have written, each with a reader that is not the writer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.config.typed import TrackerConfig, WandbConfig

BLOCK_BYTES = 1 << 15
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
OFFLINE = WandbConfig(mode="offline", project="llmtrain", entity=None, group=None, tags=())
BOTH = TrackerConfig(wandb=OFFLINE, tensorboard=True)
NONE = TrackerConfig(wandb=None, tensorboard=False)


def tensorboard_values(folder: Path) -> dict[int, dict[str, float]]:
    """Step → name → value as TensorBoard shows them; a step that is there twice is an error."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    reader.Reload()
    assert reader.Tags()["scalars"] == []
    found: dict[int, dict[str, float]] = {}
    for name in reader.Tags()["tensors"]:
        assert reader.SummaryMetadata(name).plugin_data.plugin_name == "scalars"
        for event in reader.Tensors(name):
            assert name not in found.setdefault(event.step, {}), f"{name} of step {event.step} twice"
            array = make_ndarray(event.tensor_proto)
            assert array.shape == () and array.dtype == "float64"
            found[event.step][name] = array.item()
    return found


def wandb_runs(folder: Path) -> list[Path]:
    """The files of the offline runs, oldest first."""
    return sorted(folder.glob("offline-run-*/run-*.wandb"))


def wandb_values(file: Path) -> dict[int, dict[str, float]]:
    """Step → name → value of one start; wandb's own names (with `_`) are left out."""
    found: dict[int, dict[str, float]] = {}
    for record in wandb_records(file):
        if record.WhichOneof("record_type") != "history":
            continue
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        step = record.history.step.num
        assert step not in found, f"step {step} twice"
        found[step] = {name: value for name, value in values.items() if not name.startswith("_")}
    return found


def wandb_run(file: Path) -> Any:
    """What wandb knows about the run: id, project, config, …"""
    return next(record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run")


def wandb_records(file: Path) -> Iterator[Any]:
    """Messages in wandb's log: LevelDB's format (blocks of 32 KiB, records in fragments) after a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    place, whole = 7, b""
    while place + 7 <= len(data):
        if BLOCK_BYTES - place % BLOCK_BYTES < 7:
            place += BLOCK_BYTES - place % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        fragment = data[place + 7 : place + 7 + length]
        whole = fragment if kind in (FULL, FIRST) else whole + fragment
        place += 7 + length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(whole)
            yield record
