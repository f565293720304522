"""What holds for every test: those marked `gpu` are skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Look for a device only when a test needs one: importing torch takes seconds."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    from llmtrain.dist.devices import cuda_missing_reason

    reason = cuda_missing_reason()
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
