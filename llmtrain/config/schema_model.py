"""The `model` section of the wire form: the shape of a Transformer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional, Union

from llmtrain.config.declare import AUTO, MAX_LAYERS, MAX_ROWS, MAX_WIDTH, key


@dataclass
class AttentionShape:
    num_heads: int = key(4, "query heads", ge=1, le=MAX_WIDTH)
    num_kv_heads: Optional[int] = key(None, "key and value heads; null = num_heads", ge=1, le=MAX_WIDTH)
    head_dim: Optional[int] = key(None, "channels of a head; null = dim / num_heads", ge=1, le=MAX_WIDTH)
    qk_norm: bool = key(False, "normalise queries and keys per head before the rotary embedding")
    bias: bool = key(False, "bias on the query, key and value projections")
    output_bias: bool = key(False, "bias on the output projection")
    window: Optional[int] = key(
        None, "keys a query of a short layer sees, its own included; null = all before it", unit="tokens", ge=1, le=MAX_ROWS
    )
    window_pattern: Optional[str] = key(
        None, "letters repeated over the layers: S = sees window keys, L = sees all (default S: every layer is short)"
    )


@dataclass
class FeedForwardShape:
    kind: str = key("swiglu", "gated SiLU or plain GELU", choices=("swiglu", "gelu"))
    hidden_dim: Optional[int] = key(
        None, "inner width; null = 4 dim (gelu) or 8/3 dim rounded up to 32 (swiglu)", ge=1, le=4 * MAX_WIDTH
    )
    bias: bool = key(False, "bias on the feed-forward projections")


@dataclass
class RopeScaling:
    kind: str = key(
        "none", "how rotary frequencies are stretched for longer texts", choices=("none", "linear", "llama3", "yarn")
    )
    factor: Optional[float] = key(None, "how much longer", ge=1, kinds=("linear", "llama3", "yarn"))
    original_max_positions: Optional[int] = key(
        None, "positions before stretching", unit="tokens", ge=1, le=MAX_ROWS, kinds=("llama3", "yarn")
    )
    low_freq_factor: Optional[float] = key(
        None,
        "original_max_positions / this = wavelength from which all of the factor applies (default 1)",
        gt=0,
        kinds=("llama3",),
    )
    high_freq_factor: Optional[float] = key(
        None, "original_max_positions / this = wavelength up to which none of it applies (default 4)", gt=0, kinds=("llama3",)
    )
    beta_fast: Optional[float] = key(
        None, "turns over original_max_positions from which frequencies stay (default 32)", gt=0, kinds=("yarn",)
    )
    beta_slow: Optional[float] = key(
        None,
        "turns over original_max_positions up to which frequencies are divided by factor (default 1)",
        gt=0,
        kinds=("yarn",),
    )
    attention_factor: Optional[float] = key(
        None, "factor on queries and keys (default 0.1 ln factor + 1)", gt=0, kinds=("yarn",)
    )


@dataclass
class Rope:
    theta: float = key(10000.0, "base of the rotary frequencies", gt=1)
    scaling: RopeScaling = field(default_factory=RopeScaling)


@dataclass
class Dropout:
    embedding: float = key(0.0, "probability of dropping an embedding channel", ge=0, lt=1)
    attention: float = key(0.0, "probability of dropping an attention weight (reference backend only)", ge=0, lt=1)
    residual: float = key(0.0, "probability of dropping a channel that enters the residual stream", ge=0, lt=1)
    feed_forward: float = key(0.0, "probability of dropping an inner feed-forward channel", ge=0, lt=1)


@dataclass
class Model:
    init_from: Optional[str] = key(
        None,
        "run folder whose newest checkpoint gives the first weights, and the model section where nothing else sets it",
        path=True,
    )
    dim: int = key(128, "width of the residual stream", unit="channels", ge=1, le=MAX_WIDTH)
    num_layers: int = key(4, "transformer blocks", ge=1, le=MAX_LAYERS)
    vocab_size: Union[int, str] = key(AUTO, "rows of the embedding; auto = the tokenizer's vocabulary", ge=2, le=MAX_ROWS)
    max_positions: Union[int, str] = key(
        AUTO,
        "longest text the model is made for (rows of a learned position table); auto = data.sequence_length",
        ge=1,
        le=MAX_ROWS,
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
