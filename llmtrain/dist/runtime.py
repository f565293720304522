"""Settings of the whole process that a run needs before its first tensor."""

from __future__ import annotations

import os

import torch

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def configure_process(*, threads: int, deterministic: bool) -> None:
    """Set the CPU threads of torch and whether operations that are not reproducible are refused.

    Deterministic matmuls on CUDA need a fixed cuBLAS workspace, which is chosen by a variable read when the library starts; a value
    that the user exported stays.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
