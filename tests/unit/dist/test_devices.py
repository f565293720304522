"""Device facts, read from system files that the tests write themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from llmtrain.config.errors import ConfigError
from llmtrain.dist import devices


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_cpu_by_name_and_by_auto_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.detect_devices("cpu").reason == "launch.device=cpu"
    monkeypatch.setattr(devices, "cuda_missing_reason", lambda: "no CUDA here")
    facts = devices.detect_devices("auto")
    assert (facts.device, facts.reason, facts.num_devices) == ("cpu", "auto: no CUDA here", 1)
    assert facts.memory_bytes > 2**20 and facts.cores >= 1 and facts.name


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


def test_cores_under_version_one_quota(tmp_path: Path, many_cores: None) -> None:
    write(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/outside/this/container\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert devices.available_cores(tmp_path) == 4
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert devices.available_cores(tmp_path) == 16


def test_memory_is_what_host_and_container_leave(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 64000 kB\nMemAvailable:   32000 kB\n")
    assert devices.host_memory_bytes(tmp_path) == 32000 * 1024
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "max")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "5000")
    assert devices.host_memory_bytes(tmp_path) == 32000 * 1024
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "1000000")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "400000")
    write(tmp_path, "sys/fs/cgroup/job/memory.stat", "anon 100000\ninactive_file 300000\n")
    assert devices.host_memory_bytes(tmp_path) == 900000
    write(tmp_path, "sys/fs/cgroup/memory.max", "500000")
    write(tmp_path, "sys/fs/cgroup/memory.current", "450000")
    assert devices.host_memory_bytes(tmp_path) == 50000
