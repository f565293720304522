"""Attention by the FlashAttention packages (Dao 2023; Shah et al. 2024): version 2, 3 or 4, whichever is installed. CUDA only.

Documents of a row are given as sequences of different lengths, so no mask exists and nothing across a border is computed.

Legend: B batch, T positions, H query heads, G key-value heads, C channels of a head, N documents of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.ops.attention_masks import AttentionDropout, MaskRequest
from llmtrain.plan.attention import ATTENTION

MODULES: Mapping[str, str] = MappingProxyType({"fa4": "flash_attn.cute", "fa3": "flash_attn_interface", "fa2": "flash_attn"})
"""By kernel, the module that has `flash_attn_func` and `flash_attn_varlen_func`; newest first."""
OPERATIONS = (
    ("flash_attn", "_flash_attn_forward"),
    ("flash_attn", "_flash_attn_varlen_forward"),
    ("flash_attn_3", "_flash_attn_forward"),
)
"""Names under which the packages register their forwards with torch; version 4 registers none."""


@dataclass(frozen=True)
class FlashLibrary:
    """The two functions of an installed version; all three versions share the arguments used here."""

    attend: Callable[..., Any]
    """Rows that are one sequence each: [B, T, H, C]."""
    attend_packed: Callable[..., Any]
    """Sequences of different lengths one after the other: [B T, H, C]."""


@dataclass(frozen=True)
class FlashMask:
    """What the kernel is told about visible keys; it is causal, aligned to the last key, by itself."""

    window_size: tuple[int, int]
    """Keys before and after a query's own; -1 = all of them."""
    starts: Tensor | None
    """[N + 1] int32, see `document_starts`; None = each row is one document."""
    longest: int
    """Tokens of the longest document; 0 without `starts`."""


def make_flash_mask(request: MaskRequest) -> FlashMask:
    """Lengths of the documents, read once a forward: the kernel's grid needs the longest on the host."""
    window_size = (-1, -1) if request.window is None else (request.window - 1, 0)
    if request.document_ids is None:
        return FlashMask(window_size, None, 0)
    starts = document_starts(request.document_ids)
    return FlashMask(window_size, starts, int(starts.diff().max()))


def document_starts(document_ids: Tensor) -> Tensor:
    """Where each document of [B, T] ids begins in the rows laid end to end, and after them B T: [N + 1] int32.

    A run of equal ids is a document, that of padding too; none goes on in the next row, whatever its id.
    """
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    places = begins.flatten().nonzero().flatten()  # [N]
    return torch.cat((places, places.new_tensor([document_ids.numel()]))).to(torch.int32)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: FlashMask, drop: AttentionDropout, *, library: FlashLibrary
) -> Tensor:
    """One call of the package, in its layout."""
    rows = [x.transpose(1, 2) for x in (query, key, value)]  # [B, T, H, C]
    options = {
        "causal": True,
        "window_size": mask.window_size,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if mask.starts is None:
        return _output(library.attend(*rows, **options)).transpose(1, 2)
    for side in "qk":
        options |= {f"cu_seqlens_{side}": mask.starts, f"max_seqlen_{side}": mask.longest}
    mixed = _output(library.attend_packed(*(x.flatten(0, 1) for x in rows), **options))  # [B T, H, C]
    return mixed.unflatten(0, rows[0].shape[:2]).transpose(1, 2)


def load_flash_library(kernel: str) -> FlashLibrary:
    """Import an installed version.

    Raises:
        ConfigError: it is not installed, or cannot be imported on this machine.
    """
    try:
        module = import_module(MODULES[kernel])
        return FlashLibrary(module.flash_attn_func, module.flash_attn_varlen_func)
    except (ImportError, AttributeError) as error:
        package = next(way.package for way in ATTENTION["flash_attn"].kernels if way.name == kernel)
        what = f"attention.backend=flash_attn attention.kernel={kernel}"
        raise ConfigError(Problem(what, f"{package} cannot be imported: {error}", f"pip install {package}")) from error


def registered_operations() -> frozenset[Any]:
    """The forwards of the imported versions as torch operations: results that selective recompute can keep."""
    spaces = ((getattr(torch.ops, space), name) for space, name in OPERATIONS)
    return frozenset(getattr(space, name).default for space, name in spaces if hasattr(space, name))


def _output(result: Any) -> Tensor:
    """Some versions return statistics of the softmax as well."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output
