"""Loading some tensors of a checkpoint: those that are asked for, all files checked all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint import writer
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.errors import StorageError

TENSORS = {
    "model/a": torch.arange(6.0),
    "optimizer/a": torch.ones(6),
    "model/b": torch.zeros(2, 3),
    "optimizer/b": torch.ones(9),
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A checkpoint with a file for each tensor."""
    monkeypatch.setattr(writer, "FILE_BYTES", 1)
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(3, TENSORS, {"x": 1})
    return store


def test_only_tensors_of_the_prefix_come_back(store: CheckpointStore) -> None:
    loaded = store.load(prefix="model/")
    assert list(loaded.tensors) == ["model/a", "model/b"] and loaded.state == {"x": 1}
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in loaded.tensors.items())
    assert set(store.load(3).tensors) == set(TENSORS)


def test_damage_elsewhere_is_damage(store: CheckpointStore) -> None:
    file = store.folder / "step-00000003" / "tensors-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(StorageError, match="fails its checksum"):
        store.load(prefix="model/")
