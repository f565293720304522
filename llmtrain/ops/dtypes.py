"""The torch dtype of each dtype name that `plan/precision.py` uses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})


def at_least_fp32(x: Tensor) -> Tensor:
    """x itself, or in fp32 when it has fewer bits than that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
