"""What the devices of this host are: kind, name, number, memory, and whether they multiply bf16 natively; and what bounds a process."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llmtrain.config.errors import ConfigError, PlanError, Problem
from llmtrain.dist.world import SLURM, LaunchFacts
from llmtrain.plan.plan import HostLimit

AMPERE = (8, 0)
"""First CUDA capability whose tensor cores multiply bf16."""
MPS_WITH_BF16 = (14, 0)
"""First macOS on which torch makes bf16 tensors on MPS."""
ONE_PROCESS = LaunchFacts(0, 0, 1, "one process")


@dataclass(frozen=True)
class DeviceFacts:
    """The device a rank uses."""

    device: str
    """`cpu`, `cuda` or `mps`."""
    reason: str
    name: str
    num_devices: int
    memory_bytes: int | None
    """Memory of one device; None for `cpu`, which has that of the host."""
    bf16_native: bool
    index: int = 0
    """Number of the device among those this process sees."""
    unit: str = ""
    """What no other device is called, on any host; empty where ranks may share it, as they do a CPU."""
    bf16: bool = True
    """Whether there are bf16 tensors at all."""


def detect_devices(wanted: str, place: LaunchFacts = ONE_PROCESS) -> DeviceFacts:
    """Choose the device for `launch.device` and describe it.

    Args:
        wanted: `auto`, `cpu`, `cuda` or `mps`. `auto` never takes mps, on which no test of this version ran.
        place: of this process; with several ranks on a host each has a CUDA device of its own.

    Raises:
        ConfigError: `cuda` or `mps` is asked for and there is none; the message has the reason.
        PlanError: more ranks than devices.
    """
    if wanted == "mps":
        return _mps(place)
    missing = cuda_missing_reason()
    if wanted == "cuda" and missing:
        raise ConfigError(
            Problem(
                "launch.device=cuda", missing, cure="launch.device=auto or launch.device=cpu, or a torch build for your GPU"
            )
        )
    if wanted == "cpu" or missing:
        untried = "" if mps_missing_reason() else "; MPS is there but untried: launch.device=mps"
        reason = "launch.device=cpu" if wanted == "cpu" else f"auto: {missing}{untried}"
        return DeviceFacts("cpu", reason, cpu_name(), 1, None, cpu_multiplies_bf16())
    return _cuda("launch.device=cuda" if wanted == "cuda" else "auto: first choice where present", place)


def _cuda(reason: str, place: LaunchFacts) -> DeviceFacts:
    num_devices = torch.cuda.device_count()
    index = _device_index(num_devices, place)
    properties = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        device="cuda",
        reason=reason,
        name=properties.name,
        num_devices=num_devices,
        memory_bytes=properties.total_memory,
        bf16_native=(properties.major, properties.minor) >= AMPERE,
        index=index,
        unit=str(getattr(properties, "uuid", "")),
    )


def _device_index(num_devices: int, place: LaunchFacts) -> int:
    """The device of this rank: that of its number on the host, or the only one that Slurm lets it see."""
    if num_devices == 1 and place.source == SLURM:
        return 0
    if place.local_world_size <= num_devices:
        return place.local_rank
    ranks, devices = f"{place.local_world_size} ranks on this host", f"{num_devices} CUDA device{'s'[: num_devices != 1]}"
    fewer = f"launch.nproc={num_devices}" if place.source == "launch.nproc" else f"{num_devices} processes on each host"
    raise PlanError(Problem(f"{ranks}, {devices}", "each rank has a device of its own", f"{fewer} or launch.device=cpu"))


def _mps(place: LaunchFacts) -> DeviceFacts:
    missing = mps_missing_reason()
    if missing:
        raise ConfigError(Problem("launch.device=mps", missing, cure="launch.device=auto or launch.device=cpu"))
    if place.world_size > 1:
        rule = "one rank only: there is one MPS device, and torch has no collective for it"
        fewer = "launch.nproc=1" if place.source == "launch.nproc" else "one process"
        raise PlanError(
            Problem(f"launch.device=mps with {place.world_size} ranks ({place.source})", rule, f"{fewer} or launch.device=cpu")
        )
    return DeviceFacts(
        device="mps",
        reason="launch.device=mps",
        name=torch.backends.mps.get_name() if hasattr(torch.backends.mps, "get_name") else "Apple GPU",
        num_devices=1,
        memory_bytes=torch.mps.recommended_max_memory(),
        # Whether a chip multiplies bf16 faster than fp32 is not told, so `precision=auto` stays with fp32.
        bf16_native=False,
        bf16=torch.backends.mps.is_macos_or_newer(*MPS_WITH_BF16),
    )


def cuda_missing_reason() -> str:
    """Why CUDA cannot be used here; empty when it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "no usable CUDA device (is a driver loaded, is a device visible?)"


def mps_missing_reason() -> str:
    """Why Apple's GPU cannot be used here; empty when it can."""
    if not torch.backends.mps.is_built():
        return f"torch {torch.__version__} is built without MPS, which is for macOS on Apple silicon"
    return "" if torch.backends.mps.is_available() else "no usable MPS device (torch needs macOS 14 on Apple silicon)"


def cuda_capability(device: str, index: int = 0) -> tuple[int, int] | None:
    """CUDA compute capability of a device; None on others, or where there is none to ask."""
    return torch.cuda.get_device_capability(index) if device == "cuda" and not cuda_missing_reason() else None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor, or `cpu` where the system does not tell."""
    return _cpuinfo_field("model name", cpuinfo) or "cpu"


def cpu_multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has bf16 matmul instructions (x86: AVX512-BF16 or AMX; Arm: BF16)."""
    flags = (_cpuinfo_field("flags", cpuinfo) or _cpuinfo_field("Features", cpuinfo)).split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _cpuinfo_field(name: str, cpuinfo: Path) -> str:
    """First value of a field; empty where there is no such file (other systems than Linux) or field."""
    if not cpuinfo.is_file():
        return ""
    for line in cpuinfo.read_text().splitlines():
        field, _, value = line.partition(":")
        if field.strip() == name:
            return value.strip()
    return ""


def available_cores(root: Path = Path("/")) -> int:
    """CPU cores this process may use: its affinity mask, cut to the container's quota."""
    return smallest(core_limits(root))


def smallest(limits: Sequence[HostLimit]) -> int:
    """What a process has that shares none of it."""
    return min(limit.amount for limit in limits)


def core_limits(root: Path = Path("/")) -> tuple[HostLimit, ...]:
    """The cores of the affinity mask, and the quotas of the control groups around this process, in whole cores."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    limits = [HostLimit(len(cpus), "cpus", sum(1 << cpu for cpu in cpus))]
    for folder in _cgroup_folders("cpu", root):
        quota = _cpu_quota(folder)
        if quota is not None:
            limits.append(HostLimit(max(1, int(quota)), _cgroup_name(folder)))
    return tuple(limits)


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time a control group may use; None = unlimited."""
    words = _read(folder / "cpu.max").split() or [_read(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    numbers = [int(word) for word in words if word.lstrip("-").isdecimal()]
    if len(numbers) < 2 or numbers[0] <= 0:
        return None
    return numbers[0] / numbers[1]


def memory_limits(of_job: int | None = None, root: Path = Path("/")) -> tuple[HostLimit, ...]:
    """Bytes that can still be taken: the host's, those below the limits of the control groups around this process, and `of_job`."""
    limits = [HostLimit(_host_available(root), "host")]
    for folder in _cgroup_folders("memory", root):
        left = _memory_left(folder)
        if left is not None:
            limits.append(HostLimit(left, _cgroup_name(folder)))
    return (*limits, HostLimit(of_job, "job")) if of_job is not None else tuple(limits)


def host_name(root: Path = Path("/")) -> str:
    """What only processes of this host call it: its boot, which containers have in common; the network's name on other systems."""
    return _read(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()


def _host_available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_left(folder: Path) -> int | None:
    """Bytes below a control group's limit, file cache that can be dropped counted as free; None = unlimited."""
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    if not limit.isdecimal() or not used.isdecimal():
        return None
    cache = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            cache = int(value)
    return max(0, int(limit) - max(0, int(used) - cache))


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """Folders of the control groups that bound this process, its own first, then each parent (versions 1 and 2).

    A container sees its own group as the root of the mount while /proc names the path outside, so folders that do not exist are
    left out and the mount's root is always looked at.
    """
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controller if controllers else root / "sys/fs/cgroup"
        own = base / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder.is_dir() and folder.is_relative_to(base)]
    return folders


def _cgroup_name(folder: Path) -> str:
    """The kernel's number of a control group; its path is another one in each container."""
    return f"cgroup {folder.stat().st_ino}"


def _read(file: Path) -> str:
    """Text of a small system file; empty where this system has none."""
    return file.read_text().strip() if file.is_file() else ""
