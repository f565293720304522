"""The records a plan is made of: what was asked (Config) and what is there (Machine) settle into what will run (Plan)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmtrain.config.typed import LossConfig, ModelConfig, RecomputeConfig, ScheduleKind
from llmtrain.plan.precision import PrecisionTable


@dataclass(frozen=True)
class Availability:
    """Whether an option can be used here, and if not, why."""

    available: bool
    reason: str = ""


@dataclass(frozen=True)
class HostLimit:
    """So many cores or bytes of a host, for all processes in the same part of it."""

    amount: int
    part: str
    """`cpus`, `cgroup` and its number, `host`, or `job`, what a sweep leaves to one of its jobs."""
    cpus: int = 0
    """Of the part `cpus`: bit i stands for core i of the host."""

    def is_shared_with(self, other: HostLimit) -> bool:
        """Whether a process of the same host with that limit takes from this one: sets of cores need only overlap."""
        return self.part == other.part and (self.cpus == other.cpus or self.cpus & other.cpus != 0)


@dataclass(frozen=True)
class Machine:
    """Facts about the devices at hand; filled in by the composition root, or from a cluster description."""

    device: str
    """`cpu`, `cuda` or `mps`."""
    device_reason: str
    """Why this device, e.g. `auto: no CUDA device`."""
    device_name: str
    num_devices: int
    memory_bytes: int
    """Memory of one device; for `cpu` a rank's share of what the host can still give."""
    cores: int
    """That this process may use, perhaps together with others."""
    world_size: int
    world_source: str
    """Where the world size comes from: `one process`, `launch.nproc`, `WORLD_SIZE`."""
    bf16_native: bool
    """Whether the device multiplies bf16 without emulation."""
    options: Mapping[str, Availability]
    """`group=option` or `key=value` → availability, e.g. `attention.backend=sdpa`."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on a CPU, or where it is not known."""
    packages: tuple[str, ...] | None = None
    """Optional packages for attention that are installed; None where it is not known."""
    local_world_size: int = 1
    """Ranks on this host."""
    num_nodes: int = 1
    """Hosts of the run."""
    device_index: int = 0
    """Number of this rank's device among those the process sees."""
    device_unit: str = ""
    """What no other device is called; empty where ranks may share it."""
    bf16: bool = True
    """Whether the device has bf16 tensors at all."""
    core_ranks: int = 1
    """Ranks of this run that share the cores."""
    host_jobs: int = 1
    """Jobs of a sweep that run here at the same time and share them too, each with as many ranks."""
    host: str = ""
    """The same for all processes of a host, and only for them."""
    core_limits: tuple[HostLimit, ...] = ()
    """What bounds the cores of this process; the ranks find out together which of it they share."""
    memory_limits: tuple[HostLimit, ...] = ()
    """What bounds its memory on the host."""

    @property
    def host_memory_bytes(self) -> int:
        """What this process could take of the host's memory if it were alone."""
        return min((limit.amount for limit in self.memory_limits), default=self.memory_bytes)


@dataclass(frozen=True)
class Degrees:
    """Ranks along each mesh axis; their product is the world size."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True)
class BatchPlan:
    """Batch arithmetic of one update."""

    global_batch_size: int
    """Sequences of an update over all ranks."""
    micro_batch_size: int
    """Sequences of one forward on one rank."""
    num_microbatches: int
    """Forwards of one update on one rank."""
    sequence_length: int

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of an update over all ranks."""
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True)
class SchedulePlan:
    """Numbers of the learning-rate schedule; `optim/schedule.py` has the closed forms."""

    kind: ScheduleKind
    peak_lr: float
    min_lr: float
    steps: int
    warmup_steps: int
    decay_steps: int
    """Length of the final decay; only read by wsd."""


@dataclass(frozen=True)
class MemoryForecast:
    """Expected bytes per rank at the highest instant of an update, by category (the categories of `metrics.jsonl`)."""

    params: int
    grads: int
    optimizer: int
    activations: int
    loss: int
    other: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer + self.activations + self.loss + self.other


@dataclass(frozen=True)
class Choice:
    """What `auto` became and why; the run card shows each."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Everything settled before a tensor is made."""

    device: str
    threads: int
    world_size: int
    degrees: Degrees
    batch: BatchPlan
    schedule: SchedulePlan
    precision_name: str
    precision: PrecisionTable
    model: ModelConfig
    """The shape to build; `vocab_size` is a number here."""
    tied: tuple[tuple[str, ...], ...]
    """Sets of parameter names that are one tensor; the first name of each is the one that is stored."""
    attention_backend: str
    attention_kernel: str
    """Kernel of the backend by name; `auto` = the backend's own choice, or it has only one."""
    loss: LossConfig
    recompute: RecomputeConfig
    num_parameters: int
    flops_per_token: float
    """Matmul FLOPs of forward and backward per token, causal attention counted at half."""
    flops_per_token_full_attention: float
    forecast: MemoryForecast
    choices: tuple[Choice, ...]
    attention_options: Any = None
    """Options of the backend when it is a plugin."""
    num_nodes: int = 1
    """Hosts of the run."""

    @property
    def steps(self) -> int:
        """Optimizer updates of the whole run."""
        return self.schedule.steps
