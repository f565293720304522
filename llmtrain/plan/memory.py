"""Forecast of one rank's memory: bytes by category at the instant of an update at which they sum to the most.

These instants can be the highest: the loss, the backward of the norm before the head, of the last block, of the first (from block
to block what is freed and what becomes a gradient change by the same amount) and of the embedding. The tensors a block keeps are
counted row by row in `plan/activations.py`; here they meet weights, gradients, optimizer state, head and loss. Not counted: what a
kernel allocates and frees inside itself, the allocator's rounding, the libraries.

Legend: B sequences of a micro-batch, T tokens of a sequence, n = B T, D channels, V vocabulary, F inner width, H query heads,
G key-value heads, C channels of a head.
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
    dropout_scratch,
    norm_statistics,
)
from llmtrain.plan.plan import MemoryForecast
from llmtrain.plan.precision import BYTES
from llmtrain.plan.shapes import block_shapes, num_parameters, parameter_shapes

INT64, INT32, BF16 = 8, 4, 2
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
    norm = ("final norm backward", _final_norm_instant(work))
    return dict((*_loss_instants(work), norm, *_block_instants(work), ("embedding backward", _embedding_instant(work))))


def _loss_instants(work: Workload) -> Iterator[tuple[str, MemoryForecast]]:
    """Head and loss, while every block still holds what its backward needs."""
    activations = work.model.num_layers * bytes_kept(work)
    grads = _gradients(work, 0)
    other = _inputs(work) + _final_norm(work)
    if isinstance(work.loss, ChunkedLoss):
        hidden = work.tokens * work.model.dim * BYTES[work.precision.matmul]  # [n, D]
        yield "chunked loss", _forecast(work, grads, activations, _chunked_loss(work, work.loss.chunk_size), other + hidden)
    else:
        for name, loss in _whole_loss(work).items():
            yield name, _forecast(work, grads, activations, loss, other)


def _whole_loss(work: Workload) -> dict[str, int]:
    """Logits of all tokens at once: the head weight, cast, its input with ignored rows blanked, and at each instant …"""
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
    chunk = min(chunk_size, n)
    following = min(chunk, n - chunk)
    softmax = 2 * vocab * exact  # of a token: scores and log-probabilities
    # Of a token: the gradient, in the memory of the log-probabilities, and as the matmul takes it.
    gradient = vocab * (exact + (matmul if matmul != exact else 0))
    # The next chunk's softmax is done before the names of the last one's tensors are reused.
    scores = max(chunk * softmax, chunk * gradient + following * softmax, chunk * gradient + vocab * dim * matmul)
    return _head_weight_cast(work) + _chunked_gradients(work) + chunk * dim * matmul + scores


def _chunked_gradients(work: Workload) -> int:
    """What the chunked loss holds between forward and backward: gradients of hidden states [n, D] and head weight [V, D]."""
    hidden = work.tokens * work.model.dim * BYTES[work.precision.matmul]
    return hidden + _vocab(work) * work.model.dim * BYTES[work.precision.weights]


def _final_norm_instant(work: Workload) -> MemoryForecast:
    """Every block still holds what its backward needs, and the norm's backward works on whole tensors in its own dtype."""
    model, precision = work.model, work.precision
    stream = work.tokens * model.dim  # [n, D]
    head = _vocab(work) * model.dim * BYTES[precision.gradient]
    done = 0 if model.tie_embeddings else head
    loss = stream * BYTES[precision.matmul] + head - done  # gradients of hidden states and, until the embedding's, the head
    # Normalised input and its products with the gradient; in a lower precision also the gradient, cast, and the result.
    exact, casts = BYTES[precision.norm], precision.norm != precision.residual
    scratch = stream * (2 * exact + (exact + BYTES[precision.residual] if casts else 0))
    grads = _gradients(work, done)
    return _forecast(work, grads, model.num_layers * bytes_kept(work), loss, _inputs(work) + _final_norm(work) + scratch)


def _block_instants(work: Workload) -> Iterator[tuple[str, MemoryForecast]]:
    """In the last block and in the first: its forward (again, if recomputed), its backward, feed-forward half before attention.

    Without recompute the first forward is where only dropout can make a peak; it is forecast with the gradients of the second.
    """
    model, gradient = work.model, BYTES[work.precision.gradient]
    head = _vocab(work) * model.dim * gradient
    loss = head if model.tie_embeddings else 0  # waits for the gradient of the embedding
    block = _block_gradients(work, "")
    inner = work.tokens * model.feed_forward.hidden_dim * BYTES[work.precision.matmul]
    for name, layer in (("last", model.num_layers - 1), ("first", 0)):
        below = layer * bytes_kept(work)
        done = (model.num_layers - 1 - layer) * block + (0 if model.tie_embeddings else head)
        grads = _gradients(work, done)
        # The gradient of the block's output, and of what was dropped from it.
        other = _inputs(work) + block_input_bytes(work) * (2 if model.dropout.residual > 0 else 1)
        yield f"{name} block forward", _forecast(work, grads, below + bytes_in_forward(work), loss, other)
        whole = below + bytes_in_backward(work, WHOLE_BLOCK) - inner  # the input of `down` is used up by then
        other = _inputs(work) + _feed_forward_gradients(work)
        yield f"{name} feed-forward backward", _forecast(work, grads, whole, loss, other)
        grads = _gradients(work, done + _block_gradients(work, "feed_forward."))
        half = below + bytes_in_backward(work, FEED_FORWARD_DONE)
        other = _inputs(work) + _attention_gradients(work)
        yield f"{name} attention backward", _forecast(work, grads, half, loss, other)


def _feed_forward_gradients(work: Workload) -> int:
    """Gradients alive together: stream, block output, and inner values: one beside a matrix, dropped ones, or all of them."""
    n, model, precision = work.tokens, work.model, work.precision
    matmul = BYTES[precision.matmul]
    inner, matrix = n * model.feed_forward.hidden_dim, model.feed_forward.hidden_dim * model.dim
    down_weight = inner * matmul + _matrix_gradient(work, matrix)
    through_dropout = inner * matmul + dropout_scratch(model.dropout.feed_forward, inner, matmul)
    around_activation = (3 if model.feed_forward.kind is FeedForwardKind.SWIGLU else 2) * inner * matmul
    return n * model.dim * (BYTES[precision.residual] + matmul) + max(down_weight, through_dropout, around_activation)


def _attention_gradients(work: Workload) -> int:
    """Gradients alive together: stream, and result and operands of attention, or its whole weights where these are written out."""
    n, heads, precision = work.tokens, work.model.attention, work.precision
    stream = n * work.model.dim * BYTES[precision.residual]
    queries = n * heads.num_heads * heads.head_dim
    if work.writes_out_scores:
        size = BYTES[precision.softmax]
        pairs = n * heads.num_heads * work.sequence_length  # B H T T
        # The gradient that comes out of dropout has the place of the dropped weights, which are gone.
        weights = max(2 * pairs * size, dropout_scratch(work.model.dropout.attention, pairs, size))
        return stream + weights + 2 * queries * size
    num_kv_heads = heads.num_heads if work.repeats_groups else heads.num_kv_heads
    operands = 2 * (queries + n * num_kv_heads * heads.head_dim) * BYTES[precision.matmul]
    return stream + operands + _scores_in_blocks(work, FUSED_ATTENTION[work.attention_backend])


def _scores_in_blocks(work: Workload, kernel: FusedAttention) -> int:
    """What a fused backward made of tensor operations holds at once, at its largest block; 0 for a real kernel."""
    if not kernel.scores_at_once:
        return 0
    heads, batch = work.model.attention, work.micro_batch_size
    matmul, exact = BYTES[work.precision.matmul], BYTES[work.precision.softmax]
    queries, width = _block_shape(work, kernel)
    chunk = min(batch, max(1, kernel.scores_at_once // (heads.num_heads * queries * width)))
    # Before the first block: products of result and gradient, and both of these, cast.
    products = (1 if matmul == exact else 3) * work.tokens * heads.num_heads * heads.head_dim * exact
    first, later = _largest_block(work, kernel, chunk, 0), _largest_block(work, kernel, min(chunk, batch - chunk), chunk)
    return max(first, later if batch > chunk else 0, products)


def _block_shape(work: Workload, kernel: FusedAttention) -> tuple[int, int]:
    """Queries of a block, and the keys that they see in the layer that reaches furthest."""
    length = work.sequence_length
    queries = min(kernel.queries_at_once, length)
    before = max(length if window is None else window - 1 for window in work.windows)  # besides those of the block itself
    return queries, min(length, before + queries)


def _largest_block(work: Workload, kernel: FusedAttention, sequences: int, sequences_before: int) -> int:
    """Tensors alive at the largest block of a chunk of sequences; before it came another chunk, or none (0)."""
    length, heads = work.sequence_length, work.model.attention
    matmul, exact = BYTES[work.precision.matmul], BYTES[work.precision.softmax]
    casts = matmul != exact
    queries, width = _block_shape(work, kernel)
    whole = length - length % queries
    keys, keys_before = min(width, whole), min(width, whole - queries)
    rows, pair_rows = (
        count * heads.num_heads * queries for count in (sequences, sequences if keys_before else sequences_before)
    )
    # Scores and their softmax, and that cast; weights and their gradient of the block before, perhaps that of other sequences.
    scores = rows * keys * (2 * exact + casts * matmul) + pair_rows * (keys_before or keys) * 2 * matmul
    documents = work.document_mask * sequences * queries * keys * exact
    causal = (1 + 2 * heads.num_heads // heads.num_kv_heads) * queries * width * exact  # repeated for the heads of a group
    # Queries, gradients of results, and the queries or a product of the next step.
    vectors = rows * heads.head_dim * 3 * matmul
    # Keys and values, the sums of their gradients (and one of the last chunk's), and the keys as the scores take them.
    per_sequence = heads.num_kv_heads * length * heads.head_dim
    vectors += per_sequence * (sequences * (2 * matmul + (2 + casts) * exact) + sequences_before * exact)
    return scores + documents + causal + vectors


def _embedding_instant(work: Workload) -> MemoryForecast:
    """The last gradient: dense [V, D], beside those it is added to (the head's when tied, the earlier micro-batches')."""
    model, precision = work.model, work.precision
    table = _vocab(work) * model.dim * BYTES[precision.gradient]
    loss = table if model.tie_embeddings else 0
    added = (model.tie_embeddings + _gradients_stay(work)) * table
    stream = work.tokens * model.dim * BYTES[precision.weights]
    return _forecast(work, _gradients(work, _all_gradients(work)), 0, loss, _inputs(work) + stream + added)


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
    uses_rotary = work.model.position is PositionKind.ROTARY
    return batches + uses_rotary * rotary + mask_bytes(work)


def mask_bytes(work: Workload) -> int:
    """One mask for each window of a layer, as the attention backend takes it."""
    reference = work.attention_backend == REFERENCE
    rows = work.micro_batch_size if work.document_mask else 1
    matrix = rows * work.sequence_length**2 * (BOOL if reference else BYTES[work.precision.matmul])  # [B, 1, T, T] or [T, T]
    if reference:
        return len(work.windows) * matrix
    if FUSED_ATTENTION[work.attention_backend].mask_as_scores:
        return matrix * sum(work.document_mask or window is not None for window in work.windows)
    return len(work.windows) * work.document_mask * work.tokens * INT32  # ids or lengths of the documents, at most


def _final_norm(work: Workload) -> int:
    """What the norm before the head saves: the stream and statistics; its output is gone once the loss has a copy."""
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


def _gradients(work: Workload, done: int) -> int:
    """Gradients, the buckets they are summed over ranks in, and what is on its way, when backward has made `done` bytes of them.

    How fast buckets travel is not known here, so everything that is done counts as still on its way.
    """
    own = _all_gradients(work) if _gradients_stay(work) else done
    if work.ddp is None:
        return own
    beside = 0 if work.ddp.gradient_as_bucket_view else _all_gradients(work)
    compressed = done * BF16 // BYTES[work.precision.gradient] if work.ddp.compression == "bf16" else 0
    return own + beside + compressed


def _gradients_stay(work: Workload) -> bool:
    """Whether all gradients are there before backward makes them: of earlier micro-batches, or as places in buckets."""
    return work.num_microbatches > 1 or (work.ddp is not None and work.ddp.gradient_as_bucket_view)


def _all_gradients(work: Workload) -> int:
    return num_parameters(work.model) * BYTES[work.precision.gradient]


def _block_gradients(work: Workload, prefix: str) -> int:
    """Gradients of one block's parameters whose name begins with `prefix`."""
    shapes = block_shapes(work.model).items()
    return sum(prod(shape) for name, shape in shapes if name.startswith(prefix)) * BYTES[work.precision.gradient]


def _vocab(work: Workload) -> int:
    assert work.model.vocab_size is not None, "the vocabulary is settled by make_plan first"
    return work.model.vocab_size
