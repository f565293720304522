"""The wire form of a run: plain dataclasses that the YAML groups and the command line are merged into.

Every key has one line of documentation, and where it applies a unit, a range, the legal words and the kinds of its section that
read it. `config/typed.py` is the frozen form the rest of the program sees; this file is what `--help`, completion, error messages
and `tests/config/test_every_key.py` walk.

`None` means "not given"; a key whose section has several kinds and that belongs to only some of them is `None` by default, and the
typed form fills in the default of the kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Union

AUTO = "auto"

# Bounds of counts: beyond what anyone trains, small enough that no product or loop over divisors gets out of hand.
MAX_UPDATES = 2**40
MAX_TOKENS = 2**48
MAX_SEQUENCES = 2**24
MAX_BATCH_TOKENS = 2**36
MAX_WIDTH = 2**20
MAX_LAYERS = 2**12
MAX_ROWS = 2**24
MAX_RANKS = 2**20


def key(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] = (),
    later: tuple[str, ...] = (),
    kinds: tuple[str, ...] = (),
    built: bool = True,
) -> Any:
    """Declare one key.

    Args:
        default: value when nobody sets the key; a list or dict is copied for each config.
        doc: one line for `--help`.
        unit: what a number counts.
        ge, gt, le, lt: bounds of a number (or of each number of a list).
        choices: the legal words of a text key; words in `later` are known but refused as not available in this version.
        kinds: the values of the section's `kind` that read this key; empty means all of them.
        built: False for a key whose part does not exist yet; any value but the default is refused.
    """
    metadata = dict(doc=doc, unit=unit, ge=ge, gt=gt, le=le, lt=lt, choices=choices, later=later, kinds=kinds, built=built)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


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
class AttentionShape:
    num_heads: int = key(4, "query heads", ge=1, le=MAX_WIDTH)
    num_kv_heads: Optional[int] = key(None, "key and value heads; null = num_heads", ge=1, le=MAX_WIDTH)
    head_dim: Optional[int] = key(None, "channels of a head; null = dim / num_heads", ge=1, le=MAX_WIDTH)
    qk_norm: bool = key(False, "normalise queries and keys per head before the rotary embedding")
    bias: bool = key(False, "bias on the query, key and value projections")
    output_bias: bool = key(False, "bias on the output projection")


@dataclass
class FeedForwardShape:
    kind: str = key("swiglu", "gated SiLU or plain GELU", choices=("swiglu", "gelu"))
    hidden_dim: Optional[int] = key(
        None, "inner width; null = 4 dim (gelu) or 8/3 dim rounded up to 32 (swiglu)", ge=1, le=4 * MAX_WIDTH
    )
    bias: bool = key(False, "bias on the feed-forward projections")


@dataclass
class Rope:
    theta: float = key(10000.0, "base of the rotary frequencies", gt=0)


@dataclass
class Dropout:
    embedding: float = key(0.0, "probability of dropping an embedding channel", ge=0, lt=1)
    attention: float = key(0.0, "probability of dropping an attention weight (reference backend only)", ge=0, lt=1)
    residual: float = key(0.0, "probability of dropping a channel that enters the residual stream", ge=0, lt=1)
    feed_forward: float = key(0.0, "probability of dropping an inner feed-forward channel", ge=0, lt=1)


@dataclass
class Model:
    dim: int = key(128, "width of the residual stream", unit="channels", ge=1, le=MAX_WIDTH)
    num_layers: int = key(4, "transformer blocks", ge=1, le=MAX_LAYERS)
    vocab_size: Union[int, str] = key(AUTO, "rows of the embedding; auto = the tokenizer's vocabulary", ge=2, le=MAX_ROWS)
    max_positions: Union[int, str] = key(
        AUTO, "rows of a learned position table; auto = data.sequence_length", ge=1, le=MAX_ROWS
    )
    position: str = key("rotary", "how order is told to the model", choices=("rotary", "learned"))
    norm: str = key("rms", "RMSNorm or LayerNorm", choices=("rms", "layer"))
    norm_eps: float = key(1e-5, "added to the variance", gt=0)
    tie_embeddings: bool = key(False, "use the embedding as the output head too")
    init_std: float = key(0.02, "standard deviation of initial weights", gt=0)
    depth_scaled_init: bool = key(True, "divide the std of projections into the residual stream by sqrt(2 num_layers)")
    attention: AttentionShape = field(default_factory=AttentionShape)
    feed_forward: FeedForwardShape = field(default_factory=FeedForwardShape)
    rope: Rope = field(default_factory=Rope)
    dropout: Dropout = field(default_factory=Dropout)


@dataclass
class Data:
    kind: str = key(
        "stdlib", "where text comes from", choices=("stdlib", "text", "synthetic"), later=("jsonl", "parquet", "tokens")
    )
    path: Optional[str] = key(None, "text file, or folder whose text files are read", kinds=("text",))
    sequence_length: int = key(256, "tokens a row of a batch holds", unit="tokens", ge=2, le=MAX_ROWS)
    packing: str = key(
        "concat",
        "concat: documents follow each other in a row; document: the same with attention and positions kept inside each document; "
        "padded: one document (or piece of it) a row",
        choices=("concat", "document", "padded"),
    )
    bos: bool = key(True, "put a begin-of-text token before each document")
    eos: bool = key(True, "put an end-of-text token after each document")
    validation_fraction: Optional[float] = key(
        None, "share of documents held out by content hash (default 0.05)", gt=0, lt=1, kinds=("stdlib", "text")
    )
    cache_dir: Optional[str] = key(
        None, "folder of prepared token files; null = llmtrain under the user's cache folder", kinds=("stdlib", "text")
    )


@dataclass
class Tokenizer:
    kind: str = key("byte", "what a token is", choices=("byte", "char", "bpe"), later=("file", "tiktoken", "sentencepiece"))
    vocab_size: Optional[int] = key(
        None, "tokens to train, special ones included (default 4096)", unit="tokens", ge=260, le=MAX_ROWS, kinds=("bpe",)
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
    backend: str = key(
        AUTO, "who computes attention", choices=(AUTO, "reference", "sdpa", "blocked"), later=("flash_attn", "flex")
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


@dataclass
class Checkpoint:
    every: int = key(250, "updates between saves; 0 = only at the end or when stopped", unit="updates", ge=0, le=MAX_UPDATES)
    keep: int = key(2, "newest checkpoints that stay", unit="checkpoints", ge=1, le=MAX_UPDATES)


@dataclass
class Tracker:
    kinds: List[str] = key([], "where metrics go besides metrics.jsonl", choices=(), later=("wandb", "tensorboard"))


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
    device: str = key(AUTO, "where tensors live", choices=(AUTO, "cpu", "cuda"), later=("mps",))
    threads: Union[int, str] = key(AUTO, "CPU threads of a rank; auto = cores / ranks", unit="threads", ge=1, le=MAX_RANKS)
    timeout_seconds: Optional[float] = key(None, "longest wait for another rank", unit="seconds", gt=0, built=False)
    env: Dict[str, str] = key({}, "environment variables of the ranks", built=False)


@dataclass
class Evaluate:
    step: Optional[int] = key(None, "checkpoint to score; null = the newest", unit="updates", ge=0, le=MAX_UPDATES)
    batch_size: int = key(16, "sequences scored at once", unit="sequences", ge=1, le=MAX_SEQUENCES)
    tokens: Optional[int] = key(
        None, "score only the first whole rows of this many validation tokens; null = all", unit="tokens", ge=1, le=MAX_TOKENS
    )


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
    evaluate: Evaluate = field(default_factory=Evaluate)
    generate: Generate = field(default_factory=Generate)
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
