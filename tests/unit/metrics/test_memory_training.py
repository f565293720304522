"""The storage ledger on training steps: equal to the allocator, exact by category, invisible in the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from llmtrain.config.typed import (
    AttentionShapeConfig,
    ChunkedLoss,
    DropoutConfig,
    FeedForwardConfig,
    FeedForwardKind,
    LossConfig,
    ModelConfig,
    NormKind,
    PositionKind,
    RecomputeConfig,
    RecomputeKind,
    ReferenceLoss,
)
from llmtrain.metrics.memory import Ledger, MemorySummary, NoLedger, StorageLedger
from llmtrain.model.init import materialize
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.ops.random import DropoutKey
from llmtrain.parallel.recompute import apply_recompute
from llmtrain.plan.precision import PRECISION_TABLES

CPU = torch.device("cpu")
MARKER_BYTES = 12345
"""Size of an allocation made only to be found among the profiler's events."""


@dataclass(frozen=True)
class Case:
    """One small decoder and how a step of it is run."""

    vocab_size: int = 512
    dim: int = 64
    num_layers: int = 2
    rows: int = 2
    sequence_length: int = 64
    precision: str = "fp32"
    recompute: RecomputeConfig = RecomputeConfig(RecomputeKind.NONE, ())
    fused: bool = True
    num_microbatches: int = 1
    loss: LossConfig = ReferenceLoss()
    tied: bool = False
    dropout: float = 0.0

    def model_config(self) -> ModelConfig:
        return ModelConfig(
            dim=self.dim,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            max_positions=self.sequence_length,
            position=PositionKind.ROTARY,
            norm=NormKind.RMS,
            norm_eps=1e-5,
            tie_embeddings=self.tied,
            init_std=0.02,
            depth_scaled_init=True,
            attention=AttentionShapeConfig(4, 2, self.dim // 4, False, False, False),
            feed_forward=FeedForwardConfig(FeedForwardKind.SWIGLU, 3 * self.dim, False),
            rope_theta=1e4,
            dropout=DropoutConfig(0.0, 0.0, self.dropout, 0.0),
        )


class Trainee:
    """Model, loss, optimizer and tokens of a case; `step` is one update that tells the ledger what an engine tells it."""

    def __init__(self, case: Case, ledger: Ledger) -> None:
        table = PRECISION_TABLES[case.precision]
        self.model = Transformer(case.model_config(), table, "sdpa")
        materialize(self.model, seed=0, device=CPU)
        apply_recompute(self.model, case.recompute)
        self.loss = build_loss(case.loss, table)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=case.fused, foreach=not case.fused)
        generator = torch.Generator().manual_seed(0)
        shape = (case.num_microbatches, case.rows, case.sequence_length)
        self.tokens = torch.randint(0, case.vocab_size, shape, generator=generator)
        self.ledger = ledger
        ledger.watch(self.model)
        ledger.adopt([self.tokens], "other")

    def forward_backward(self) -> float:
        total = 0.0
        for index, tokens in enumerate(self.tokens):
            samples = torch.arange(len(tokens)) + index * len(tokens)
            hidden = self.model(tokens, dropout_key=DropoutKey(0, 1, samples))
            with self.ledger.loss(hidden):
                loss = self.loss(hidden.flatten(0, 1), self.model.head_weight, tokens.flatten())
            with self.ledger.backward():
                (loss / tokens.numel()).backward()
            total += loss.item()
        return total

    def step(self) -> float:
        loss = self.forward_backward()
        self.optimizer.step()
        self.ledger.adopt([tensor for state in self.optimizer.state.values() for tensor in state.values()], "optimizer")
        self.optimizer.zero_grad(set_to_none=True)
        return loss


FULL = RecomputeConfig(RecomputeKind.FULL, ())
SELECTIVE = RecomputeConfig(RecomputeKind.SELECTIVE, ("attention", "matmul"))


def peak_by_allocator(work: Callable[[], Any]) -> tuple[int, int]:
    """What torch's CPU allocator held at most after the last and after the next to last marker inside `work`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peaks = 0, []
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.nbytes() == MARKER_BYTES:
            peaks.append(held)
        held += event.nbytes()
        peaks = [*peaks[:-1], max(peaks[-1], held)] if peaks else peaks
    assert len(peaks) == 2
    return peaks[0], peaks[1]


@pytest.mark.parametrize(
    "case",
    [
        Case(vocab_size=8192, dim=128, rows=2, sequence_length=256),
        Case(vocab_size=2048, dim=256, rows=4, sequence_length=256, precision="bf16", recompute=FULL, fused=False),
        Case(vocab_size=256, dim=256, num_layers=4, rows=4, sequence_length=256, recompute=SELECTIVE, num_microbatches=2),
        Case(vocab_size=16384, dim=128, rows=2, sequence_length=256, precision="bf16", recompute=SELECTIVE, dropout=0.1),
        Case(vocab_size=4096, dim=256, rows=4, sequence_length=256, loss=ChunkedLoss(256), tied=True, fused=False),
    ],
    ids=[
        "fp32-fused",
        "bf16-full-foreach",
        "fp32-selective-accumulation",
        "bf16-selective-dropout",
        "fp32-chunked-tied-foreach",
    ],
)
def test_total_equals_allocator(case: Case) -> None:
    summaries: list[MemorySummary | None] = []

    def two_steps() -> None:
        ledger = StorageLedger(CPU)
        trainee = Trainee(case, ledger)
        for _ in range(2):
            torch.empty(MARKER_BYTES, dtype=torch.uint8)
            with ledger.window():
                trainee.step()
            summaries.append(ledger.summary())

    for summary, allocator in zip(summaries, peak_by_allocator(two_steps), strict=False):
        assert summary is not None
        assert summary.peak_bytes == pytest.approx(allocator, rel=1e-3)
        assert sum(summary.at_peak.values()) == summary.peak_bytes
    assert len(summaries) == 2


@pytest.mark.parametrize("recompute", [RecomputeConfig(RecomputeKind.NONE, ()), FULL, SELECTIVE], ids=lambda r: r.kind.value)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ledger_does_not_change_the_results(recompute: RecomputeConfig, precision: str) -> None:
    def train(ledger: Ledger) -> tuple[list[float], list[Tensor], list[Tensor]]:
        trainee = Trainee(Case(precision=precision, recompute=recompute, num_microbatches=2, dropout=0.1), ledger)
        losses = []
        for _ in range(2):
            with ledger.window():
                losses.append(trainee.step())
        with ledger.window():
            losses.append(trainee.forward_backward())
        parameters = list(trainee.model.parameters())
        return losses, parameters, [parameter.grad for parameter in parameters if parameter.grad is not None]

    with_ledger, without = train(StorageLedger(CPU)), train(NoLedger())
    assert with_ledger[0] == without[0]
    assert all(torch.equal(a, b) for tensors in (1, 2) for a, b in zip(with_ledger[tensors], without[tensors], strict=True))


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def second_step(case: Case) -> tuple[Trainee, MemorySummary]:
    ledger = StorageLedger(CPU)
    trainee = Trainee(case, ledger)
    for _ in range(2):
        with ledger.window():
            trainee.step()
    summary = ledger.summary()
    assert summary is not None
    return trainee, summary


def test_params_grads_and_optimizer_are_exact_to_the_byte() -> None:
    # Foreach AdamW has its highest instant inside the update, when every gradient and all of its temporaries exist.
    trainee, summary = second_step(Case(fused=False, sequence_length=8))
    params = bytes_of(list(trainee.model.parameters()))
    states = [tensor for state in trainee.optimizer.state.values() for tensor in state.values()]
    assert summary.at_peak["params"] == params
    assert summary.at_peak["grads"] == params
    assert summary.at_peak["optimizer"] == bytes_of(states) == 2 * params + 4 * len(trainee.optimizer.state)
    assert summary.at_peak["other"] > params, "the temporaries of the update are no optimizer state"


def test_logits_and_what_is_made_of_them_are_loss() -> None:
    case = Case(vocab_size=4096, dim=32, rows=2, sequence_length=64)
    trainee, summary = second_step(case)
    logits = case.rows * case.sequence_length * case.vocab_size * 4
    # At the highest instant: log-softmax, its gradient and the gradient of the logits.
    assert summary.at_peak["loss"] == pytest.approx(3 * logits, rel=0.02)
    assert summary.loss_peak_bytes == summary.at_peak["loss"]
    # Everything that is neither weights, states, loss nor block results is small: hidden states and token ids.
    hidden = case.rows * case.sequence_length * case.dim * 4
    assert summary.at_peak["other"] <= 8 * hidden


def test_backward_below_the_head_is_no_loss() -> None:
    case = Case(vocab_size=64, num_layers=6)
    summary = second_step(case)[1]
    logits = case.rows * case.sequence_length * case.vocab_size * 4
    # Gradients of hidden states are as large as the logits here; only the first of them is made by head and loss.
    assert summary.loss_peak_bytes < 5 * logits


def test_chunked_loss_holds_less() -> None:
    whole = second_step(Case(vocab_size=4096, dim=32, rows=4))[1]
    chunked = second_step(Case(vocab_size=4096, dim=32, rows=4, loss=ChunkedLoss(32)))[1]
    assert chunked.loss_peak_bytes < whole.loss_peak_bytes / 2


def test_activations_shrink_with_recompute_and_recomputed_ones_count() -> None:
    kept, selective, full = (
        second_step(Case(num_layers=6, recompute=recompute))[1].activations_peak_bytes
        for recompute in (RecomputeConfig(RecomputeKind.NONE, ()), SELECTIVE, FULL)
    )
    assert full < selective < kept
    # One block recomputed (about a sixth of everything) and the inputs of all blocks.
    assert kept / 6 < full < kept / 2


def test_hooks_are_balanced_when_checkpointing_cuts_a_forward_short() -> None:
    ledger = StorageLedger(CPU)
    trainee = Trainee(Case(recompute=FULL), ledger)

    def make_something_large(gradient: Tensor) -> None:
        torch.empty(5_000_000, dtype=torch.uint8)

    # The gradient of the embedding's result comes after every block has been recomputed.
    trainee.model.embed.register_forward_hook(lambda module, args, output: output.register_hook(make_something_large) and None)
    with ledger.window():
        trainee.forward_backward()
    summary = ledger.summary()
    assert summary is not None
    assert summary.at_peak["other"] >= 5_000_000
    assert summary.activations_peak_bytes < 5_000_000


def test_ledger_closes_itself_after_its_windows_and_leaves_the_model_alone() -> None:
    ledger = StorageLedger(CPU, num_windows=2)
    trainee = Trainee(Case(), ledger)
    results = []
    for _ in range(3):
        with ledger.window():
            trainee.step()
        results.append(ledger.summary())
    assert results[0] is not None and results[1] is not None and results[2] is None
    for module in trainee.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for parameter in trainee.model.parameters():
        assert not parameter._post_accumulate_grad_hooks
