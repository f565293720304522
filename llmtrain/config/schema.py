"""The wire form of a run: plain dataclasses that the YAML groups and the command line are merged into.

Every key has one line of documentation, and where it applies a unit, a range, the legal words and the kinds of its section that
read it. `config/typed.py` is the frozen form the rest of the program sees; this file is what `--help`, completion, error messages
and `tests/config/test_every_key.py` walk.

`None` means "not given"; a key whose section has several kinds and that belongs to only some of them is `None` by default, and the
typed form fills in the default of the kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Union

from llmtrain.config.declare import AUTO, MAX_BATCH_TOKENS, MAX_RANKS, MAX_ROWS, MAX_SEQUENCES, MAX_TOKENS, MAX_UPDATES, key
from llmtrain.config.schema_data import Data, Prepare, Tokenizer
from llmtrain.config.schema_model import Model


@dataclass
class Run:
    name: Optional[str] = key(None, "name of the run folder; only an explicit name resumes")
    dir: str = key("runs", "parent folder of all runs")
    seed: int = key(0, "seed of weights, data order and dropout", ge=0, lt=2**32)
    on_change: str = key("refuse", "what to do when a resumed run's config differs", choices=("refuse", "continue"))


@dataclass
class Train:
    steps: Optional[int] = key(None, "optimizer updates to make (default 1000)", unit="updates", ge=1, le=MAX_UPDATES)
    tokens: Optional[int] = key(
        None, "tokens to train on, instead of steps; rounded up to whole updates", unit="tokens", ge=1, le=MAX_TOKENS
    )
    stop_after: Optional[int] = key(
        None, "save and stop after this update; the schedule stays that of steps", unit="updates", ge=1, le=MAX_UPDATES
    )
    eval_every: int = key(100, "updates between evaluations; 0 = never", unit="updates", ge=0, le=MAX_UPDATES)
    eval_tokens: Optional[int] = key(
        16384, "validation tokens scored at each evaluation; null = all", unit="tokens", ge=1, le=MAX_TOKENS
    )
    log_every: int = key(10, "updates between console lines", unit="updates", ge=1, le=MAX_UPDATES)
    deterministic: bool = key(False, "refuse every operation that is not reproducible")
    gc_every: int = key(
        0,
        "collect Python garbage every n updates and at no other time; 0 = Python decides",
        unit="updates",
        ge=0,
        le=MAX_UPDATES,
    )
    max_consecutive_skips: int = key(
        10, "updates in a row that may be skipped for non-finite gradients", unit="updates", ge=0, le=MAX_UPDATES
    )


@dataclass
class Precision:
    kind: str = key(
        AUTO,
        "dtypes of a run; auto = bf16 where the device multiplies it natively, else fp32",
        choices=(AUTO, "fp32", "bf16"),
        later=("tf32", "fp16", "bf16_weights", "fp8"),
    )


@dataclass
class Recompute:
    kind: str = key(
        "none",
        "which activations are recomputed in backward",
        choices=("none", "full", "selective"),
        later=("every_n", "offload", "budget", "auto"),
    )
    keep: Optional[List[str]] = key(
        None,
        "families of operations whose results are kept (default attention, matmul)",
        choices=("attention", "matmul", "norm", "activation"),
        kinds=("selective",),
    )


@dataclass
class Accumulation:
    global_batch_size: Optional[int] = key(
        None, "sequences of one update over all ranks (default 16)", unit="sequences", ge=1, le=MAX_SEQUENCES
    )
    global_batch_tokens: Optional[int] = key(
        None, "tokens of one update, instead of global_batch_size", unit="tokens", ge=1, le=MAX_BATCH_TOKENS
    )
    micro_batch_size: Union[int, str] = key(
        AUTO, "sequences of one forward on one rank; auto = what fits", unit="sequences", ge=1, le=MAX_SEQUENCES
    )


@dataclass
class Attention:
    backend: str = key(AUTO, "who computes attention", choices=(AUTO, "reference", "sdpa", "blocked", "flash_attn", "flex"))
    kernel: str = key(
        AUTO,
        "kernel of sdpa (flash, memory_efficient, cudnn, math) or flash_attn (fa2, fa3, fa4); auto = the library's own choice, "
        "or the newest installed",
        choices=(AUTO, "flash", "memory_efficient", "cudnn", "math", "fa2", "fa3", "fa4"),
    )


@dataclass
class Loss:
    kind: str = key(
        "reference", "whole logits, or head and loss by chunks of tokens", choices=("reference", "chunked"), later=("liger",)
    )
    chunk_size: Optional[int] = key(
        None, "tokens whose logits exist at once (default 1024)", unit="tokens", ge=1, le=MAX_BATCH_TOKENS, kinds=("chunked",)
    )


@dataclass
class Compile:
    kind: str = key("none", "what torch.compile gets", choices=("none",), later=("blocks",))


@dataclass
class Optimizer:
    kind: str = key(
        "adamw", "update rule", choices=("adamw",), later=("adamw_8bit", "adamw_8bit_paged", "lion", "adafactor", "muon", "sgd")
    )
    lr: float = key(1e-3, "peak learning rate", gt=0)
    weight_decay: float = key(0.1, "decoupled decay of matrices (two or more dimensions), per unit of lr", ge=0)
    clip_norm: Optional[float] = key(1.0, "largest global gradient norm; null = no clipping", gt=0)
    beta1: float = key(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = key(0.95, "decay of the second moment", ge=0, lt=1)
    eps: float = key(1e-8, "added to the root of the second moment", gt=0)


@dataclass
class Schedule:
    kind: str = key("cosine", "shape of the learning rate after warm-up", choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: Union[int, str] = key(
        AUTO, "updates of linear warm-up; auto = min(100, steps / 10)", unit="updates", ge=0, le=MAX_UPDATES
    )
    min_lr_ratio: Optional[float] = key(
        None, "last learning rate as a share of the peak (default 0.1)", ge=0, le=1, kinds=("linear", "cosine", "wsd")
    )
    decay_steps: Optional[int] = key(
        None, "updates of the final decay (default steps / 5)", unit="updates", ge=0, le=MAX_UPDATES, kinds=("wsd",)
    )


@dataclass
class Parallelism:
    kind: str = key(
        "ddp",
        "layout over ranks",
        choices=("ddp",),
        later=("zero1", "zero2", "zero3", "fsdp", "hsdp", "fsdp_tp", "fsdp_pp", "hsdp_tp", "fsdp_tp_pp", "fsdp_cp"),
    )
    dp_replicate: Union[int, str] = key(AUTO, "replicas", unit="ranks", ge=1, le=MAX_RANKS)
    dp_shard: Union[int, str] = key(1, "ranks that share one sharded copy", unit="ranks", ge=1, le=MAX_RANKS)
    cp: int = key(1, "ranks that share a sequence", unit="ranks", ge=1, le=MAX_RANKS)
    tp: int = key(1, "ranks that share a matrix", unit="ranks", ge=1, le=MAX_RANKS)
    pp: int = key(1, "pipeline stages", unit="ranks", ge=1, le=MAX_RANKS)
    schedule: str = key(
        "1f1b",
        "pipeline schedule",
        choices=("1f1b",),
        later=("gpipe", "interleaved_1f1b", "interleaved_zb", "zbv", "dualpipe_v"),
    )
    reduction: str = key("ring", "order in which gradients are summed over ranks", choices=("ring",), later=("canonical",))
    offload: str = key("none", "what lives in host memory", choices=("none",), later=("cpu",))
    bucket_mib: Optional[float] = key(
        None, "gradients that are summed over ranks in one call (default 25)", unit="MiB", gt=0, le=2**20, kinds=("ddp",)
    )
    first_bucket_mib: Optional[float] = key(
        None,
        "the same for the gradients that are ready first (default 1, at most bucket_mib)",
        unit="MiB",
        gt=0,
        le=2**20,
        kinds=("ddp",),
    )
    gradient_as_bucket_view: Optional[bool] = key(
        None, "gradients live inside the buckets instead of beside them (default true)", kinds=("ddp",)
    )
    static_graph: Optional[bool] = key(
        None,
        "torch is told that every update runs the same graph; one more pass of warm-up before the first (default false)",
        kinds=("ddp",),
    )
    compression: Optional[str] = key(
        None,
        "dtype gradients are sent in; bf16 halves the bytes and rounds (default none)",
        choices=("none", "bf16"),
        kinds=("ddp",),
    )


@dataclass
class Checkpoint:
    every: int = key(250, "updates between saves; 0 = only at the end or when stopped", unit="updates", ge=0, le=MAX_UPDATES)
    keep: int = key(2, "newest checkpoints that stay", unit="checkpoints", ge=1, le=MAX_UPDATES)


@dataclass
class Wandb:
    enabled: bool = key(False, "send every record of metrics.jsonl to Weights & Biases")
    mode: str = key(
        "offline", "offline: files below the run folder, for `wandb sync`; online: a server", choices=("offline", "online")
    )
    project: str = key("llmtrain", "project of the run")
    entity: Optional[str] = key(None, "user or team the project belongs to; null = the account's own")
    group: Optional[str] = key(None, "runs to show together")
    tags: List[str] = key([], "words to find the run by")


@dataclass
class Tensorboard:
    enabled: bool = key(False, "write every record of metrics.jsonl as TensorBoard events, below the run folder")


@dataclass
class Tracker:
    wandb: Wandb = field(default_factory=Wandb)
    tensorboard: Tensorboard = field(default_factory=Tensorboard)


@dataclass
class Profile:
    kind: str = key("none", "what is traced", choices=("none",), later=("window",))


@dataclass
class Cluster:
    nodes: Optional[int] = key(None, "machines the planner assumes", ge=1, le=MAX_RANKS, built=False)
    devices_per_node: Optional[int] = key(None, "devices a machine has", ge=1, le=MAX_RANKS, built=False)
    memory_gib: Optional[float] = key(None, "memory of a device", unit="GiB", gt=0, built=False)


@dataclass
class Launch:
    nproc: Optional[int] = key(None, "ranks to start on this machine", unit="ranks", ge=1, le=MAX_RANKS)
    device: str = key(AUTO, "where tensors live", choices=(AUTO, "cpu", "cuda", "mps"))
    threads: Union[int, str] = key(AUTO, "CPU threads of a rank; auto = cores / ranks", unit="threads", ge=1, le=MAX_RANKS)
    timeout_seconds: float = key(
        600.0,
        "no rank making progress for this long ends the run and names the one that is behind",
        unit="seconds",
        ge=1,
        le=2**20,
    )
    env: Dict[str, str] = key({}, "environment variables of the ranks; kept in config.yaml, so no secrets")


@dataclass
class Sweep:
    jobs: int = key(1, "jobs that run at the same time", unit="jobs", ge=1, le=1024)
    only: Optional[int] = key(None, "run only the job of this number (from 0) in this process; for array jobs", ge=0, le=9999)


@dataclass
class Evaluate:
    step: Optional[int] = key(None, "checkpoint to score; null = the newest", unit="updates", ge=0, le=MAX_UPDATES)
    batch_size: int = key(16, "sequences scored at once", unit="sequences", ge=1, le=MAX_SEQUENCES)
    tokens: Optional[int] = key(
        None, "score only the first whole rows of this many validation tokens; null = all", unit="tokens", ge=1, le=MAX_TOKENS
    )


@dataclass
class Convert:
    step: Optional[int] = key(None, "checkpoint to export; null = the newest", unit="updates", ge=0, le=MAX_UPDATES)
    dtype: str = key("fp32", "dtype of exported weights", choices=("fp32", "bf16", "fp16"))
    shard_bytes: int = key(5 * 10**9, "largest safetensors file of an export", unit="bytes", ge=1, le=MAX_TOKENS)


@dataclass
class Generate:
    step: Optional[int] = key(None, "checkpoint to sample from; null = the newest", unit="updates", ge=0, le=MAX_UPDATES)
    prompt: str = key("", "text to continue; empty = begin of text")
    max_tokens: int = key(200, "tokens to add at most", unit="tokens", ge=1, le=MAX_TOKENS)
    temperature: float = key(0.8, "0 = always the likeliest token", ge=0)
    top_k: Optional[int] = key(None, "sample among the k likeliest tokens only", unit="tokens", ge=1, le=MAX_ROWS)
    top_p: Optional[float] = key(None, "sample among the likeliest tokens that hold this much probability", gt=0, le=1)
    seed: int = key(0, "seed of the sample", ge=0, lt=2**32)


@dataclass
class Config:
    """A whole run as composed; the order is the order of `--cfg job`."""

    run: Run = field(default_factory=Run)
    train: Train = field(default_factory=Train)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = field(default_factory=Recompute)
    accumulation: Accumulation = field(default_factory=Accumulation)
    attention: Attention = field(default_factory=Attention)
    loss: Loss = field(default_factory=Loss)
    compile: Compile = field(default_factory=Compile)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    tracker: Tracker = field(default_factory=Tracker)
    profile: Profile = field(default_factory=Profile)
    cluster: Cluster = field(default_factory=Cluster)
    launch: Launch = field(default_factory=Launch)
    sweep: Sweep = field(default_factory=Sweep)
    evaluate: Evaluate = field(default_factory=Evaluate)
    generate: Generate = field(default_factory=Generate)
    prepare: Prepare = field(default_factory=Prepare)
    convert: Convert = field(default_factory=Convert)
    output: str = key("table", "form of what is printed; json = one document on standard output", choices=("table", "json"))


GROUPS = (
    "model",
    "data",
    "tokenizer",
    "precision",
    "recompute",
    "accumulation",
    "attention",
    "loss",
    "compile",
    "optimizer",
    "schedule",
    "parallelism",
    "checkpoint",
    "tracker",
    "profile",
    "cluster",
    "launch",
    "experiment",
)
"""Option groups: folders under `configs/`, in the order of the defaults list. Every one but `tracker` holds at most one option."""
