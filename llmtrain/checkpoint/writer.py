"""Writing the files of one checkpoint into a staging folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from llmtrain.checkpoint.files import Files, write_file
from llmtrain.checkpoint.integrity import dtype_name
from llmtrain.checkpoint.layout import MANIFEST, STATE, FileEntry, Manifest, Piece, TensorEntry, checksum, encode_manifest

FILE_BYTES = 256 * 2**20
"""Tensors are gathered into files of about this size; serialising one file needs up to three times as much host memory."""

# Room for headers, the manifest and file-system blocks, on top of the tensors' own bytes.
_FIXED_OVERHEAD = 64 * 2**10
_TENSOR_OVERHEAD = 512


def encode_state(state: Mapping[str, Any]) -> bytes:
    """State as JSON that `json.loads` turns back into equal values, floats bit for bit.

    Raises:
        TypeError: something that JSON would change or cannot hold: a tuple, a key that is no text, an object.
    """
    _require_plain(state, "state")
    return json.dumps(state, sort_keys=True, indent=1).encode()


def bytes_needed(tensors: Mapping[str, Tensor], state: bytes) -> int:
    """Upper estimate of what a checkpoint takes on disk, in bytes."""
    payload: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return payload + len(state) + _FIXED_OVERHEAD + _TENSOR_OVERHEAD * len(tensors)


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], state: bytes, files: Files) -> None:
    """Create `folder` and put a whole checkpoint into it, the manifest last; every file is synced, then the folder.

    Args:
        folder: must not exist.
        tensors: any device; each tensor's memory under one name only (tied weights are stored once).
        state: from `encode_state`.

    Raises:
        OSError: the operating system refused something.
    """
    _require_own_memory(tensors)
    files.make_folder(folder)
    entries: dict[str, TensorEntry] = {}
    written = {STATE: _write(folder / STATE, state, files)}
    for index, group in enumerate(_groups(tensors)):
        name = f"tensors-{index:05d}.safetensors"
        blob = safetensors.torch.save({key: tensor.detach().cpu().contiguous() for key, tensor in group.items()})
        written[name] = _write(folder / name, blob, files)
        for key, tensor in group.items():
            shape = tuple(tensor.shape)
            entries[key] = TensorEntry(shape, dtype_name(tensor.dtype), (Piece(name, (0,) * len(shape), shape),))
    write_file(files, folder / MANIFEST, encode_manifest(Manifest(step, written, entries)))
    files.fsync_folder(folder)


def _write(path: Path, data: bytes, files: Files) -> FileEntry:
    write_file(files, path, data)
    return FileEntry(len(data), checksum(data))


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors, as many as fit into one file; a larger tensor has its own."""
    group: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if group and filled + size > FILE_BYTES:
            yield group
            group, filled = {}, 0
        group[name] = tensor
        filled += size
    if group:
        yield group


def _require_own_memory(tensors: Mapping[str, Tensor]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            other = seen.setdefault((str(tensor.device), tensor.data_ptr()), name)
            assert other == name, f"{name} and {other} are one tensor; store it once"


def _require_plain(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; JSON would make it text")
            _require_plain(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
    elif not (value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))):
        raise TypeError(f"{where} is {value!r}, which JSON does not hold as it is")
