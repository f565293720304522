"""Launches whose ranks are real processes and whose training is a stand-in that does what a test has planned for each rank."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.compose import Composed, compose_config
from llmtrain.dist.spawn import RanksEnd
from llmtrain.train.launch import launch_run

STAND_IN = '''
"""Takes the place of the training in every rank below: does what the plan of the test says, by rank."""
import json, os, pathlib, signal, sys
import llmtrain.cli.train as module
from llmtrain.config import errors
from llmtrain.dist.world import read_launch

folder = pathlib.Path(os.environ["STAND_IN"])

def keep(name, value):
    part = folder / f"{name}.part"
    part.write_text(json.dumps(value))
    part.rename(folder / name)

def leave_run(facts, run, **status):
    from llmtrain.train.run_folder import RunFolder
    run.mkdir(exist_ok=True)
    RunFolder(run).write_status(*(status[name] for name in ("code", "step", "reason")))
    (facts.report_folder / "run.json").write_text(json.dumps({"folder": str(run), "resume": "llmtrain run.name=again"}))

def carry_out(composed):
    facts = read_launch(os.environ, composed.config.launch.nproc)
    scope = {**globals(), **locals(), "code": 0}
    exec((folder / f"plan{facts.rank}.py").read_text(), scope)
    return scope["code"]

module.carry_out = carry_out
'''


FOLLOW = "import time; time.sleep(1.0); os._exit(71)"
"""A rank that ends a while after another one, as it does when it has noticed."""


class Launcher:
    """A folder of plans, and launches by them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *plans: str, words: Sequence[str] = (), **options: Any) -> RanksEnd:
        self.plan(*plans)
        return launch_run(self.composed(len(plans), *words), **options)

    def plan(self, *plans: str) -> None:
        for rank, plan in enumerate(plans):
            (self.folder / f"plan{rank}.py").write_text(plan)

    def composed(self, nproc: int, *words: str) -> Composed:
        return compose_config([f"launch.nproc={nproc}", *words])

    def kept(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@contextmanager
def stand_in_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """A launcher whose ranks follow plans; at the end none may be left, and no folder of reports."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os\nif 'LLMTRAIN_LAUNCHER' in os.environ: import stand_in\n")
    (site / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    yield Launcher(tmp_path)
    left = ranks_of(tmp_path)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "ranks that outlive their launcher"
    assert not list((tmp_path / "tmp").iterdir()), "a folder of reports that stays"


def ranks_of(folder: Path) -> list[int]:
    """Processes that were started with the plans of a folder."""
    mark, found = f"STAND_IN={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdecimal()
                and int(entry.name) != os.getpid()
                and mark in (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found


def wait_for(true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
