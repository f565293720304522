"""Small writers of other programs' token files, byte for byte by the layouts in their sources and with nothing from llmtrain.

llm_c      karpathy/llm.c dev/data/data_common.py write_datafile; KellerJordan/modded-nanogpt data/fineweb.py
megatron   NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py _IndexWriter, IndexedDatasetBuilder
datatrove  huggingface/datatrove src/datatrove/pipeline/tokens/tokenizer.py TokenizedFile
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

LETTERS = {"uint8": "B", "int8": "b", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q"}
MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def packed(ids: Sequence[int], dtype: str) -> bytes:
    return struct.pack(f"<{len(ids)}{LETTERS[dtype]}", *ids)


def write_raw(path: Path, ids: Sequence[int], dtype: str = "uint16") -> Path:
    path.write_bytes(packed(ids, dtype))
    return path


def write_llm_c(path: Path, ids: Sequence[int], *, model: str = "gpt-2", count: int | None = None) -> Path:
    magic, version, dtype = {"gpt-2": (20240520, 1, "uint16"), "llama-3": (20240801, 7, "uint32")}[model]
    header = struct.pack("<3i", magic, version, len(ids) if count is None else count)
    path.write_bytes(header.ljust(1024, b"\0") + packed(ids, dtype))
    return path


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], *, dtype: str = "uint16", modes: bool = False
) -> Path:
    """Documents made of sequences; returns the .bin file."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    width = struct.calcsize(LETTERS.get(dtype, "d"))
    pointers = [width * before for before in [0, *accumulate(lengths)][: len(lengths)]]
    borders = [0, *accumulate(len(document) for document in documents)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", MEGATRON_CODES[dtype])
    index += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(borders))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
    index += struct.pack(f"<{len(borders)}q", *borders) + bytes(len(lengths) if modes else 0)
    Path(f"{prefix}.idx").write_bytes(index)
    path = Path(f"{prefix}.bin")
    path.write_bytes(packed([token for sequence in sequences for token in sequence], dtype))
    return path


def write_datatrove(
    path: Path,
    documents: Sequence[Sequence[int]],
    *,
    width: int = 2,
    index: bool = True,
    metadata: bool = True,
    name: str = "gpt2",
) -> Path:
    ids = [token for document in documents for token in document]
    path.write_bytes(struct.pack(f"<{len(ids)}{'H' if width == 2 else 'I'}", *ids))
    if index:
        ends = list(accumulate(len(document) for document in documents))
        Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata:
        Path(f"{path}.metadata").write_text("\n".join([f"{name}|{width}", str(len(ids)), f"{len(ids)} T"]))
    return path
