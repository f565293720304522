"""Settings of the whole process that a run needs before its first tensor."""

from __future__ import annotations

import os

import torch

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def configure_process(*, threads: int, deterministic: bool, device: str = "cpu", device_index: int = 0) -> None:
    """Set the CPU threads of torch, the CUDA device of this rank, and whether operations that are not reproducible are refused.

    Deterministic matmuls on CUDA need a fixed cuBLAS workspace, which is chosen by a variable read when the library starts; a value
    that the user exported stays.

    Args:
        device: kind of device; `cuda` without a number means `device_index` from here on.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    if device == "cuda":
        torch.cuda.set_device(device_index)
