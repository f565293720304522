"""Device facts, read from system files that the tests write themselves."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmtrain.config.errors import ConfigError, ExitCode, PlanError
from llmtrain.dist import devices
from llmtrain.dist.runtime import configure_process
from llmtrain.dist.world import LaunchFacts
from llmtrain.plan.plan import HostLimit


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_cpu_by_name_and_by_auto_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.detect_devices("cpu").reason == "launch.device=cpu"
    monkeypatch.setattr(devices, "cuda_missing_reason", lambda: "no CUDA here")
    facts = devices.detect_devices("auto")
    assert (facts.device, facts.reason, facts.num_devices) == ("cpu", "auto: no CUDA here", 1)
    assert facts.memory_bytes is None and facts.name, "a cpu has the memory of the host"


def test_cuda_that_is_not_there_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_missing_reason", lambda: "no CUDA here")
    with pytest.raises(ConfigError, match="launch.device=cuda\n  rule  no CUDA here"):
        devices.detect_devices("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_the_reason_says_whether_torch_or_the_device_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built without CUDA" in devices.cuda_missing_reason()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no usable CUDA device" in devices.cuda_missing_reason()


def on_host(local_rank: int, ranks: int, source: str = "launch.nproc", nodes: int = 1) -> LaunchFacts:
    """A rank among `ranks` on the last of some hosts."""
    rank = local_rank + (nodes - 1) * ranks
    return LaunchFacts(rank, local_rank, ranks * nodes, source, local_world_size=ranks, num_nodes=nodes)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices that differ in everything; nothing is ever computed on them."""
    properties = [
        SimpleNamespace(name="First GPU", total_memory=10 * 2**30, major=7, minor=5, uuid="unit-0"),
        SimpleNamespace(name="Second GPU", total_memory=20 * 2**30, major=9, minor=0, uuid="unit-1"),
    ]
    monkeypatch.setattr(devices, "cuda_missing_reason", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (properties[index].major, properties[index].minor))


def test_each_rank_of_a_host_has_a_device_of_its_own(two_gpus: None) -> None:
    first, second = (devices.detect_devices("auto", on_host(rank, 2, nodes=4)) for rank in (0, 1))
    assert (first.index, first.name, first.memory_bytes, first.bf16_native, first.unit) == (
        0,
        "First GPU",
        10 * 2**30,
        False,
        "unit-0",
    )
    assert (second.index, second.name, second.memory_bytes, second.bf16_native, second.unit) == (
        1,
        "Second GPU",
        20 * 2**30,
        True,
        "unit-1",
    )
    assert (devices.cuda_capability("cuda", 0), devices.cuda_capability("cuda", 1)) == ((7, 5), (9, 0))
    assert devices.cuda_capability("cpu") is None


@pytest.mark.parametrize(
    ("wanted", "source", "cure"),
    [
        ("auto", "launch.nproc", "launch.nproc=2 or launch.device=cpu"),
        ("cuda", "WORLD_SIZE", "2 processes on each host or launch.device=cpu"),
        ("cuda", "SLURM_STEP_NUM_TASKS", "2 processes on each host or launch.device=cpu"),
    ],
)
def test_more_ranks_than_devices_are_refused_by_every_one(two_gpus: None, wanted: str, source: str, cure: str) -> None:
    for rank in range(3):
        with pytest.raises(PlanError) as caught:
            devices.detect_devices(wanted, on_host(rank, 3, source))
        (problem,) = caught.value.problems
        assert (problem.what, problem.cure) == ("3 ranks on this host, 2 CUDA devices", cure)
    assert devices.detect_devices("cpu", on_host(2, 3, source)).device == "cpu"


def test_a_rank_that_slurm_shows_one_device_uses_it(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `srun --gpus-per-task=1` does; whether it is the same one for two ranks is found when they meet."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices.detect_devices("auto", on_host(3, 4, "SLURM_STEP_NUM_TASKS")).index == 0
    with pytest.raises(PlanError, match="4 ranks on this host, 1 CUDA device\n"):
        devices.detect_devices("auto", on_host(3, 4, "WORLD_SIZE"))


def test_ranks_may_share_a_cpu() -> None:
    three = devices.detect_devices("cpu", on_host(1, 3, nodes=2))
    assert (three.index, three.unit, three.bf16) == (0, "", True)


class AppleGpu(SimpleNamespace):
    """Stands for torch.backends.mps on a Mac."""

    def __init__(self, macos: tuple[int, int], built: bool = True, there: bool = True) -> None:
        super().__init__(
            is_built=lambda: built,
            is_available=lambda: there,
            is_macos_or_newer=lambda major, minor: macos >= (major, minor),
            get_name=lambda: "Apple M9",
        )


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.backends, "mps", AppleGpu((14, 1)))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 2**30)
    monkeypatch.setattr(devices, "cuda_missing_reason", lambda: "no CUDA here")
    return monkeypatch


def test_mps_is_used_by_name_only(mac: pytest.MonkeyPatch) -> None:
    facts = devices.detect_devices("mps")
    assert (facts.device, facts.reason, facts.name, facts.num_devices) == ("mps", "launch.device=mps", "Apple M9", 1)
    assert (facts.memory_bytes, facts.bf16_native, facts.bf16) == (12 * 2**30, False, True)
    auto = devices.detect_devices("auto")
    assert auto.device == "cpu" and auto.reason == "auto: no CUDA here; MPS is there but untried: launch.device=mps"
    assert devices.detect_devices("cpu").reason == "launch.device=cpu"
    mac.setattr(torch.backends, "mps", AppleGpu((13, 3)))
    assert devices.detect_devices("mps").bf16 is False


@pytest.mark.parametrize(
    ("apple", "reason"), [(AppleGpu((14, 0), built=False), "built without MPS"), (AppleGpu((14, 0), there=False), "macOS 14")]
)
def test_mps_that_is_not_there_is_refused_with_the_reason(mac: pytest.MonkeyPatch, apple: AppleGpu, reason: str) -> None:
    mac.setattr(torch.backends, "mps", apple)
    assert devices.detect_devices("auto").reason == "auto: no CUDA here"
    with pytest.raises(ConfigError, match="error: launch.device=mps\n") as caught:
        devices.detect_devices("mps")
    (problem,) = caught.value.problems
    assert reason in problem.rule and problem.cure == "launch.device=auto or launch.device=cpu"


@pytest.mark.skipif(torch.backends.mps.is_built(), reason="torch has MPS")
def test_this_torch_has_no_mps() -> None:
    assert devices.mps_missing_reason().startswith(f"torch {torch.__version__} is built without MPS")


def test_mps_takes_no_second_rank(mac: pytest.MonkeyPatch) -> None:
    for source, cure in (
        ("launch.nproc", "launch.nproc=1 or launch.device=cpu"),
        ("WORLD_SIZE", "one process or launch.device=cpu"),
    ):
        with pytest.raises(PlanError) as caught:
            devices.detect_devices("mps", on_host(1, 2, source))
        (problem,) = caught.value.problems
        assert problem.what == f"launch.device=mps with 2 ranks ({source})" and problem.cure == cure
        assert "no collective" in problem.rule and caught.value.exit_code == ExitCode.CONFIG


def test_the_process_is_set_up_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    before = torch.get_num_threads()
    for device, index in (("cpu", 0), ("cuda", 3), ("mps", 0)):
        configure_process(threads=1, deterministic=False, device=device, device_index=index)
    assert chosen == [3] and torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.mark.gpu
def test_cuda_facts() -> None:
    facts = devices.detect_devices("auto")
    assert facts.device == "cuda" and facts.memory_bytes > 2**30 and facts.num_devices == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("flags : avx2 avx512f", False),
        ("flags : avx512f avx512_bf16", True),
        ("flags: amx_bf16", True),
        ("Features : asimd bf16", True),
    ],
)
def test_bf16_is_native_by_processor_flags(tmp_path: Path, flags: str, native: bool) -> None:
    write(tmp_path, "cpuinfo", f"processor : 0\nmodel name : A CPU\n{flags}\n")
    assert devices.cpu_multiplies_bf16(tmp_path / "cpuinfo") is native
    assert devices.cpu_name(tmp_path / "cpuinfo") == "A CPU"


def test_other_systems_have_no_cpuinfo(tmp_path: Path) -> None:
    assert devices.cpu_multiplies_bf16(tmp_path / "none") is False
    assert devices.cpu_name(tmp_path / "none") == "cpu"


def name(root: Path, file: str) -> str:
    """Of the control group that a file belongs to."""
    return f"cgroup {os.stat((root / file).parent).st_ino}"


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("file", "text", "cores"),
    [
        ("sys/fs/cgroup/job/cpu.max", "max 100000", 16),
        ("sys/fs/cgroup/job/cpu.max", "350000 100000", 3),
        ("sys/fs/cgroup/job/cpu.max", "50000 100000", 1),
        ("sys/fs/cgroup/cpu.max", "200000 100000", 2),
    ],
)
def test_cores_are_cut_to_the_quota(tmp_path: Path, many_cores: None, file: str, text: str, cores: int) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, "sys/fs/cgroup/job/cgroup.procs", "")
    write(tmp_path, file, text)
    assert devices.available_cores(tmp_path) == cores
    affinity, *quotas = devices.core_limits(tmp_path)
    assert affinity == HostLimit(16, "cpus", 0xFFFF)
    assert quotas == ([HostLimit(cores, name(tmp_path, file))] if cores < 16 else [])


def test_cores_under_version_one_quota(tmp_path: Path, many_cores: None) -> None:
    write(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/outside/this/container\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert devices.available_cores(tmp_path) == 4
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert devices.available_cores(tmp_path) == 16


def test_memory_is_what_host_and_container_leave(tmp_path: Path) -> None:
    host = HostLimit(32000 * 1024, "host")
    write(tmp_path, "proc/meminfo", "MemTotal: 64000 kB\nMemAvailable:   32000 kB\n")
    assert devices.memory_limits(root=tmp_path) == (host,)
    assert devices.memory_limits(7000, tmp_path) == (host, HostLimit(7000, "job"))
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "max")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "5000")
    assert devices.memory_limits(root=tmp_path) == (host,)
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "1000000")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "400000")
    write(tmp_path, "sys/fs/cgroup/job/memory.stat", "anon 100000\ninactive_file 300000\n")
    own = HostLimit(900000, name(tmp_path, "sys/fs/cgroup/job/memory.max"))
    assert devices.memory_limits(root=tmp_path) == (host, own)
    write(tmp_path, "sys/fs/cgroup/memory.max", "500000")
    write(tmp_path, "sys/fs/cgroup/memory.current", "450000")
    parent = HostLimit(50000, name(tmp_path, "sys/fs/cgroup/memory.max"))
    assert devices.memory_limits(root=tmp_path) == (host, own, parent)
    assert devices.smallest((host, own, parent)) == 50000


def test_a_control_group_has_one_name_whatever_its_path(tmp_path: Path, many_cores: None) -> None:
    """A container sees its own group as the root of the mount, the host sees it below."""
    write(tmp_path, "host/proc/self/cgroup", "0::/pod/task\n")
    write(tmp_path, "host/sys/fs/cgroup/pod/task/cpu.max", "400000 100000")
    write(tmp_path, "container/proc/self/cgroup", "0::/\n")
    (tmp_path / "container/sys/fs").mkdir(parents=True)
    (tmp_path / "container/sys/fs/cgroup").symlink_to(tmp_path / "host/sys/fs/cgroup/pod/task")
    inside, outside = (devices.core_limits(tmp_path / side) for side in ("container", "host"))
    assert inside == outside and inside[1].amount == 4


def test_a_host_goes_by_its_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.socket, "gethostname", lambda: "node7")
    assert devices.host_name(tmp_path) == "node7"
    write(tmp_path, "proc/sys/kernel/random/boot_id", "80375ef1-da88\n")
    assert devices.host_name(tmp_path) == "80375ef1-da88"
