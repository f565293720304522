"""What each of several jobs that run at the same time gets of the machine: its part of cores and memory, CUDA devices of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llmtrain.cli.sweep_layout import Sweep, own_command
from llmtrain.config.errors import PlanError, Problem
from llmtrain.config.typed import LaunchConfig
from llmtrain.dist.world import job_environment
from llmtrain.plan.make_plan import too_many_threads

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Sharing(Protocol):
    """How the machine is shared."""

    def environment(self, index: int, slot: int) -> Mapping[str, str]:
        """What tells the job of this index its share while it has this slot (from 0) of those of the sweep."""


class WholeMachine:
    """One job after another, each with everything there is."""

    def environment(self, index: int, slot: int) -> Mapping[str, str]:
        return {}


@dataclass(frozen=True)
class Host:
    """What there is to share."""

    cores: int
    memory_bytes: int
    """What is free before the first job starts."""
    devices: tuple[str, ...]
    """The CUDA devices jobs may use, as `CUDA_VISIBLE_DEVICES` names them; empty where there are none."""


class SharedMachine:
    """Several jobs at the same time.

    Args:
        launches: `launch` of each job; None where it does not compose, and so only tells why.
        num_slots: jobs at the same time.
        host: the machine.

    Raises:
        PlanError: more ranks at the same time than CUDA devices, or a job chooses its devices itself, or every job wants more threads
            than there are cores for it.
    """

    def __init__(self, launches: Sequence[LaunchConfig | None], num_slots: int, host: Host) -> None:
        self._launches, self._num_slots, self._host = launches, num_slots, host
        self._width = max((num_ranks(launch) for launch in launches if launch and self._on_devices(launch)), default=0)
        """Devices of a slot: every job fits into every slot."""
        _check_devices(self._width, num_slots, len(host.devices))
        for launch in launches:
            if launch and self._on_devices(launch) and VISIBLE in launch.env:
                what = f"launch.env.{VISIBLE}={launch.env[VISIBLE]}"
                rule = "jobs that run at the same time are given devices of their own"
                raise PlanError(Problem(what, rule, f"sweep.jobs=1, or export {VISIBLE} before the command for all jobs"))
        _check_threads(launches, num_slots, host.cores)

    def environment(self, index: int, slot: int) -> Mapping[str, str]:
        launch = self._launches[index]
        environment = job_environment(self._num_slots, self._host.memory_bytes)
        if launch is None or not self._on_devices(launch):
            return environment
        first = slot * self._width
        return environment | {VISIBLE: ",".join(self._host.devices[first : first + num_ranks(launch)])}

    def _on_devices(self, launch: LaunchConfig) -> bool:
        return bool(self._host.devices) and launch.device in ("auto", "cuda")


def num_ranks(launch: LaunchConfig) -> int:
    """Ranks that a job starts."""
    return launch.nproc or 1


def _check_devices(width: int, num_slots: int, num_devices: int) -> None:
    if width * num_slots <= num_devices or width == 0:
        return
    fitting = num_devices // width
    each = f" of {width} ranks" if width > 1 else ""
    rule = f"{num_slots} jobs{each} need {width * num_slots} CUDA devices, and there are {num_devices}: each rank has its own"
    cure = f"sweep.jobs={fitting}" if fitting else f"sweep.jobs=1 launch.nproc={num_devices}"
    raise PlanError(Problem(f"sweep.jobs={num_slots}", rule, f"{cure}, or launch.device=cpu"))


def _check_threads(launches: Sequence[LaunchConfig | None], num_slots: int, cores: int) -> None:
    """Refuse what every job would; where it is only some, those are refused by themselves, and the others run."""
    known = [launch for launch in launches if launch is not None]
    asked = [(launch.threads, num_ranks(launch)) for launch in known if launch.threads is not None]
    found = [too_many_threads(threads, cores, ranks, num_slots) for threads, ranks in asked]
    refused = [problem for problem in found if problem is not None]
    if refused and len(refused) == len(known):
        raise PlanError(replace(refused[0], cure=f"{refused[0].cure}, or a smaller sweep.jobs"))


def share_machine(sweep: Sweep) -> Sharing:
    """How the jobs of this sweep share this machine.

    Raises:
        PlanError: see `SharedMachine`.
    """
    if sweep.num_slots == 1:
        return WholeMachine()
    composed = (sweep.compose(index) for index in range(len(sweep.jobs)))
    launches = [None if one is None else one.config.launch for one in composed]
    return SharedMachine(launches, sweep.num_slots, ask_host(os.environ))


def ask_host(environ: Mapping[str, str]) -> Host:
    """Count cores, free memory and CUDA devices in a process of its own: only torch can count devices, and a sweep does without it.

    Raises:
        PlanError: that process failed.
    """
    command = own_command("doctor", "output=json")
    done = subprocess.run(command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise PlanError(Problem("cores and devices cannot be counted", told, "llmtrain doctor tells more; sweep.jobs=1"))
    machine = json.loads(done.stdout)["machine"]
    num_devices = machine["num_devices"] if machine["device"] == "cuda" else 0
    return Host(machine["cores"], machine["host_memory_bytes"], visible_devices(environ, num_devices))


def visible_devices(environ: Mapping[str, str], num_devices: int) -> tuple[str, ...]:
    """Names of the devices that CUDA sees: those of `CUDA_VISIBLE_DEVICES` where it is set (numbers or UUIDs), else their numbers.

    CUDA reads that list up to the first name it does not know, so the devices it counts are the first ones of the list.
    """
    listed = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    return tuple(listed[:num_devices]) or tuple(map(str, range(num_devices)))
