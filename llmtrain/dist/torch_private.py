"""Names of torch that live in private modules and have no public twin.

Every one is listed with what uses it and is exercised by `tests/unit/dist/test_torch_private.py`, which fails on a torch release that
changed it. Nothing else in the package imports or calls anything private of torch.

- `TorchDispatchMode`: sees every operation below autograd; the storage ledger books memory with it. Extending torch this way is
  described in torch's own notes, only the module's name is private.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
