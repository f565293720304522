"""The Transformer as a whole: names, dtypes, what a position may know of others, dropout by place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import models as shapes
from helpers.attention import HERE, TRAINED_HERE, build_here
from helpers.models import DROPOUT, LLAMA_LIKE, WINDOWED, build, gradients, random_tokens, relative_error
from torch import Tensor

from llmtrain.config.errors import ConfigError
from llmtrain.config.typed import ChunkedLoss, LossConfig, RecomputeConfig, RecomputeKind, ReferenceLoss
from llmtrain.model.transformer import Transformer
from llmtrain.ops.attention import AttentionBackend, attention_backend
from llmtrain.ops.attention_masks import AttentionDropout, MaskRequest
from llmtrain.ops.cross_entropy import IGNORE_INDEX, build_loss
from llmtrain.ops.random import DropoutKey
from llmtrain.parallel.recompute import apply_recompute
from llmtrain.plan.precision import PRECISION_TABLES
from llmtrain.plan.shapes import parameter_shapes

BACKENDS = ("reference", "sdpa", "blocked")
SHAPES = shapes.SHAPES | {"windows": WINDOWED}
LOSSES: dict[str, LossConfig] = {"reference": ReferenceLoss(), "chunked": ChunkedLoss(5)}


def logits(model: Transformer, tokens: Tensor, **kwargs: Tensor) -> Tensor:
    found: Tensor = model.logits(model(tokens, **kwargs))
    return found


def loss_of(model: Transformer, hidden: Tensor, targets: Tensor, loss: LossConfig | None = None) -> Tensor:
    return build_loss(loss or ReferenceLoss(), model.precision)(hidden.flatten(0, 1), model.head_weight, targets.flatten())


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_plan(shape: str) -> None:
    found = {name: tuple(parameter.shape) for name, parameter in build(SHAPES[shape]).named_parameters()}
    assert found == parameter_shapes(SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "kernel"), HERE)
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_backends_agree(shape: str, name: str, kernel: str, packed: bool) -> None:
    tokens = random_tokens(2, 40)
    ids = (torch.arange(40) // 11).repeat(2, 1) if packed else None
    expected, found = (
        logits(build(SHAPES[shape], backend=backend), tokens, document_ids=ids)
        for backend in ("reference", build_here(name, kernel))
    )
    assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "kernel"), TRAINED_HERE)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_backends_agree(shape: str, name: str, kernel: str, packed: bool) -> None:
    tokens, targets = random_tokens(2, 40), random_tokens(2, 40, seed=1)
    ids = (torch.arange(40) // 11).repeat(2, 1) if packed else None
    results = []
    for backend in ("reference", build_here(name, kernel)):
        model = build(SHAPES[shape], backend=backend)
        loss_of(model, model(tokens, document_ids=ids), targets).backward()
        results.append(gradients(model))
    for name_, expected in results[0].items():
        if not name_.endswith("k.bias"):
            assert relative_error(results[1][name_], expected) < 1e-5, name_


@torch.no_grad()
def test_a_layer_sees_as_far_as_its_window() -> None:
    """Layers of windows 4 and 3 together reach 4 + 3 - 1 keys; without a window, all."""
    for windows, reach in (((4, 3), 6), ((1,), 1), ((None, 3), 40), ((40,), 40)):
        config = replace(LLAMA_LIKE, attention=replace(LLAMA_LIKE.attention, windows=windows))
        for backend in BACKENDS:
            model, tokens = build(config, backend=backend), random_tokens(1, 40)
            other = tokens.clone()
            other[0, 0] = (other[0, 0] + 1) % config.vocab_size
            differs = (logits(model, tokens) != logits(model, other)).any(-1)[0]
            assert differs[:reach].all() and not differs[reach:].any()


class _Counter:
    """A backend that counts the masks it makes and remembers those it is given."""

    def __init__(self, name: str) -> None:
        plain = attention_backend(name)
        self.made: list[object] = []
        self.used: list[object] = []

        def make_mask(request: MaskRequest) -> object:
            self.made.append(plain.make_mask(request))
            return self.made[-1]

        def function(query: Tensor, key: Tensor, value: Tensor, mask: object, drop: AttentionDropout) -> Tensor:
            self.used.append(mask)
            return plain.function(query, key, value, mask, drop)

        self.backend = AttentionBackend(plain.name, plain.kernel, make_mask, function)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "count"), [(16, 2), (4, 1)])
def test_masks_are_made_once_a_forward(name: str, packed: bool, length: int, count: int) -> None:
    """Four layers of windows 4, none, 4, 4 share two masks, and one where a row is no longer than the window; recompute makes none."""
    counter = _Counter(name)
    model = build(WINDOWED, backend=counter.backend)
    apply_recompute(model, RecomputeConfig(RecomputeKind.FULL, ()))
    ids = torch.zeros(2, length, dtype=torch.long) if packed else None
    model(random_tokens(2, length), document_ids=ids).sum().backward()
    assert len(counter.made) == count and len(counter.used) == 2 * WINDOWED.num_layers
    assert all(any(mask is made for made in counter.made) for mask in counter.used)
    assert [mask is counter.made[0] for mask in counter.used[:4]] == ([True, False, True, True] if count == 2 else [True] * 4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_follows_the_table(shape: str, backend: str) -> None:
    tokens, targets = random_tokens(2, 40), random_tokens(2, 40, seed=1)
    exact, model = build(SHAPES[shape]), build(SHAPES[shape], precision="bf16", backend=backend)
    streams: list[Tensor] = []
    for block in model.blocks.values():
        block.register_forward_hook(lambda _module, _args, output: streams.append(output))
    hidden = model(tokens)
    assert {stream.dtype for stream in streams} == {torch.bfloat16}
    assert hidden.dtype is torch.bfloat16 and model.logits(hidden).dtype is torch.bfloat16
    assert relative_error(model.logits(hidden), logits(exact, tokens)) < 2e-2
    loss_of(model, hidden, targets).backward()
    loss_of(exact, exact(tokens), targets).backward()
    expected = gradients(exact)
    for name, gradient in gradients(model).items():
        assert gradient.dtype is torch.float32
        if not name.endswith("k.bias"):  # its true gradient is zero
            assert relative_error(gradient, expected[name]) < 5e-2, name


def cut_rows(tokens: Tensor, *lengths: int) -> Iterator[tuple[slice, Tensor]]:
    """The documents of rows that all have the same borders: where each is, and its tokens."""
    start = 0
    for length in lengths:
        yield slice(start, start + length), tokens[:, start : start + length]
        start += length


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(5, 9, 2), (1, 1, 14), (16,)])
def test_b30_a_packed_row_is_its_documents(shape: str, backend: str, lengths: tuple[int, ...]) -> None:
    model, tokens, targets = build(SHAPES[shape], backend=backend), random_tokens(2, 16), random_tokens(2, 16, seed=1)
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
    ids = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)]).repeat(2, 1)
    packed = model(tokens, positions=positions, document_ids=ids)
    packed_loss = loss_of(model, packed, targets)
    packed_loss.backward()
    together, alone_loss = gradients(model), 0.0
    for place, document in cut_rows(tokens, *lengths):
        alone = model(document)
        torch.testing.assert_close(packed[:, place], alone, rtol=1e-5, atol=1e-6)
        loss = loss_of(model, alone, targets[:, place])
        loss.backward()
        alone_loss += loss.item()
    assert abs(packed_loss.item() - alone_loss) < 1e-5 * alone_loss
    for name, gradient in gradients(model).items():
        if not name.endswith("k.bias"):
            assert relative_error(together[name], gradient) < 1e-5, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", PRECISION_TABLES)
def test_b30_what_stands_in_another_document_does_not_matter(backend: str, precision: str) -> None:
    model = build(LLAMA_LIKE, precision=precision, backend=backend)
    ids = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [0] * 1 + [1] * 14 + [2] * 1])
    tokens = random_tokens(2, 16)
    swapped = torch.where(ids == 0, random_tokens(2, 16, seed=1), tokens)
    first, second = (logits(model, rows, document_ids=ids) for rows in (tokens, swapped))
    assert torch.equal(first[ids != 0], second[ids != 0])
    assert not torch.equal(first[ids == 0], second[ids == 0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filling", [0.0, 1e30, math.nan])
def test_b49_padding_reaches_nobody(shape: str, backend: str, filling: float) -> None:
    """Rows padded on either side, and one that is all padding, give what the same tokens give without padding."""
    tokens, targets, pad = random_tokens(2, 9, vocab_size=60), random_tokens(2, 9, seed=1, vocab_size=60), 60
    model = build(replace(SHAPES[shape], tie_embeddings=False), backend=backend)
    alone = model(tokens)
    loss_of(model, alone, targets).backward()
    expected = gradients(model)
    rows, labels, ids = torch.full((3, 14), pad), torch.full((3, 14), IGNORE_INDEX), torch.full((3, 14), -1)
    positions = torch.zeros(3, 14, dtype=torch.long)
    for row, place in ((0, slice(0, 9)), (1, slice(5, 14))):
        rows[row, place], labels[row, place], ids[row, place], positions[row, place] = (
            tokens[row],
            targets[row],
            0,
            torch.arange(9),
        )
    with torch.no_grad():
        model.embed.weight[pad] = filling
    hidden = model(rows, positions=positions, document_ids=ids)
    assert hidden.isfinite().all()
    torch.testing.assert_close(hidden[ids == 0], alone.flatten(0, 1), rtol=1e-5, atol=1e-6)
    loss_of(model, hidden, labels).backward()
    for name, gradient in gradients(model).items():
        if not name.endswith("k.bias"):
            assert relative_error(gradient, expected[name]) < 1e-5, name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_b35_the_score_at_a_position_knows_its_past_only(loss: str, backend: str) -> None:
    model, tokens, length, scored = build(LLAMA_LIKE, backend=backend), random_tokens(1, 12), 12, 7
    inputs: list[Tensor] = []
    model.embed.register_forward_hook(lambda _module, _args, output: output.retain_grad() or inputs.append(output))
    targets = torch.full((1, length), IGNORE_INDEX)
    targets[0, scored] = 3
    loss_of(model, model(tokens), targets, LOSSES[loss]).backward()
    reached = inputs[0].grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [position <= scored for position in range(length)]


@pytest.mark.parametrize("loss", LOSSES)
def test_b35_cyclic_text_is_learned_as_the_next_token(loss: str) -> None:
    vocab = 16
    model = build(replace(LLAMA_LIKE, vocab_size=vocab, num_layers=1), backend="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        stream = (torch.arange(13)[None] + torch.arange(4)[:, None] * 3 + step) % vocab
        optimizer.zero_grad()
        (loss_of(model, model(stream[:, :-1]), stream[:, 1:], LOSSES[loss]) / 48).backward()
        optimizer.step()
    tokens = (torch.arange(12)[None] + 5) % vocab
    assert torch.equal(logits(model, tokens).argmax(-1), (tokens + 1) % vocab)


def key(*samples: int, seed: int = 0, update: int = 3) -> DropoutKey:
    return DropoutKey(seed, update, torch.tensor(samples))


@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_does_not_depend_on_how_the_batch_is_cut(shape: str) -> None:
    model, tokens = build(replace(SHAPES[shape], dropout=DROPOUT)), random_tokens(6, 16)
    whole = model(tokens, dropout_key=key(*range(10, 16)))
    parts = [model(tokens[i : i + 2], dropout_key=key(10 + i, 11 + i)) for i in (0, 2, 4)]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("site", ["embedding", "attention", "residual", "feed_forward"])
def test_every_dropout_site_acts_and_only_while_training(site: str) -> None:
    none = replace(DROPOUT, embedding=0.0, attention=0.0, residual=0.0, feed_forward=0.0)
    model, tokens = build(replace(LLAMA_LIKE, dropout=replace(none, **{site: 0.5}))), random_tokens(2, 16)
    plain, dropped = model(tokens), model(tokens, dropout_key=key(0, 1))
    assert not torch.equal(plain, dropped)
    assert not torch.equal(dropped, model(tokens, dropout_key=key(0, 1, update=4)))
    assert not torch.equal(dropped, model(tokens, dropout_key=key(0, 1, seed=1)))
    assert torch.equal(dropped, model(tokens, dropout_key=key(0, 1)))
    assert torch.equal(model.eval()(tokens, dropout_key=key(0, 1)), plain)


def test_sublayers_and_layers_draw_masks_of_their_own() -> None:
    """Residual dropout of the two sublayers of two layers: four masks."""
    config = replace(LLAMA_LIKE, dropout=replace(DROPOUT, embedding=0.0, attention=0.0, feed_forward=0.0))
    model, masks = build(config), []
    for block in model.blocks.values():
        for part in (block.attention, block.feed_forward):
            part.register_forward_hook(lambda _module, _args, output: torch.ones_like(output))
        block.register_forward_hook(lambda _module, args, output: masks.append((output - args[0]) / 2))
    model(random_tokens(4, 16), dropout_key=key(0, 1, 2, 3))
    for block in masks:
        counts = [(block.round() == value).double().mean() for value in range(3)]
        assert all(abs(count - share) < 0.05 for count, share in zip(counts, (0.25, 0.5, 0.25), strict=True))
    assert 0.3 < (masks[0].round() == masks[1].round()).double().mean() < 0.45


def test_attention_dropout_is_refused_where_it_cannot_be() -> None:
    config = replace(LLAMA_LIKE, dropout=DROPOUT)
    with pytest.raises(ConfigError, match="attention.backend=reference"):
        Transformer(config, PRECISION_TABLES["fp32"], "sdpa")


def test_restarting_and_running_positions_differ_only_where_they_should() -> None:
    """Rotary attention knows distances only; learned positions know places."""
    tokens, shifted = random_tokens(1, 16), torch.arange(20, 36)[None]
    for shape, same in (("llama", True), ("gpt2", False)):
        model = build(SHAPES[shape])
        close = relative_error(model(tokens, positions=shifted), model(tokens)) < 1e-5
        assert close is same


def test_head_weight_and_logits() -> None:
    tied, untied = build(SHAPES["gpt2"]), build(LLAMA_LIKE)
    assert tied.head_weight is tied.embed.weight and untied.head_weight is not untied.embed.weight
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(untied.logits(hidden), F.linear(hidden, untied.head_weight))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_can_be_traced_without_memory(shape: str, backend: str, loss: str) -> None:
    """On the meta device every tensor has a shape and no content: what plans and dry runs are made of."""
    attention = DROPOUT.attention if backend == "reference" else 0.0
    with torch.device("meta"):
        model = Transformer(
            replace(SHAPES[shape], dropout=replace(DROPOUT, attention=attention)), PRECISION_TABLES["bf16"], backend
        )
        tokens = torch.zeros(2, 16, dtype=torch.long)
        hidden = model(tokens, document_ids=tokens, dropout_key=DropoutKey(0, 0, torch.arange(2)))
        loss_of(model, hidden, tokens, LOSSES[loss]).backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
