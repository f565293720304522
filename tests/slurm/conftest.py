"""A real Slurm for the tests marked `slurm`; skipped, with the reason, where none can be started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.slurm_cluster import SlurmCluster, missing_reason


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes of four processors each; stopped at the end with all it started."""
    reason = missing_reason()
    if reason:
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
