"""What holds for every test: the ranks that tests share, and those marked `gpu` are skipped, with the reason, without a CUDA device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Forks ranks on request, in a process that has torch imported; the only way a test gets several processes of a training."""
    if sys.platform != "linux":
        pytest.skip("the server of ranks keeps its processes together by means of Linux")
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short texts that the tests of a module train on."""
    from helpers.runs import write_text  # here: torch comes with it

    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent folder of the runs of a module."""
    return tmp_path_factory.mktemp("runs")


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
