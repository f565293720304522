"""Who launched this process and which rank it is: the only reader of launch environment variables.

Three things can say how many processes a run has: the variables that torchrun and our own launcher set, a Slurm job step with
one task a rank, and `launch.nproc`. They must agree.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from llmtrain.config.errors import ConfigError, PlanError, Problem

NPROC = "launch.nproc"
"""The source of a run whose ranks our own launcher starts."""
TORCHRUN, SLURM = "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"
"""The sources of a run whose ranks torchrun (or a script that sets the same variables) starts, and srun."""
LOOPBACK = "127.0.0.1"

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MEETING_VARIABLES = ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# srun sets these in a job step only; the allocation's SLURM_NTASKS is also seen by a shell that starts no tasks.
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
_TASKS_OF_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"
_LAUNCHER_MARK = "LLMTRAIN_LAUNCHER"
_LAUNCHER_VARIABLES = ("LLMTRAIN_RUN_ID", "LLMTRAIN_REPORTS")
_HOST_JOBS, _HOST_MEMORY = "LLMTRAIN_HOST_JOBS", "LLMTRAIN_HOST_MEMORY"

_FIRST_PORT, _NUM_PORTS = 20000, 10000
_STEP_STRIDE = 1009
"""Keeps the ports of a job's steps away from those of the jobs numbered next to it."""
_SCONTROL_SECONDS = 20


@dataclass(frozen=True)
class LaunchFacts:
    """Place of this process among the processes of the run."""

    rank: int
    """0 … world_size - 1 over all hosts."""
    local_rank: int
    """Rank on this host; selects the device."""
    world_size: int
    source: str
    """What said so: `one process`, `launch.nproc`, `WORLD_SIZE`, `SLURM_STEP_NUM_TASKS`."""
    job_id: str | None = None
    """The Slurm job around this process: its number, or `<array>_<task>`. A requeued job keeps it."""
    local_world_size: int = 1
    """Ranks on this host."""
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = LOOPBACK
    """Where all ranks find the rendezvous store."""
    master_port: int = 0
    run_id: str = ""
    """The same for every rank and every attempt of one job."""
    attempt: int = 0
    """How often whoever started the ranks has started them before."""
    served: bool = False
    """Whether torchrun serves the store, so that rank 0 connects to it like the others."""
    listen_fd: int | None = None
    """Rank 0 under our launcher: descriptor of the socket that the launcher has bound for the store."""
    launcher_pid: int | None = None
    """Our launcher, whose death ends the ranks."""
    report_folder: Path | None = None
    """Where our launcher reads failures and positions of its ranks."""
    error_file: Path | None = None
    """Where torchrun reads why this rank failed."""
    host_jobs: int = 1
    """Jobs of a sweep that run on this host at the same time, this one included."""
    host_memory: int | None = None
    """Bytes of the host's memory that the sweep leaves to this job; None = all there are."""

    @property
    def starts_ranks(self) -> bool:
        """Whether this process is none of the ranks and has to start them."""
        return self.source == NPROC and self.world_size > 1 and self.launcher_pid is None

    @property
    def is_of_torchrun(self) -> bool:
        """Whether torchrun's agent is the parent of this process, and its end that of the run."""
        return self.source == TORCHRUN and self.launcher_pid is None and bool(self.run_id)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes the run folder and talks to the user."""
        return self.rank == 0


def read_launch(environ: Mapping[str, str], nproc: int | None) -> LaunchFacts:
    """Settle this process's place in the run from the environment and `launch.nproc`.

    Args:
        environ: environment variables of this process.
        nproc: `launch.nproc`, None when nobody set it.

    Raises:
        PlanError: two sources name different world sizes.
        ConfigError: a source is incomplete, contradicts itself or is not a number.
    """
    found = _environment_sources(environ)
    if nproc is not None:
        # A step of one task, as `srun --pty bash` is, gives a process its place and says nothing of the ranks it may start.
        found = [facts for facts in found if facts.source != SLURM or facts.world_size > 1]
        found.append(LaunchFacts(0, 0, nproc, NPROC, local_world_size=nproc))
    _refuse_disagreement(found)
    facts = found[0] if found else LaunchFacts(0, 0, 1, "one process")
    return replace(
        facts,
        job_id=_job_id(environ),
        attempt=_attempt(environ),
        host_jobs=max(1, _number(environ, _HOST_JOBS, (), default=1)),
        host_memory=_number(environ, _HOST_MEMORY, ()) if _HOST_MEMORY in environ else None,
    )


def job_environment(host_jobs: int, memory_bytes: int) -> dict[str, str]:
    """What a sweep sets for a job that shares the host.

    The memory is a number, and not for each job to measure: what is free depends on which other jobs have started.

    Args:
        host_jobs: jobs at the same time.
        memory_bytes: what all of them together may take.
    """
    return {_HOST_JOBS: str(host_jobs), _HOST_MEMORY: str(memory_bytes // host_jobs)}


def is_first_of_host(environ: Mapping[str, str]) -> bool:
    """Whether this process is the first rank on its host, or the only process, as far as the environment says it without a check."""
    return environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID", "0")) in ("", "0")


def rank_environment(place: LaunchFacts) -> dict[str, str]:
    """What our launcher sets for the rank at `place`, on top of its own environment; `read_launch` of both gives `place` back.

    A Slurm job around the launcher says job_id and attempt of its ranks too, and a sweep what part of the host is theirs.
    """
    assert place.launcher_pid is not None and place.report_folder is not None, "a rank of our launcher knows its launcher"
    values = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "LLMTRAIN_RUN_ID": place.run_id,
        "LLMTRAIN_REPORTS": str(place.report_folder),
        _LAUNCHER_MARK: str(place.launcher_pid),
    }
    return values if place.listen_fd is None else values | {"LLMTRAIN_LISTEN_FD": str(place.listen_fd)}


def _refuse_disagreement(found: list[LaunchFacts]) -> None:
    for other in found[1:]:
        first = found[0]
        if other.world_size != first.world_size:
            raise PlanError(
                Problem(
                    what=f"{first.source} says {first.world_size} processes, {other.source} says {other.world_size}",
                    rule="everything that sets the number of processes must name the same number",
                    cure=f"drop {other.source} or make it {first.world_size}",
                )
            )


def _environment_sources(environ: Mapping[str, str]) -> list[LaunchFacts]:
    """What torchrun, our launcher and Slurm say, the innermost first.

    torchrun under `srun` is one Slurm task per host that starts several ranks, and our launcher starts several within one task:
    Slurm's numbers then do not count ranks and are dropped. A RANK without either mark was exported by somebody's script and
    has to agree with Slurm.
    """
    sources = []
    if "RANK" in environ or "WORLD_SIZE" in environ:
        sources.append(_read_ranks(environ))
    if "SLURM_STEP_NUM_TASKS" in environ and _TORCHRUN_MARK not in environ and _LAUNCHER_MARK not in environ:
        sources.append(_read_slurm(environ))
    return sources


def _read_ranks(environ: Mapping[str, str]) -> LaunchFacts:
    """The variables that torchrun made customary, with its own and our launcher's additions."""
    rank, local_rank, world_size = _place(environ, _RANK_VARIABLES)
    facts = LaunchFacts(rank, local_rank, world_size, TORCHRUN)
    if world_size > 1:
        names = _RANK_VARIABLES + _MEETING_VARIABLES
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE", names)
        if not local_rank < local_world_size <= world_size:
            raise _contradiction(environ, ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"), "{0} < {1} <= {2}")
        facts = replace(
            facts,
            local_world_size=local_world_size,
            node_rank=_number(environ, "GROUP_RANK", (), default=rank // local_world_size),
            num_nodes=_number(environ, "GROUP_WORLD_SIZE", (), default=-(-world_size // local_world_size)),
            master_addr=_text(environ, "MASTER_ADDR", names),
            master_port=_port(environ, names),
            run_id=environ.get(_TORCHRUN_MARK, ""),
            served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    facts = replace(facts, error_file=Path(error_file) if error_file else None)
    return _with_launcher(facts, environ) if _LAUNCHER_MARK in environ else facts


def _with_launcher(facts: LaunchFacts, environ: Mapping[str, str]) -> LaunchFacts:
    names = (_LAUNCHER_MARK, *_LAUNCHER_VARIABLES)
    run_id, reports = (_text(environ, name, names) for name in _LAUNCHER_VARIABLES)
    return replace(
        facts,
        source=NPROC,
        run_id=run_id,
        report_folder=Path(reports),
        launcher_pid=_number(environ, _LAUNCHER_MARK, names),
        listen_fd=_number(environ, "LLMTRAIN_LISTEN_FD", names) if "LLMTRAIN_LISTEN_FD" in environ else None,
    )


def _read_slurm(environ: Mapping[str, str]) -> LaunchFacts:
    """A job step with one task a rank (srun(1), output environment variables)."""
    rank, local_rank, world_size = _place(environ, _SLURM_VARIABLES)
    facts = LaunchFacts(rank, local_rank, world_size, SLURM)
    if world_size == 1:
        return facts
    told = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    job, step, node_rank, num_nodes = (_number(environ, name, _SLURM_VARIABLES + told) for name in told)
    tasks = _tasks_by_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE", _SLURM_VARIABLES))
    if len(tasks) != num_nodes or sum(tasks) != world_size or node_rank >= num_nodes or local_rank >= tasks[node_rank]:
        names = (*_SLURM_VARIABLES, "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE")
        raise _contradiction(
            environ, names, "{5} names the tasks of {4} nodes, {2} in all, and this task is among those of node {3}"
        )
    port = _port(environ, ()) if "MASTER_PORT" in environ else _FIRST_PORT + (job + _STEP_STRIDE * step) % _NUM_PORTS
    return replace(
        facts,
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=environ.get("MASTER_ADDR") or _first_node_address(environ, num_nodes),
        master_port=port,
        run_id=f"{job}.{step}",
    )


def _tasks_by_node(text: str) -> list[int]:
    """Tasks of each node from Slurm's short form: `2(x2),1` is [2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS_OF_NODE.fullmatch(part)
        if match is None:
            rule = "numbers of tasks by node, such as 2(x3),1"
            raise ConfigError(Problem(f"environment variable SLURM_STEP_TASKS_PER_NODE is {text!r}", rule))
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _first_node_address(environ: Mapping[str, str], num_nodes: int) -> str:
    """Where rank 0 is reached: it runs on the first node of the step."""
    if num_nodes == 1:
        return LOOPBACK
    name = first_node(_text(environ, "SLURM_STEP_NODELIST", _SLURM_VARIABLES))
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    return name if scontrol is None else _node_address(scontrol, name)


def first_node(node_list: str) -> str:
    """First name of Slurm's short form of a list of nodes: `n[03-05,9],m1` begins with `n03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first is not None, "the pattern also matches nothing"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


@lru_cache(maxsize=1)
def _node_address(scontrol: str, name: str) -> str:
    """Slurm's address of a node, whose name need not be known to DNS; the name itself where Slurm does not answer."""
    command = (scontrol, "show", "node", name, "-o")
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SCONTROL_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return name
    found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return found[1] if found else name


def _job_id(environ: Mapping[str, str]) -> str | None:
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    # A task's SLURM_JOB_ID would do as well, but nobody sees it: squeue and scancel speak of `<array>_<task>`.
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


def _attempt(environ: Mapping[str, str]) -> int:
    name = "TORCHELASTIC_RESTART_COUNT" if _TORCHRUN_MARK in environ else "SLURM_RESTART_COUNT"
    return _number(environ, name, (), default=0)


def _place(environ: Mapping[str, str], names: tuple[str, str, str]) -> tuple[int, int, int]:
    """Rank, rank on this host and number of ranks."""
    rank, local_rank, world_size = (_number(environ, name, names) for name in names)
    if rank >= world_size or local_rank > rank:
        raise _contradiction(environ, names, "{1} <= {0} < {2}")
    return rank, local_rank, world_size


def _number(environ: Mapping[str, str], name: str, group: tuple[str, ...], *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    # int() would also take other scripts' digits.
    if text is None or not (text.isascii() and text.isdecimal()):
        raise _incomplete(environ, name, group or (name,), "each to a whole number" if group else "a whole number")
    return int(text)


def _port(environ: Mapping[str, str], group: tuple[str, ...]) -> int:
    port = _number(environ, "MASTER_PORT", group)
    if not 0 < port < 2**16:
        raise ConfigError(Problem(f"MASTER_PORT={port}", "a port is in 1 … 65535", "MASTER_PORT=29500"))
    return port


def _text(environ: Mapping[str, str], name: str, group: tuple[str, ...]) -> str:
    text = environ.get(name)
    if not text:
        raise _incomplete(environ, name, (*group, name) if name not in group else group, "none of them empty")
    return text


def _incomplete(environ: Mapping[str, str], name: str, group: tuple[str, ...], how: str) -> ConfigError:
    told = f"{environ[name]!r}" if name in environ else "unset"
    present = [other for other in group if other in environ]
    rule = f"{', '.join(group)} are set together, {how}" if len(group) > 1 else f"{name} is {how}"
    cure = f"set {name}, or unset {' and '.join(present)} to run one process" if len(group) > 1 else f"unset {name}"
    return ConfigError(Problem(f"environment variable {name} is {told}", rule, cure))


def _contradiction(environ: Mapping[str, str], names: tuple[str, ...], rule: str) -> ConfigError:
    what = ", ".join(f"{name}={environ[name]}" for name in names)
    return ConfigError(Problem(what, rule.format(*names), f"unset {' and '.join(names)} to run one process"))
