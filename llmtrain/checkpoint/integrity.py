"""Reading a checkpoint back: nothing of it is handed out before every byte has matched its checksum."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from llmtrain.checkpoint.files import Files
from llmtrain.checkpoint.layout import (
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    Manifest,
    Piece,
    TensorEntry,
    checksum,
    decode_manifest,
    parse_step_name,
)

# What the medium lost or mangled, as opposed to what this process may not read just now.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → `bfloat16`, for the dtypes a checkpoint can hold."""
    name = str(dtype).removeprefix("torch.")
    assert name in _DTYPES, f"a checkpoint cannot hold {dtype}"
    return name


def read_manifest(folder: Path, files: Files) -> Manifest:
    """The manifest of a published folder, checked against itself, the folder's name and the lengths of the files.

    Raises:
        DamagedCheckpoint: the folder is not a complete checkpoint.
        StorageError: it is of a newer format.
        OSError: it cannot be read now.
    """
    manifest = decode_manifest(_read(folder / MANIFEST, files), folder / MANIFEST)
    named = parse_step_name(folder.name)
    if named is None or named[0] != manifest.step:
        raise DamagedCheckpoint(f"{MANIFEST} is that of step {manifest.step}")
    if STATE not in manifest.files:
        raise DamagedCheckpoint(f"{MANIFEST} lists no {STATE}")
    for name, entry in manifest.files.items():
        try:
            length = (folder / name).stat().st_size
        except OSError as error:
            raise _damage(name, error) from error
        if length != entry.bytes:
            raise DamagedCheckpoint(f"{name} has {length:,} bytes instead of {entry.bytes:,}")
    return manifest


def read_state(folder: Path, files: Files) -> dict[str, Any]:
    """The state of a published folder alone; its tensors are not looked at.

    Raises: as `read_manifest`.
    """
    state: dict[str, Any] = json.loads(_read_checked(folder, STATE, read_manifest(folder, files), files))
    return state


def read_checkpoint(folder: Path, files: Files, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors whose names begin with `prefix` (on the CPU, global shapes) and the state of a published folder.

    Every file is checked, whatever it holds; the tensors of one file are in memory besides those that are returned.

    Raises: as `read_manifest`.
    """
    manifest = read_manifest(folder, files)
    state = json.loads(_read_checked(folder, STATE, manifest, files))
    boxes: dict[str, dict[str, Piece]] = {}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            boxes.setdefault(piece.file, {})[name] = piece
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(manifest.files) - {STATE}):
        found = _decode(file, _read_checked(folder, file, manifest, files))
        if set(found) != set(boxes.get(file, {})):
            raise DamagedCheckpoint(f"{file} holds other tensors than {MANIFEST} lists")
        for name, piece in boxes[file].items():
            if name.startswith(prefix):
                _place(name, found[name], piece, manifest.tensors[name], tensors)
    return {name: tensors[name] for name in manifest.tensors if name in tensors}, state


def _read_checked(folder: Path, name: str, manifest: Manifest, files: Files) -> bytes:
    data = _read(folder / name, files)
    if len(data) != manifest.files[name].bytes or checksum(data) != manifest.files[name].crc32:
        raise DamagedCheckpoint(f"{name} fails its checksum")
    return data


def _read(path: Path, files: Files) -> bytes:
    try:
        return files.read(path)
    except OSError as error:
        raise _damage(path.name, error) from error


def _damage(name: str, error: OSError) -> Exception:
    """The failed read as damage, or unchanged when it says nothing about the checkpoint."""
    if error.errno == errno.ENOENT:
        return DamagedCheckpoint(f"{name} is missing")
    return DamagedCheckpoint(f"{name} cannot be read: {error.strerror}") if error.errno in _DAMAGE else error


def _decode(file: str, data: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise DamagedCheckpoint(f"{file} is no safetensors file ({error})") from error


def _place(name: str, found: Tensor, piece: Piece, entry: TensorEntry, tensors: dict[str, Tensor]) -> None:
    """Put one piece where it belongs; a piece that is the whole tensor is taken as it is."""
    if tuple(found.shape) != piece.shape or found.dtype != _DTYPES.get(entry.dtype):
        raise DamagedCheckpoint(f"{name} in {piece.file} has another shape or dtype than {MANIFEST} lists")
    if piece.shape == entry.shape:
        tensors[name] = found
        return
    if name not in tensors:
        tensors[name] = torch.empty(entry.shape, dtype=found.dtype)
    box = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape))
    tensors[name][box] = found
