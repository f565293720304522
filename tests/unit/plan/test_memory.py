"""The memory forecast against what autograd saves, byte for byte, and what the storage ledger measures in a whole update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from llmtrain.config.typed import AdamWConfig, ChunkedLoss, Config, RecomputeConfig, RecomputeKind
from llmtrain.config.typed_data import Packing
from llmtrain.data.loader import Batch
from llmtrain.data.synthetic import SyntheticRows
from llmtrain.dist.position import Position
from llmtrain.metrics.memory import MemorySummary, StorageLedger
from llmtrain.model.init import materialize
from llmtrain.model.transformer import Transformer
from llmtrain.ops import attention_sdpa
from llmtrain.ops.attention import attention_backend
from llmtrain.ops.blocked_attention import QUERIES_PER_BLOCK, SCORES_PER_BLOCK
from llmtrain.ops.cross_entropy import build_loss
from llmtrain.ops.random import DropoutKey
from llmtrain.optim.build import build_optimizer
from llmtrain.parallel.data import LocalGradients
from llmtrain.parallel.recompute import OPERATION_FAMILIES, apply_recompute
from llmtrain.plan import activations
from llmtrain.plan.activations import FUSED_ATTENTION, Workload, block_rows, bytes_kept
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.memory import forecast_memory, instants, mask_bytes
from llmtrain.plan.precision import PRECISION_TABLES
from llmtrain.train.forward_backward import PlainForwardBackward

BACKENDS = ("reference", "sdpa", "blocked", "sdpa:math")
"""What trains on a CPU; the kernel of sdpa after the colon."""
ADAMW = AdamWConfig(lr=1e-3, weight_decay=0.1, clip_norm=None, beta1=0.9, beta2=0.95, eps=1e-8)
TINY = {"model.dim": 128, "model.num_layers": 4, "model.attention.num_heads": 4, "model.vocab_size": 258}
LONG = TINY | {"data.sequence_length": 512}
SMALL = {"model.dim": 320, "model.num_layers": 8, "model.attention.num_heads": 5, "model.vocab_size": 258}
GPT2 = {
    "model.position": "learned",
    "model.norm": "layer",
    "model.tie_embeddings": True,
    "model.attention.bias": True,
    "model.attention.output_bias": True,
    "model.feed_forward.kind": "gelu",
    "model.feed_forward.bias": True,
}
WINDOWS = {"model.attention.window": 40, "model.attention.window_pattern": "SLSS"}
DROPOUT = {"model.dropout.residual": 0.1, "model.dropout.feed_forward": 0.1, "model.dropout.embedding": 0.1}
FAMILIES = {
    "llama": {},
    "gpt2": GPT2,
    "llama_grouped_qk_norm": {"model.attention.num_kv_heads": 1, "model.attention.qk_norm": True},
    "gpt2_qk_norm": GPT2 | {"model.attention.qk_norm": True},
    "llama_dropout": DROPOUT,
    "gpt2_dropout": GPT2 | DROPOUT,
    "attention_dropout": {"model.dropout.attention": 0.1},
    "windows": WINDOWS,
    "gpt2_one_window": GPT2 | {"model.attention.window": 33},
}


def workload(config: Config, precision: str, backend: str, batch: int, count: int = 1, *, documents: bool = False) -> Workload:
    backend, _, kernel = backend.partition(":")
    return Workload(
        model=config.model,
        precision=PRECISION_TABLES[precision],
        micro_batch_size=batch,
        num_microbatches=count,
        sequence_length=config.data.sequence_length,
        loss=config.loss,
        recompute=config.recompute,
        attention_backend=backend,
        attention_kernel=kernel or "auto",
        document_mask=documents,
    )


def build(work: Workload) -> Transformer:
    probability = work.model.dropout.attention
    attention = attention_backend(work.attention_backend, kernel=work.attention_kernel, dropout_probability=probability)
    model = Transformer(work.model, work.precision, attention)
    materialize(model, seed=0, device="cpu")
    apply_recompute(model, work.recompute)
    return model.train()


def random_batch(work: Workload, packing: Packing | None = None) -> Batch:
    """What the loader sends under a packing; by default one that goes with the workload's mask."""
    packing = packing or (Packing.DOCUMENT if work.document_mask else Packing.CONCAT)
    vocab_size, length, rows = work.model.vocab_size or 0, work.sequence_length, np.arange(work.micro_batch_size)
    source = SyntheticRows("train", num_rows=99, vocab_size=vocab_size, sequence_length=length, packing=packing, seed=0)
    read = source.read(rows)
    tokens, targets = torch.from_numpy(read.tokens), torch.from_numpy(read.targets)
    positions = None if read.positions is None else torch.from_numpy(read.positions)
    documents = None if read.document_ids is None else torch.from_numpy(read.document_ids)
    return Batch(tokens, targets, positions, documents, torch.from_numpy(rows))


def bytes_saved(work: Workload) -> int:
    """Bytes of the storages that autograd holds after a forward, parameters excepted, each storage once."""
    model, batch = build(work), random_batch(work)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch.tokens, batch.positions, batch.document_ids, DropoutKey(0, 1, batch.sample_index))
    return sum(storage.nbytes() for storage in saved.values())


def bytes_held(work: Workload) -> int:
    """Bytes that blocks made and that outlive a forward, also those selective recompute keeps without telling autograd."""
    model, batch, ledger = build(work), random_batch(work), StorageLedger(torch.device("cpu"))
    ledger.watch(model)
    with ledger.window():
        hidden = model(batch.tokens, batch.positions, batch.document_ids, DropoutKey(0, 1, batch.sample_index))
    with ledger.window():  # nothing happens in it, so its peak is what was there at its start
        pass
    del hidden
    summary = ledger.summary()
    assert summary is not None
    return summary.at_peak["activations"]


def measure_update(work: Workload, packing: Packing | None = None) -> MemorySummary:
    """The second update of a run, as the engine makes it, under the ledger."""
    model = build(work)
    materialize(model, seed=0, device="cpu")
    optimizer = build_optimizer(ADAMW, model.named_parameters())
    ledger = StorageLedger(torch.device("cpu"))
    ledger.watch(model)
    ledger.adopt(optimizer.state().values(), "optimizer")
    strategy = PlainForwardBackward(model, build_loss(work.loss, work.precision), ledger, LocalGradients(model), Position())
    for update in (1, 2):
        with ledger.window():
            batches = [random_batch(work, packing) for _ in range(work.num_microbatches)]
            strategy.run(batches, seed=0, update=update, num_targets=work.tokens * work.num_microbatches)
            optimizer.step(1e-3)
            optimizer.zero_grad()
            del batches
    summary = ledger.summary()
    assert summary is not None
    return summary


@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_saves_what_its_rows_say(make_config, family, precision, backend, documents) -> None:
    """One more block means `bytes_kept` more: exactly, because every row is a tensor and every tensor a row."""
    if family == "attention_dropout" and backend != "reference":
        pytest.skip("attention dropout is refused on this backend")
    for size, kind in ((TINY, "none"), (TINY, "full"), (SMALL, "none")):
        config = make_config(size | FAMILIES[family] | {"data.sequence_length": 48, "recompute.kind": kind})
        work = workload(config, precision, backend, 2, documents=documents)
        # From two layers on every window has its mask, which is no block's.
        two, three = (replace(work, model=replace(work.model, num_layers=layers)) for layers in (2, 3))
        assert bytes_saved(three) - bytes_saved(two) == bytes_kept(work)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recomputed_block_keeps_what_its_rows_say(make_config, family, precision, backend) -> None:
    """Each family of operations alone: the results it keeps are the rows that carry its name."""
    if family == "attention_dropout" and backend != "reference":
        pytest.skip("attention dropout is refused on this backend")
    base = workload(make_config(TINY | FAMILIES[family] | {"data.sequence_length": 48}), precision, backend, 2)
    for kept in OPERATION_FAMILIES:
        work = replace(base, recompute=RecomputeConfig(RecomputeKind.SELECTIVE, (kept,)))
        two, three = (replace(work, model=replace(work.model, num_layers=layers)) for layers in (2, 3))
        assert bytes_held(three) - bytes_held(two) == bytes_kept(work), kept


def tensors_of(mask: object) -> list[torch.Tensor]:
    """The tensors a mask consists of."""
    if isinstance(mask, torch.Tensor):
        return [mask]
    return [value for value in vars(mask).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("length", [32, 48])
@pytest.mark.parametrize("family", ["llama", "windows", "gpt2_one_window"])
def test_masks_take_what_is_forecast(make_config, monkeypatch, family, length, precision, backend, documents) -> None:
    """Made once a forward: nothing of them is counted with a block."""
    config = make_config(TINY | FAMILIES[family] | {"data.sequence_length": length})
    work = workload(config, precision, backend, 2, documents=documents)
    model, batch, made = build(work), random_batch(work), []
    plain = model.attention.make_mask
    monkeypatch.setattr(
        model, "attention", replace(model.attention, make_mask=lambda asked: made.append(plain(asked)) or made[-1])
    )
    model(batch.tokens, batch.positions, batch.document_ids)
    assert sum(tensor.nbytes for mask in made for tensor in tensors_of(mask)) == mask_bytes(work)


UPDATES = [
    # size, family, precision, backend, recompute, loss, micro-batch, micro-batches, documents
    (TINY, "llama", "fp32", "sdpa", "none", "reference", 2, 1, False),
    (TINY, "llama", "bf16", "reference", "none", "reference", 4, 2, True),
    (TINY, "llama_dropout", "fp32", "sdpa", "full", "reference", 4, 2, False),
    (TINY, "gpt2", "bf16", "sdpa", "selective", "chunked", 4, 2, False),
    (TINY, "gpt2", "fp32", "reference", "selective", "reference", 4, 1, False),
    (TINY | {"model.vocab_size": 4096}, "gpt2", "fp32", "sdpa", "full", "chunked", 1, 1, False),
    (TINY | {"model.vocab_size": 4096}, "llama", "bf16", "sdpa", "full", "chunked", 2, 2, False),
    (TINY | {"model.vocab_size": 4096}, "llama", "bf16", "sdpa", "none", "reference", 2, 1, False),
    (SMALL, "llama", "bf16", "sdpa", "none", "reference", 4, 1, False),
    (TINY, "llama_grouped_qk_norm", "fp32", "sdpa", "selective", "chunked", 4, 2, False),
    (SMALL, "gpt2", "bf16", "reference", "full", "reference", 2, 2, False),
    (SMALL, "gpt2", "fp32", "sdpa", "none", "chunked", 1, 1, True),
    (TINY, "gpt2_dropout", "bf16", "sdpa", "none", "reference", 4, 1, False),
    (TINY, "attention_dropout", "fp32", "reference", "none", "reference", 4, 1, False),
    (TINY, "attention_dropout", "bf16", "reference", "full", "chunked", 4, 2, False),
    (TINY, "llama", "bf16", "blocked", "none", "reference", 4, 1, False),
    (TINY, "gpt2", "fp32", "blocked", "full", "reference", 4, 2, True),
    (TINY, "llama_grouped_qk_norm", "bf16", "blocked", "full", "chunked", 32, 2, False),
    (TINY | {"model.num_layers": 1}, "llama", "bf16", "sdpa", "none", "chunked", 32, 2, False),
    (TINY | {"model.vocab_size": 4096}, "gpt2", "bf16", "sdpa", "none", "chunked", 2, 2, False),
    (TINY, "llama_dropout", "bf16", "blocked", "full", "chunked", 8, 2, False),
    (TINY, "windows", "bf16", "blocked", "none", "reference", 4, 1, False),
    (TINY, "windows", "fp32", "blocked", "full", "chunked", 8, 2, True),
    (TINY, "gpt2_one_window", "fp32", "blocked", "none", "chunked", 4, 1, False),
    (LONG, "gpt2_one_window", "fp32", "blocked", "full", "chunked", 4, 1, False),
    (LONG, "gpt2_one_window", "bf16", "blocked", "full", "chunked", 16, 1, True),
    (LONG | {"model.num_layers": 2}, "windows", "bf16", "blocked", "full", "chunked", 4, 1, False),
    (LONG, "windows", "fp32", "sdpa", "full", "chunked", 2, 1, True),
    (TINY, "windows", "fp32", "sdpa", "none", "reference", 4, 1, False),
    (TINY, "windows", "bf16", "sdpa", "selective", "chunked", 4, 2, True),
    (TINY, "windows", "bf16", "reference", "full", "chunked", 4, 1, False),
    (TINY, "gpt2_one_window", "fp32", "reference", "none", "reference", 2, 2, True),
    (TINY, "llama", "bf16", "sdpa:math", "none", "reference", 4, 1, False),
    (TINY, "windows", "fp32", "sdpa:math", "full", "reference", 4, 2, True),
]


@pytest.mark.parametrize("case", UPDATES, ids=lambda case: "-".join(map(str, case[1:])))
def test_forecast_of_an_update_is_what_the_ledger_measures(make_config, case) -> None:
    size, family, precision, backend, recompute, loss, batch, count, documents = case
    words = {"data.sequence_length": 128} | size | FAMILIES[family] | {"recompute.kind": recompute, "loss.kind": loss}
    if loss == "chunked":
        words["loss.chunk_size"] = 100
    work = workload(make_config(words), precision, backend, batch, count, documents=documents)
    forecast, measured = forecast_memory(work), measure_update(work)
    assert forecast.params == measured.at_peak["params"]
    assert forecast.optimizer == measured.at_peak["optimizer"]
    # Too low is worse than too high, so the band is not symmetric.
    assert 0.98 * measured.peak_bytes < forecast.total < 1.08 * measured.peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "family", [{}, {"model.attention.qk_norm": True}, WINDOWS, GPT2], ids=["plain", "qk_norm", "windows", "gpt2"]
)
def test_repeated_key_and_value_heads_are_forecast(make_config, monkeypatch, family, precision) -> None:
    """What sdpa does on CUDA with grouped heads and a mask or fp32, made to happen here."""
    grouped = LONG | {"model.attention.num_heads": 8, "model.attention.num_kv_heads": 1}
    base = workload(make_config(grouped | family), precision, "sdpa", 4)
    assert not base.repeats_groups
    monkeypatch.setattr(attention_sdpa, "repeats_groups", lambda **_: True)
    monkeypatch.setattr(activations, "repeats_groups", lambda **_: True)
    assert base.repeats_groups
    for kind, keep in (("none", ()), ("selective", ("attention",)), ("selective", ("matmul",))):
        work = replace(base, recompute=RecomputeConfig(RecomputeKind(kind), keep))
        two, three = (replace(work, model=replace(work.model, num_layers=layers)) for layers in (2, 3))
        measure = bytes_saved if kind == "none" else bytes_held
        assert measure(three) - measure(two) == bytes_kept(work)
    wide = grouped | family | {"model.attention.head_dim": 64, "model.feed_forward.hidden_dim": 64, "recompute.kind": "full"}
    peaks_in_attention = workload(make_config(wide | {"loss.kind": "chunked", "loss.chunk_size": 64}), precision, "sdpa", 4, 2)
    for work in (base, peaks_in_attention):
        measured = measure_update(work).peak_bytes
        assert 0.98 * measured < forecast_memory(work).total < 1.08 * measured


def test_when_key_and_value_heads_are_repeated(make_config) -> None:
    grouped = TINY | {"model.attention.num_kv_heads": 1}
    rows = replace(workload(make_config(grouped), "bf16", "sdpa", 1), device="cuda")
    windowed = replace(workload(make_config(grouped | WINDOWS), "bf16", "sdpa", 1), device="cuda")
    repeated = (
        replace(rows, document_mask=True),
        replace(rows, precision=PRECISION_TABLES["fp32"]),
        replace(rows, attention_kernel="memory_efficient"),
        windowed,
    )
    assert all(work.repeats_groups for work in repeated)
    as_they_are = (
        rows,
        replace(windowed, device="cpu"),
        replace(windowed, sequence_length=40),  # no sequence is longer than the window
        replace(windowed, attention_kernel="cudnn"),
        replace(windowed, attention_backend="flash_attn"),
        replace(workload(make_config(TINY | WINDOWS), "bf16", "sdpa", 1), device="cuda"),
    )
    assert not any(work.repeats_groups for work in as_they_are)


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forecast_of_a_plan_knows_which_packings_send_document_ids(
    make_config, make_machine, packing, backend, precision
) -> None:
    words = TINY | {
        "data.packing": packing.value,
        "data.sequence_length": 256,
        "attention.backend": backend.partition(":")[0],
        "attention.kernel": backend.partition(":")[2] or "auto",
        "precision.kind": precision,
        "accumulation.global_batch_size": 2,
        "accumulation.micro_batch_size": 2,
    }
    config = make_config(words)
    plan = make_plan(config, make_machine(options={}))
    measured = measure_update(workload(config, precision, backend, 2), packing)
    assert 0.98 * measured.peak_bytes < plan.forecast.total < 1.08 * measured.peak_bytes


def test_sizes_of_attention_blocks_are_those_of_the_operation() -> None:
    kernel = FUSED_ATTENTION["blocked"]
    assert (kernel.scores_at_once, kernel.queries_at_once) == (SCORES_PER_BLOCK, QUERIES_PER_BLOCK)


def test_static_memory_is_sixteen_bytes_per_parameter(make_config) -> None:
    """fp32 AdamW: weight 4, gradient 4, two moments 8; bf16 keeps fp32 masters, so the same."""
    for precision in ("fp32", "bf16"):
        work = workload(make_config(SMALL), precision, "sdpa", 1, 2)
        forecast = instants(work)["embedding backward"]
        num_parameters = forecast.params // 4
        tensors = 3 + 9 * 8  # embedding, head, final norm; nine per block
        assert forecast.grads == 4 * num_parameters
        assert forecast.optimizer == 8 * num_parameters + 4 * tensors


def test_what_each_option_saves(make_config) -> None:
    base = workload(make_config(TINY | {"data.sequence_length": 512}), "fp32", "sdpa", 8)
    full = replace(base, recompute=RecomputeConfig(RecomputeKind.FULL, ()))
    selective = replace(base, recompute=RecomputeConfig(RecomputeKind.SELECTIVE, ("attention", "matmul")))
    assert bytes_kept(full) == 8 * 512 * 128 * 4
    assert bytes_kept(full) < bytes_kept(selective) < bytes_kept(base)
    assert forecast_memory(full).total < forecast_memory(selective).total < forecast_memory(base).total
    assert forecast_memory(replace(base, precision=PRECISION_TABLES["bf16"])).total < forecast_memory(base).total

    wide = replace(full, model=replace(full.model, vocab_size=32000))
    chunked = replace(wide, loss=ChunkedLoss(256))
    assert forecast_memory(chunked).loss < forecast_memory(wide).loss / 4

    weights = {row.tensor: row.bytes for row in block_rows(replace(base, attention_backend="reference"))}["attention weights"]
    assert weights == 8 * 4 * 512 * 512 * 4
