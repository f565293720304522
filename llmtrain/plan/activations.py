"""The tensors one block leaves for its backward, one row each: what a memory forecast adds up.

The rows follow `model/block.py` and the operations below it line by line: a result that autograd needs is `saved`, and one that
selective recompute can keep carries the `family` that `recompute.keep` names. A tensor that two operations save is one row.

Legend: B sequences of a micro-batch, T tokens of a sequence, n = B T, D channels of the residual stream, H query heads,
G key-value heads, C channels of a head, F inner feed-forward width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import MappingProxyType

from llmtrain.config.typed import (
    DdpConfig,
    FeedForwardKind,
    LossConfig,
    ModelConfig,
    NormKind,
    PositionKind,
    RecomputeConfig,
    RecomputeKind,
)
from llmtrain.plan.attention import AUTO, CPU, repeats_groups
from llmtrain.plan.precision import BYTES, PrecisionTable
from llmtrain.plan.shapes import block_shapes

BOOL = 1
RANDOM = 2
"""Random bytes of one element's dropout; backward draws them again, so no mask is a row."""
REFERENCE = "reference"


@dataclass(frozen=True)
class FusedAttention:
    """What a backend that never holds whole matrices of weights needs besides operands and result."""

    log_sum_exp: bool
    """Whether one number per query and head is saved."""
    mask_as_scores: bool
    """Whether documents and windows are told to it as a matrix of numbers, made once a forward."""
    scores_at_once: int = 0
    """Scores of one block of queries, where these are tensors and not registers of a kernel."""
    queries_at_once: int = 0


FUSED_ATTENTION: Mapping[str, FusedAttention] = MappingProxyType(
    {
        "sdpa": FusedAttention(log_sum_exp=True, mask_as_scores=True),
        "blocked": FusedAttention(log_sum_exp=False, mask_as_scores=False, scores_at_once=2**20, queries_at_once=128),
        "flash_attn": FusedAttention(log_sum_exp=True, mask_as_scores=False),
        "flex": FusedAttention(log_sum_exp=True, mask_as_scores=False),
    }
)
"""By attention backend. `reference`, and the kernel `math` of sdpa, which does the same, are written out in `_written_out_rows`."""


@dataclass(frozen=True)
class Workload:
    """What decides the memory of one rank: a model, its dtypes, and how an update is cut up."""

    model: ModelConfig
    """With `vocab_size` settled."""
    precision: PrecisionTable
    micro_batch_size: int
    num_microbatches: int
    sequence_length: int
    loss: LossConfig
    recompute: RecomputeConfig
    attention_backend: str
    document_mask: bool
    """Whether a batch comes with document ids, from which a mask is made: every packing but concat."""
    attention_kernel: str = AUTO
    device: str = CPU
    ddp: DdpConfig | None = None
    """How gradients are summed over ranks that keep whole copies; None where there is one copy only."""

    @property
    def tokens(self) -> int:
        """n: tokens of a micro-batch."""
        return self.micro_batch_size * self.sequence_length

    @property
    def writes_out_scores(self) -> bool:
        """Whether attention holds whole matrices of scores and weights."""
        return self.attention_backend == REFERENCE or self.attention_kernel == "math"

    @property
    def repeats_groups(self) -> bool:
        """Whether attention saves keys and values for every query head; one layer with a window speaks for all of them."""
        heads, dtype = self.model.attention, self.precision.matmul
        masked = self.document_mask or self.windows != {None}
        return (
            self.attention_backend == "sdpa"
            and heads.num_heads > heads.num_kv_heads
            and repeats_groups(device=self.device, masked=masked, dtype=dtype, kernel=self.attention_kernel)
        )

    @property
    def windows(self) -> frozenset[int | None]:
        """The different windows of the layers; one that no sequence is longer than is none."""
        return frozenset(
            window if window is not None and window < self.sequence_length else None for window in self.model.layer_windows
        )


class Part(Enum):
    """Half of a block; in backward the feed-forward half is done, and freed, first."""

    ATTENTION = "attention"
    FEED_FORWARD = "feed_forward"


@dataclass(frozen=True)
class Row:
    """One tensor of one block and one micro-batch."""

    tensor: str
    bytes: int
    part: Part
    saved: bool = True
    """Autograd holds it until the block's backward."""
    family: str = ""
    """Family of operations that made it, if `recompute.keep` can name it."""


def block_rows(work: Workload) -> tuple[Row, ...]:
    """Every tensor of a block that is saved or can be kept, but for the block's input (`block_input_bytes`)."""
    return (
        *_norm_rows(work, Part.ATTENTION),
        *_projection_rows(work),
        *_attention_rows(work),
        *_norm_rows(work, Part.FEED_FORWARD),
        *_feed_forward_rows(work),
    )


def block_input_bytes(work: Workload) -> int:
    """The residual stream as it enters a block [n, D]."""
    return work.tokens * work.model.dim * BYTES[work.precision.residual]


def bytes_kept(work: Workload) -> int:
    """Bytes a block holds between its forward and its backward."""
    if work.recompute.kind is RecomputeKind.NONE:
        return bytes_in_backward(work, frozenset(Part))
    return block_input_bytes(work) + sum(row.bytes for row in block_rows(work) if row.family in work.recompute.keep)


def bytes_in_forward(work: Workload) -> int:
    """Highest bytes of a block while it is run for its backward: what it keeps and saves, and what dropout needs meanwhile."""
    keep, model = work.recompute.keep, work.model
    rows = {
        part: sum(row.bytes for row in block_rows(work) if row.part is part and (row.saved or row.family in keep))
        for part in Part
    }
    matmul, softmax = BYTES[work.precision.matmul], BYTES[work.precision.softmax]
    pairs = work.tokens * model.attention.num_heads * work.sequence_length  # B H T T
    attention = dropout_scratch(model.dropout.attention, pairs, softmax)
    inner = dropout_scratch(model.dropout.feed_forward, work.tokens * model.feed_forward.hidden_dim, matmul)
    stream = dropout_scratch(model.dropout.residual, work.tokens * model.dim, matmul)
    halfway = rows[Part.ATTENTION] + attention
    attended = 0 if "matmul" in keep else work.tokens * model.dim * matmul  # the output projection, until the block is done
    return block_input_bytes(work) + max(halfway, sum(rows.values()) + attended + max(inner, stream))


def dropout_scratch(probability: float, elements: int, size: int) -> int:
    """Of a tensor to drop from: itself, the mask in its dtype, and the random numbers; the result is not counted."""
    return elements * (2 * size + RANDOM) if probability > 0 else 0


def bytes_in_backward(work: Workload, parts: frozenset[Part]) -> int:
    """Bytes of a block whose backward has `parts` still to do."""
    return block_input_bytes(work) + sum(row.bytes for row in block_rows(work) if row.part in parts and row.saved)


def norm_statistics(work: Workload) -> int:
    """What a norm over the channels of the stream saves besides its input: one (rms) or two (layer) numbers a token."""
    return (1 if work.model.norm is NormKind.RMS else 2) * work.tokens * BYTES[work.precision.norm]


def _norm_rows(work: Workload, part: Part) -> list[Row]:
    """The norm in front of a half; it saves its input, which is the block's own in the first half."""
    n, dim, precision = work.tokens, work.model.dim, work.precision
    output = n * dim * BYTES[precision.matmul]
    rows = []
    if part is Part.FEED_FORWARD:
        rows.append(Row("residual stream after attention", n * dim * BYTES[precision.residual], part))
    if work.model.norm is NormKind.RMS:
        rows.append(Row("1 / root mean square", norm_statistics(work), part, family="norm"))
        return [*rows, Row("norm output", output, part, family="norm")]
    rows.append(Row("mean and 1 / deviation", norm_statistics(work), part, family="norm"))
    if precision.norm == precision.matmul:
        return [*rows, Row("norm output", output, part, family="norm")]
    exact = Row("norm output before the cast", n * dim * BYTES[precision.norm], part, saved=False, family="norm")
    return [*rows, exact, Row("norm output", output, part)]


def _projection_rows(work: Workload) -> list[Row]:
    """From the norm's output to queries, keys and values as attention takes them."""
    heads, precision, part = work.model.attention, work.precision, Part.ATTENTION
    size, rotary = BYTES[precision.matmul], work.model.position is PositionKind.ROTARY
    fused = not work.writes_out_scores
    rows = _weight_casts(work, part)
    for name, num_heads in (("query", heads.num_heads), ("key", heads.num_kv_heads), ("value", heads.num_kv_heads)):
        vectors = work.tokens * num_heads
        width = vectors * heads.head_dim
        normed, turned = heads.qk_norm and name != "value", rotary and name != "value"
        changed = turned or (normed and precision.rotary != precision.matmul)  # after the projection or its norm
        repeated = work.repeats_groups and name != "query"
        taken = fused and not repeated
        # Attention saves what it takes, and a norm its input; a rotation or a cast saves nothing.
        rows.append(Row(f"{name} projection", width * size, part, normed or (taken and not changed), "matmul"))
        if normed:
            rows.append(Row(f"{name} norm: 1 / root mean square", vectors * BYTES[precision.norm], part, family="norm"))
            rows.append(Row(f"{name} norm output", width * BYTES[precision.rotary], part, taken and not changed, "norm"))
        if changed:
            rows.append(Row(f"{name} as attention takes it", width * size, part, saved=taken))
        if repeated:
            rows.append(Row(f"{name} per query head", work.tokens * heads.num_heads * heads.head_dim * size, part))
    return rows


def _attention_rows(work: Workload) -> list[Row]:
    rows = _written_out_rows(work) if work.writes_out_scores else _fused_rows(work)
    projected = work.tokens * work.model.dim * BYTES[work.precision.matmul]
    rows.append(Row("output projection", projected, Part.ATTENTION, saved=False, family="matmul"))
    return rows


def _written_out_rows(work: Workload) -> list[Row]:
    """Attention written out: whole matrices of weights, in the dtype of the softmax."""
    heads, n, part, size = work.model.attention, work.tokens, Part.ATTENTION, BYTES[work.precision.softmax]
    width = n * heads.num_heads * heads.head_dim  # n H C
    pairs = n * heads.num_heads * work.sequence_length  # B H T T
    rows = [
        Row("queries, keys and values per query head", 3 * width * size, part),
        Row("scores", pairs * size, part, saved=False, family="attention"),
        Row("attention weights", pairs * size, part),
        Row("weighted values", width * size, part, saved=False, family="attention"),
        Row("attention output", width * BYTES[work.precision.matmul], part),
    ]
    if work.model.dropout.attention > 0:
        rows.append(Row("attention weights, dropped", pairs * size, part))
    return rows


def _fused_rows(work: Workload) -> list[Row]:
    """Attention in pieces: besides queries, keys and values its result and what its kernel needs to make the weights again."""
    heads, n, part = work.model.attention, work.tokens, Part.ATTENTION
    kernel, size = FUSED_ATTENTION[work.attention_backend], BYTES[work.precision.matmul]
    result = n * heads.num_heads * heads.head_dim * size  # [B, T, H, C]
    rows = [Row("attention output", result, part, family="attention")]
    if kernel.log_sum_exp:
        rows.append(Row("log-sum-exp", n * heads.num_heads * BYTES[work.precision.softmax], part, family="attention"))
    return rows


def _feed_forward_rows(work: Workload) -> list[Row]:
    precision, n, part = work.precision, work.tokens, Part.FEED_FORWARD
    size = BYTES[precision.matmul]
    inner = n * work.model.feed_forward.hidden_dim  # n F
    dropped = work.model.dropout.feed_forward > 0
    rows = [*_weight_casts(work, part), Row("up projection", inner * size, part, family="matmul")]
    if work.model.feed_forward.kind is FeedForwardKind.SWIGLU:
        rows += [
            Row("gate projection", inner * size, part, family="matmul"),
            Row("silu(gate)", inner * size, part, family="activation"),
            Row("silu(gate) * up", inner * size, part, saved=not dropped),
        ]
    else:
        rows.append(Row("gelu(up)", inner * size, part, saved=not dropped, family="activation"))
    if dropped:
        rows.append(Row("inner values, dropped", inner * size, part))
    rows.append(Row("down projection", n * work.model.dim * size, part, saved=False, family="matmul"))
    return rows


def _weight_casts(work: Workload, part: Part) -> list[Row]:
    """Copies of the master matrices in the matmul dtype, made in every forward and held for its backward."""
    if work.precision.matmul == work.precision.weights:
        return []
    shapes = block_shapes(work.model).items()
    elements = sum(prod(shape) for name, shape in shapes if name.startswith(f"{part.value}.") and len(shape) == 2)
    return [Row("weights, cast", elements * BYTES[work.precision.matmul], part)]
