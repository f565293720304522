"""Who launched this process and which rank it is: the only reader of launch environment variables.

Three things can say how many processes a run has: torchrun's variables, a Slurm job step, and `launch.nproc`. They must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain.config.errors import ConfigError, PlanError, Problem

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# srun sets these in a job step only; the allocation's SLURM_NTASKS is also seen by a shell that starts no tasks.
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
_TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"


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
    """Number of the Slurm job around this process; a requeued job keeps it."""


def read_launch(environ: Mapping[str, str], nproc: int | None) -> LaunchFacts:
    """Settle rank and world size from the environment and `launch.nproc`.

    Args:
        environ: environment variables of this process.
        nproc: `launch.nproc`, None when nobody set it.

    Raises:
        PlanError: two sources name different world sizes.
        ConfigError: a source is incomplete or not a number, or asks for more than one process.
    """
    job_id = environ.get("SLURM_JOB_ID")
    found = _environment_sources(environ, job_id)
    if nproc is not None:
        found.append(LaunchFacts(0, 0, nproc, "launch.nproc", job_id))
    sizes = {facts.world_size for facts in found}
    if len(sizes) > 1:
        first, *others = found
        other = next(facts for facts in others if facts.world_size != first.world_size)
        raise PlanError(
            Problem(
                what=f"{first.source} says {first.world_size} processes, {other.source} says {other.world_size}",
                rule="everything that sets the number of processes must name the same number",
                cure=f"drop {other.source} or make it {first.world_size}",
            )
        )
    if not found:
        return LaunchFacts(0, 0, 1, "one process", job_id)
    facts = found[0]
    if facts.world_size > 1:
        raise ConfigError(
            Problem(
                what=f"{facts.source}={facts.world_size}",
                rule="more than one process is not available in this version",
                cure="start one process: plain `llmtrain` without launch.nproc, torchrun or srun -n",
            )
        )
    return facts


def _environment_sources(environ: Mapping[str, str], job_id: str | None) -> list[LaunchFacts]:
    """What torchrun and Slurm say, the innermost launcher first.

    torchrun under `srun` is one Slurm task per host that starts several ranks, so Slurm's numbers then count hosts and are dropped.
    A RANK without torchrun's mark was exported by somebody's script and has to agree with Slurm.
    """
    sources = []
    if "RANK" in environ or "WORLD_SIZE" in environ:
        sources.append(_read_source(environ, _RANK_VARIABLES, job_id))
    if "SLURM_STEP_NUM_TASKS" in environ and _TORCHRUN_MARK not in environ:
        sources.append(_read_source(environ, _SLURM_VARIABLES, job_id))
    return sources


def _read_source(environ: Mapping[str, str], names: tuple[str, str, str], job_id: str | None) -> LaunchFacts:
    numbers = []
    for name in names:
        text = environ.get(name)
        if text is None or not text.isdecimal():
            told = "unset" if text is None else f"{text!r}"
            raise ConfigError(
                Problem(
                    what=f"environment variable {name} is {told}",
                    rule=f"{', '.join(names)} are set together, each to a whole number",
                    cure=f"set {name}, or unset {' and '.join(n for n in names if n in environ)} to run one process",
                )
            )
        numbers.append(int(text))
    rank, local_rank, world_size = numbers
    if rank >= world_size or local_rank > rank:
        raise ConfigError(
            Problem(
                what=f"{names[0]}={rank}, {names[1]}={local_rank}, {names[2]}={world_size}",
                rule=f"{names[1]} <= {names[0]} < {names[2]}",
                cure=f"unset {' and '.join(names)} to run one process",
            )
        )
    return LaunchFacts(rank, local_rank, world_size, names[2], job_id)
