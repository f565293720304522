"""Forecast of one rank's memory: bytes by category at the instant of an update at which they sum to the most.

These instants can be the highest: the loss, the backward of the last and of the first block (in between, what is freed and what
becomes a gradient change by the same amount from block to block), and the backward of the embedding. The tensors a block keeps are
counted row by row in `plan/activations.py`; here they meet weights, gradients, optimizer state, head and loss. Not counted: what a
kernel allocates and frees inside itself, the allocator's rounding, the libraries.

Legend: B sequences of a micro-batch, T tokens of a sequence, n = B T, D channels, V vocabulary, F inner width, H query heads, G key-value
heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from llmtrain.config.typed import ChunkedLoss, FeedForwardKind, PositionKind
from llmtrain.plan.activations import (
    BOOL,
    FUSED_ATTENTION,
    REFERENCE,
    FusedAttention,
    Part,
    Workload,
    block_input_bytes,
    bytes_in_backward,
    bytes_in_forward,
    bytes_kept,
    norm_statistics,
)
from llmtrain.plan.plan import MemoryForecast
from llmtrain.plan.precision import BYTES
from llmtrain.plan.shapes import block_shapes, num_parameters, parameter_shapes

INT64 = 8
MOMENTS = 2
"""Optimizer tensors per parameter: AdamW's two moments."""
STEP_COUNTER = 4
"""AdamW's count of updates, one fp32 number per parameter tensor."""

WHOLE_BLOCK = frozenset(Part)
FEED_FORWARD_DONE = frozenset({Part.ATTENTION})


def forecast_memory(work: Workload) -> MemoryForecast:
    """Bytes by category at the highest instant of an update in the steady state (optimizer state exists)."""
    return max(instants(work).values(), key=lambda forecast: forecast.total)


def instants(work: Workload) -> dict[str, MemoryForecast]:
    """The candidates for the highest instant, by name."""
    return dict((*_loss_instants(work), *_block_instants(work), ("embedding backward", _embedding_instant(work))))


def _loss_instants(work: Workload) -> Iterator[tuple[str, MemoryForecast]]:
    """Head and loss, while every block still holds what its backward needs."""
    activations = work.model.num_layers * bytes_kept(work)
    grads = _all_gradients(work) if work.num_microbatches > 1 else 0
    other = _inputs(work) + _final_norm(work)
    if isinstance(work.loss, ChunkedLoss):
        hidden = work.tokens * work.model.dim * BYTES[work.precision.matmul]  # [n, D]
        yield "chunked loss", _forecast(work, grads, activations, _chunked_loss(work, work.loss.chunk_size), other + hidden)
    else:
        for name, loss in _whole_loss(work).items():
            yield name, _forecast(work, grads, activations, loss, other)


def _whole_loss(work: Workload) -> dict[str, int]:
    """Logits of all tokens at once: head weight in the matmul dtype, its input with ignored rows blanked, and at each instant …"""
    n, dim, vocab, precision = work.tokens, work.model.dim, _vocab(work), work.precision
    matmul, exact = BYTES[precision.matmul], BYTES[precision.loss]
    head = n * dim * matmul + _head_weight_cast(work)
    logits = n * vocab * BYTES[precision.logits]
    logits_cast = n * vocab * exact if precision.logits != precision.loss else 0
    log_probabilities = n * vocab * exact
    gradients = n * vocab * matmul + n * dim * matmul + vocab * dim * matmul
    return {
        "log-softmax": head + logits + logits_cast + log_probabilities,
        "log-softmax backward": head + log_probabilities + 2 * n * vocab * exact,  # its gradient and that of the logits
        "head backward": head + gradients,  # of logits, hidden states and head weight
    }


def _chunked_loss(work: Workload, chunk_size: int) -> int:
    """Logits of a chunk at a time; the gradients of hidden states and head weight are made in forward."""
    n, dim, vocab, precision = work.tokens, work.model.dim, _vocab(work), work.precision
    matmul, exact = BYTES[precision.matmul], BYTES[precision.loss]
    chunk, low = min(chunk_size, n), matmul if precision.matmul != precision.loss else 0
    # Of each chunk: scores and log-probabilities (which become their gradient), and that gradient as the matmul takes it.
    tensors = chunk * dim * matmul + chunk * vocab * (2 * exact + low)
    weight_product = vocab * dim * matmul
    # The next chunk's scores are made before the names of the last one's are reused.
    next_scores = min(chunk, n - chunk) * vocab * (exact + low)
    graphs = 2 if work.num_microbatches > 1 else 1  # a micro-batch's graph lives until the next one's loss is there
    return _head_weight_cast(work) + graphs * _chunked_gradients(work) + tensors + max(weight_product, next_scores)


def _chunked_gradients(work: Workload) -> int:
    """What the chunked loss holds from its forward on: gradients of hidden states [n, D] and head weight [V, D]."""
    hidden = work.tokens * work.model.dim * BYTES[work.precision.matmul]
    return hidden + _vocab(work) * work.model.dim * BYTES[work.precision.weights]


def _block_instants(work: Workload) -> Iterator[tuple[str, MemoryForecast]]:
    """In the last block and in the first: its forward (again, if recomputed), then its backward, the feed-forward half before attention.

    Without recompute the first forward is where only dropout can make a peak; it is forecast with the gradients of the second.
    """
    model, gradient = work.model, BYTES[work.precision.gradient]
    head = _vocab(work) * model.dim * gradient
    loss = _chunked_gradients(work) if isinstance(work.loss, ChunkedLoss) else 0
    loss += head if model.tie_embeddings else 0  # waits for the gradient of the embedding
    block = _block_gradients(work, "")
    inner = work.tokens * model.feed_forward.hidden_dim * BYTES[work.precision.matmul]
    for name, layer in (("last", model.num_layers - 1), ("first", 0)):
        below = layer * bytes_kept(work)
        done = (model.num_layers - 1 - layer) * block + (0 if model.tie_embeddings else head)
        grads = _all_gradients(work) if work.num_microbatches > 1 else done
        # The gradient of the block's output, and of what was dropped from it.
        other = _inputs(work) + block_input_bytes(work) * (2 if model.dropout.residual > 0 else 1)
        yield f"{name} block forward", _forecast(work, grads, below + bytes_in_forward(work), loss, other)
        whole = below + bytes_in_backward(work, WHOLE_BLOCK) - inner  # the input of `down` is used up by then
        other = _inputs(work) + _feed_forward_gradients(work)
        yield f"{name} feed-forward backward", _forecast(work, grads, whole, loss, other)
        grads = _all_gradients(work) if work.num_microbatches > 1 else done + _block_gradients(work, "feed_forward.")
        half = below + bytes_in_backward(work, FEED_FORWARD_DONE)
        other = _inputs(work) + _attention_gradients(work)
        yield f"{name} attention backward", _forecast(work, grads, half, loss, other)


def _feed_forward_gradients(work: Workload) -> int:
    """Gradients alive together: stream, block output, and the inner values on both sides of the activation, or one matrix."""
    n, model, precision = work.tokens, work.model, work.precision
    matmul = BYTES[precision.matmul]
    inner, matrix = n * model.feed_forward.hidden_dim, model.feed_forward.hidden_dim * model.dim
    around_activation = (3 if model.feed_forward.kind is FeedForwardKind.SWIGLU else 2) * inner * matmul
    down_weight = inner * matmul + _matrix_gradient(work, matrix)
    return n * model.dim * (BYTES[precision.residual] + matmul) + max(around_activation, down_weight)


def _attention_gradients(work: Workload) -> int:
    """Gradients alive together: stream, and result and operands of attention, or on the reference the whole matrix of weights."""
    n, heads, precision = work.tokens, work.model.attention, work.precision
    stream = n * work.model.dim * BYTES[precision.residual]
    queries = n * heads.num_heads * heads.head_dim
    if work.attention_backend == REFERENCE:
        pairs = n * heads.num_heads * work.sequence_length  # B H T T
        return stream + (2 * pairs + 2 * queries) * BYTES[precision.softmax]
    operands = 2 * (queries + n * heads.num_kv_heads * heads.head_dim) * BYTES[precision.matmul]
    return stream + operands + _scores_in_blocks(work, FUSED_ATTENTION[work.attention_backend])


def _scores_in_blocks(work: Workload, kernel: FusedAttention) -> int:
    """What a fused backward made of tensor operations holds at once; 0 for a real kernel."""
    if not kernel.scores_at_once:
        return 0
    length, heads = work.sequence_length, work.model.attention
    matmul, exact = BYTES[work.precision.matmul], BYTES[work.precision.softmax]
    queries = min(kernel.queries_at_once, length)
    sequences = min(work.micro_batch_size, max(1, kernel.scores_at_once // (heads.num_heads * queries * length)))
    scores = sequences * heads.num_heads * queries * length * exact
    # Scores, weights and their gradient; the gradient of the last block is still there when the next block begins.
    alive = 3 if (sequences, queries) == (work.micro_batch_size, length) else 4
    causal = length**2 * (BOOL + matmul)  # and its slices, repeated for the heads of a group
    slices = heads.num_heads // heads.num_kv_heads * length * (length + queries) // 2 * matmul
    keys_and_values = 2 * sequences * heads.num_kv_heads * length * heads.head_dim * (matmul + exact)  # and their gradient sums
    weighted_sums = 3 * work.tokens * heads.num_heads * heads.head_dim * exact  # made before the first block
    return max(alive * scores + causal + slices + keys_and_values, weighted_sums)


def _embedding_instant(work: Workload) -> MemoryForecast:
    """The last gradient: dense [V, D], beside those it is added to (the head's when tied, the earlier micro-batches')."""
    model, precision = work.model, work.precision
    table = _vocab(work) * model.dim * BYTES[precision.gradient]
    loss = _chunked_gradients(work) if isinstance(work.loss, ChunkedLoss) else 0
    loss += table if model.tie_embeddings else 0
    added = (model.tie_embeddings + (work.num_microbatches > 1)) * table
    stream = work.tokens * model.dim * BYTES[precision.weights]
    return _forecast(work, _all_gradients(work), 0, loss, _inputs(work) + stream + added)


def _forecast(work: Workload, grads: int, activations: int, loss: int, other: int) -> MemoryForecast:
    parameters, tensors = num_parameters(work.model), len(parameter_shapes(work.model))
    return MemoryForecast(
        params=parameters * BYTES[work.precision.weights],
        grads=grads,
        optimizer=MOMENTS * parameters * BYTES[work.precision.moments] + tensors * STEP_COUNTER,
        activations=activations,
        loss=loss,
        other=other,
    )


def _inputs(work: Workload) -> int:
    """Batches of the whole update on the device, and what a forward makes once for all blocks."""
    arrays = 4 if work.document_mask else 2  # tokens and targets, then positions and document ids
    batches = work.num_microbatches * work.tokens * arrays * INT64
    rows = work.micro_batch_size if work.document_mask else 1  # positions that restart differ from row to row
    angles = rows * work.sequence_length * work.model.attention.head_dim // 2  # one sine and two cosines of each
    rotary = 3 * angles * BYTES[work.precision.rotary]
    mask = work.tokens * work.sequence_length * BOOL  # [B, 1, T, T]
    uses_rotary = work.model.position is PositionKind.ROTARY
    return batches + uses_rotary * rotary + work.document_mask * mask


def _final_norm(work: Workload) -> int:
    """What the norm before the head saves: its input, the stream, and statistics; its output is gone once the loss has a copy."""
    return block_input_bytes(work) + norm_statistics(work)


def _matrix_gradient(work: Workload, elements: int) -> int:
    """A weight gradient on its way to `.grad`: as the product gives it, and cast."""
    cast = work.precision.matmul != work.precision.gradient
    return elements * (BYTES[work.precision.gradient] + cast * BYTES[work.precision.matmul])


def _head_weight_cast(work: Workload) -> int:
    """[V, D] in the matmul dtype, if that is not what the master weight has."""
    if work.precision.matmul == work.precision.weights:
        return 0
    return _vocab(work) * work.model.dim * BYTES[work.precision.matmul]


def _all_gradients(work: Workload) -> int:
    return num_parameters(work.model) * BYTES[work.precision.gradient]


def _block_gradients(work: Workload, prefix: str) -> int:
    """Gradients of one block's parameters whose name begins with `prefix`."""
    shapes = block_shapes(work.model).items()
    return sum(prod(shape) for name, shape in shapes if name.startswith(prefix)) * BYTES[work.precision.gradient]


def _vocab(work: Workload) -> int:
    assert work.model.vocab_size is not None, "the vocabulary is settled by make_plan first"
    return work.model.vocab_size
