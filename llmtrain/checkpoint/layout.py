"""Names and records of a checkpoint on disk.

    <folder>/step-00000250/                      one published checkpoint, never written to again
        tensors-00000.safetensors …              named tensors
        state.json                               everything that is no tensor
        MANIFEST.json                            written last: what the folder holds and the checksum of each file
    <folder>/step-00000250.old/                  an earlier checkpoint of the same step, until its successor is durable
    <folder>/.staging-00000250-<owner>-<nonce>/  a save in progress
    <folder>/.trash-00000250-<owner>-<nonce>/    a checkpoint being removed

Any other name belongs to somebody else and is not touched. A tensor is listed with its global shape and the pieces it is stored in,
so that ranks may later write a shard each without a new format. No file is a pickle.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from llmtrain.config.errors import Problem, StorageError

FORMAT_VERSION = 1
"""Of the manifest. In every version `crc32` seals the rest of the document, so that a newer file can be told from a damaged one."""

MANIFEST = "MANIFEST.json"
STATE = "state.json"
OLD = ".old"

_STEP_NAME = re.compile(r"step-([0-9]{8,})(\.old)?")
_WORK_NAME = re.compile(r"\.(?:staging|trash)-[0-9]{8,}-([0-9a-f]{8}-[0-9]+-[0-9]+)-[0-9a-f]{8}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be used; the text says what is wrong with it."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step_name(name: str) -> tuple[int, bool] | None:
    """Step of a published folder and whether it is an `.old` one; None for every other name."""
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    step, old = int(match[1]), match[2] is not None
    return (step, old) if name == step_name(step) + (OLD if old else "") else None


def list_steps(folder: Path) -> list[int]:
    """Steps of every published folder, damaged ones included, in numeric order."""
    if not folder.is_dir():
        return []
    parsed = (parse_step_name(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted({found[0] for found in parsed if found is not None})


def work_name(kind: str, step: int, owner: str, nonce: str) -> str:
    """Name of a `staging` or `trash` folder."""
    return f".{kind}-{step:08d}-{owner}-{nonce}"


def parse_work_name(name: str) -> str | None:
    """Owner's token of a staging or trash folder; None for every other name."""
    match = _WORK_NAME.fullmatch(name)
    return match[1] if match else None


@dataclass(frozen=True)
class FileEntry:
    """Length and checksum of a file."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor and the file that holds it, under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor; its pieces cover every element once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """What a published folder holds. Files that are not listed are not part of the checkpoint."""

    step: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]


def checksum(data: bytes) -> str:
    """CRC-32 as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def encode_manifest(manifest: Manifest) -> bytes:
    return _seal({"format_version": FORMAT_VERSION, **asdict(manifest)})


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """Read a manifest and check it against itself.

    Args:
        data: content of the file.
        path: where it came from, for messages.

    Raises:
        DamagedCheckpoint: it is not what was written, or describes something impossible.
        StorageError: it is sound but of a newer format.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is no JSON") from error
    # The seal covers every byte: sealing the same content again must give the same file.
    if not isinstance(document, dict) or _seal({k: v for k, v in document.items() if k != "crc32"}) != data:
        raise DamagedCheckpoint(f"{MANIFEST} fails its checksum")
    check_format_version(document, FORMAT_VERSION, path)
    try:
        manifest = _build(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is malformed ({error})") from error
    for name, entry in manifest.tensors.items():
        _check_pieces(name, entry, manifest.files)
    return manifest


def check_format_version(document: Mapping[str, Any], known: int, path: Path) -> None:
    """Refuse a file that a later release wrote.

    Raises:
        StorageError: naming both versions.
    """
    version = document.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise StorageError(Problem(f"{path} has format_version {version!r}", f"a number from 1 to {known}"))
    if version > known:
        rule = f"it has format_version {version}, this release of llmtrain reads up to {known}"
        raise StorageError(Problem(f"cannot read {path}", rule, "use the release of llmtrain that wrote it, or a later one"))


def _seal(document: dict[str, Any]) -> bytes:
    body = json.dumps(document, sort_keys=True, indent=1).encode()
    return json.dumps({**document, "crc32": checksum(body)}, sort_keys=True, indent=1).encode()


def _build(document: dict[str, Any]) -> Manifest:
    files = {_file_name(name): FileEntry(int(f["bytes"]), str(f["crc32"])) for name, f in document["files"].items()}
    tensors = {}
    for name, entry in document["tensors"].items():
        pieces = tuple(Piece(_file_name(p["file"]), _sizes(p["offset"]), _sizes(p["shape"])) for p in entry["pieces"])
        tensors[name] = TensorEntry(_sizes(entry["shape"]), str(entry["dtype"]), pieces)
    return Manifest(int(document["step"]), files, tensors)


def _file_name(name: str) -> str:
    """A plain name inside the checkpoint's own folder; nothing that could lead out of it."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"file name {name!r}")
    return name


def _sizes(values: list[int]) -> tuple[int, ...]:
    if any(not isinstance(value, int) or value < 0 for value in values):
        raise ValueError(f"sizes {values!r}")
    return tuple(values)


def _check_pieces(name: str, entry: TensorEntry, files: Mapping[str, FileEntry]) -> None:
    for piece in entry.pieces:
        if piece.file not in files:
            raise DamagedCheckpoint(f"{name} is in {piece.file}, which {MANIFEST} does not list")
        if not len(piece.offset) == len(piece.shape) == len(entry.shape):
            raise DamagedCheckpoint(f"a piece of {name} has another number of dimensions")
        if any(start + size > whole for start, size, whole in zip(piece.offset, piece.shape, entry.shape)):
            raise DamagedCheckpoint(f"a piece of {name} lies outside its shape {list(entry.shape)}")
    if any(_overlap(one, other) for one, other in combinations(entry.pieces, 2)):
        raise DamagedCheckpoint(f"pieces of {name} overlap")
    if not entry.pieces or sum(math.prod(piece.shape) for piece in entry.pieces) != math.prod(entry.shape):
        raise DamagedCheckpoint(f"pieces of {name} do not cover its shape {list(entry.shape)}")


def _overlap(one: Piece, other: Piece) -> bool:
    if not math.prod(one.shape) or not math.prod(other.shape):
        return False
    axes = zip(one.offset, one.shape, other.offset, other.shape)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in axes)
