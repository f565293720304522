"""Weights of a Hugging Face folder: safetensors files, one or several with an index, read and written one tensor at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from llmtrain.checkpoint.files import Files, storage_error, write_file
from llmtrain.checkpoint.hf_families import Family
from llmtrain.checkpoint.hf_tensors import HEAD, Stored, bare_name, full_name, is_buffer, stored_tensors
from llmtrain.config.errors import ConfigError, Problem, StorageError
from llmtrain.config.typed import ModelConfig
from llmtrain.plan.shapes import parameter_shapes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "pytorch_model.pt", "consolidated.00.pth")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class _Found:
    """The tensors of a folder by bare name, and what is wrong with its files."""

    family: Family
    files: dict[str, Any] = field(default_factory=dict)
    """Bare name → the open file that has it."""
    names: dict[str, str] = field(default_factory=dict)
    """Bare name → the name there."""
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, file: Any) -> None:
        bare = bare_name(name, self.family)
        if bare in self.names:
            self.problems.append(f"twice       {bare}, as {self.names[bare]} and as {name}")
        self.files[bare], self.names[bare] = file, name

    def describe(self, bare: str) -> tuple[str, tuple[int, ...]]:
        """Code of its dtype and shape; the tensor is not read."""
        view = self.files[bare].get_slice(self.names[bare])
        return view.get_dtype(), tuple(view.get_shape())

    def tensor(self, bare: str) -> Tensor:
        tensor: Tensor = self.files[bare].get_tensor(self.names[bare])
        return tensor


def read_weights(folder: Path, model: ModelConfig, family: Family) -> dict[str, Tensor]:
    """The weights of a folder as parameters of ours, fp32 on the CPU; besides them one tensor of the files is in memory at a time.

    A head that is tied and stored all the same has to be equal to the embedding.

    Raises:
        StorageError: no safetensors files, or files, tensors, shapes or dtypes that are not those of the model: all are listed.
    """
    stored = stored_tensors(model, family)
    found = _open(folder, family)
    if model.tie_embeddings:
        _settle_tied_head(found, stored[0].name)
    problems = found.problems + _differences(stored, found)
    if problems:
        what = f"the weights in {folder} are not those of its config.json"
        cure = "get the folder again; another config.json only if it is known to belong to these weights"
        raise StorageError(Problem(what, "\n        ".join(problems), cure))
    parameters: dict[str, Tensor] = {}
    for one in stored:
        parameters |= one.unpack(found.tensor(one.name))
    return {name: parameters[name] for name in parameter_shapes(model)}


def _open(folder: Path, family: Family) -> _Found:
    """Open every file and note the names of its tensors."""
    found = _Found(family)
    if (folder / SINGLE).is_file():
        file = _open_file(folder / SINGLE, found)
        for name in file.keys() if file is not None else ():
            found.add(name, file)
        return found
    if not (folder / INDEX).is_file():
        raise StorageError(_no_weights(folder))
    listed = _read_index(folder / INDEX)
    for shard in sorted(set(listed.values())):
        file = _open_file(folder / shard, found)
        held = set(file.keys()) if file is not None else set()
        wanted = {name for name, place in listed.items() if place == shard}
        found.problems += [f"missing     {name}, which the index says is in {shard}" for name in sorted(wanted - held) if file]
        found.problems += [f"not wanted  {name} in {shard}, which the index does not list" for name in sorted(held - wanted)]
        for name in sorted(wanted & held):
            found.add(name, file)
    return found


def _open_file(path: Path, found: _Found) -> Any:
    """An open safetensors file; None when it cannot be one, which is noted."""
    try:
        return safetensors.safe_open(path, framework="pt")
    except FileNotFoundError:
        found.problems.append(f"missing     the file {path.name}")
    except (safetensors.SafetensorError, OSError) as error:
        found.problems.append(f"damaged     {path.name} ({error})")
    return None


def _read_index(path: Path) -> dict[str, str]:
    """Tensor → file; each a plain name in the same folder."""
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in places.values()):
            raise ValueError("its weight_map does not name files of this folder")
    except OSError as error:
        raise storage_error(Files(), error, "read", path) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(Problem(f"cannot read {path}", f"no index of safetensors files: {error!r}")) from error
    return dict(places)


def _no_weights(folder: Path) -> Problem:
    pickled = [name for name in PICKLES if (folder / name).is_file()]
    if not pickled:
        return Problem(f"no weights in {folder}", f"a folder with {SINGLE}, or {INDEX} and the files it names")
    convert = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    rule = "a pickle can run any code while it is read, so none is; weights are read from safetensors files"
    return Problem(f"{folder / pickled[0]}", rule, f'if you trust it: python -c "{convert}"')


def _settle_tied_head(found: _Found, embedding: str) -> None:
    """Take the second copy of a tied matrix out of `found`, or note that it is another matrix."""
    if HEAD not in found.names:
        return
    if embedding not in found.names:
        found.names[embedding], found.files[embedding] = found.names[HEAD], found.files[HEAD]
    elif not torch.equal(found.tensor(HEAD), found.tensor(embedding)):
        found.problems.append(f"tied        {HEAD} is not equal to {embedding}, and config.json has tie_word_embeddings=true")
    del found.names[HEAD], found.files[HEAD]


def _differences(stored: Sequence[Stored], found: _Found) -> list[str]:
    wanted = {one.name: one for one in stored}
    lines = [
        f"missing     {full_name(name, found.family)} {list(one.shape)}"
        for name, one in wanted.items()
        if name not in found.names
    ]
    for bare, name in found.names.items():
        if bare not in wanted:
            lines += [] if is_buffer(bare) else [f"not wanted  {name} {list(found.describe(bare)[1])}"]
            continue
        dtype, shape = found.describe(bare)
        if shape != wanted[bare].shape:
            lines.append(f"shape       {name} is {list(shape)}, config.json says {list(wanted[bare].shape)}")
        if dtype not in _FLOATS:
            lines.append(f"dtype       {name} is {dtype}; weights are one of {', '.join(_FLOATS)}")
    return lines


def write_weights(
    folder: Path,
    parameters: Mapping[str, Tensor],
    model: ModelConfig,
    family: Family,
    *,
    dtype: str,
    shard_bytes: int,
    files: Files = Files(),
) -> list[str]:
    """Write weights into a folder, synced; one converted tensor is in memory at a time.

    Args:
        folder: exists and has no weights.
        parameters: of ours by name, tied ones once.
        dtype: `fp32`, `bf16` or `fp16`.
        shard_bytes: largest file; a larger tensor has its own.

    Returns:
        Names of the files, the index last.

    Raises:
        ConfigError: a finite value does not fit into `dtype`.
        OSError: the operating system refused something.
    """
    shards = _shards(stored_tensors(model, family), DTYPES[dtype].itemsize, shard_bytes)
    names = (
        [SINGLE] if len(shards) == 1 else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    )
    places: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, parameters, family, dtype, files)
        places |= {full_name(one.name, family): name for one in shard}
    if len(shards) == 1:
        return names
    total = sum(one.numel for shard in shards for one in shard) * DTYPES[dtype].itemsize
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_file(files, folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
    return [*names, INDEX]


def _shards(stored: Sequence[Stored], itemsize: int, shard_bytes: int) -> list[list[Stored]]:
    """Consecutive tensors, as many as fit into one file."""
    shards: list[list[Stored]] = [[]]
    filled = 0
    for one in stored:
        size = one.numel * itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += size
    return shards


def _write_shard(
    path: Path, shard: Sequence[Stored], parameters: Mapping[str, Tensor], family: Family, dtype: str, files: Files
) -> None:
    """One safetensors file: length of the header, header, and the tensors' bytes one after another (little-endian)."""
    kind = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in shard:
        start, end = end, end + one.numel * kind.itemsize
        header[full_name(one.name, family)] = {"dtype": _CODES[kind], "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        descriptor = files.create(path)
        try:
            _write_all(files, descriptor, memoryview(struct.pack("<Q", len(text)) + text))
            for one in shard:
                _write_all(files, descriptor, _bytes(one, parameters, dtype))
            files.fsync(descriptor)
        finally:
            files.close(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise


def _bytes(one: Stored, parameters: Mapping[str, Tensor], dtype: str) -> memoryview:
    packed = one.pack(parameters, DTYPES[dtype])
    if not packed.isfinite().all() and all(parameters[name].isfinite().all() for name in one.parameters):
        rule = f"{' and '.join(one.parameters)} has values beyond the largest of {dtype}, {torch.finfo(DTYPES[dtype]).max:,.0f}"
        raise ConfigError(Problem(f"convert.dtype={dtype}", rule, "convert.dtype=bf16 or convert.dtype=fp32"))
    return memoryview(packed.view(torch.uint8).numpy()).cast("B")


def _write_all(files: Files, descriptor: int, data: memoryview) -> None:
    while data:
        data = data[files.write(descriptor, data) :]
