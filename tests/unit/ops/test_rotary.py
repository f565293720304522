"""Rotary embedding: a rotation by position times frequency, exact at far positions and in low precision."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.models import LLAMA_LIKE, build, random_tokens
from torch import Tensor

from llmtrain.ops.rotary import apply_rotary, rotary_table

HEAD_DIM, THETA, LENGTH = 64, 10000.0, 4096


def positions(*values: int) -> Tensor:
    return torch.tensor([values])


def test_pairs_are_turned_by_position_times_frequency() -> None:
    x = torch.randn(1, 3, 2, HEAD_DIM, dtype=torch.float64)
    y = apply_rotary(x, rotary_table(positions(0, 7, 4000), HEAD_DIM, THETA), torch.float64)
    half = HEAD_DIM // 2
    for place, position in enumerate((0, 7, 4000)):
        for i in range(half):
            turn = complex(math.cos(position * THETA ** (-2 * i / HEAD_DIM)), math.sin(position * THETA ** (-2 * i / HEAD_DIM)))
            for head in range(2):
                expected = complex(x[0, place, head, i], x[0, place, head, i + half]) * turn
                found = complex(y[0, place, head, i], y[0, place, head, i + half])
                assert abs(found - expected) < 1e-6 * abs(expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_b47_score_depends_on_distance_only(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        turned = [
            apply_rotary(x, rotary_table(positions(position), HEAD_DIM, THETA), dtype).double()
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    size = float(query.double().norm() * key.double().norm())
    for distance in (0, 1, 5, 63):
        for start in (1, 256, 257, 511, 2047, LENGTH - 64):
            assert abs(score(start + distance, start) - score(distance, 0)) < tolerance * size


def test_b47_table_is_exact_at_every_position() -> None:
    table = rotary_table(torch.arange(LENGTH)[None], HEAD_DIM, THETA)
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequencies  # [T, C / 2]
    assert table.cos.dtype is table.sin.dtype is torch.float32
    # Frequencies rounded to bf16 would be 0.22 off below position 512, positions rounded to bf16 would make 257 equal 256.
    assert (table.cos[0, :, 0, : HEAD_DIM // 2] - angles.cos()).abs().max() < 1e-7
    assert (table.sin[0, :, 0] - angles.sin()).abs().max() < 1e-7
    assert not torch.equal(table.sin[0, 257], table.sin[0, 256])


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "default dtype"])
def test_b47_casting_the_model_leaves_positions_exact(cast: str) -> None:
    model = build(LLAMA_LIKE)
    seen: list[Tensor] = []
    model.blocks["0"].register_forward_pre_hook(lambda _module, args: seen.extend((args[1].rotary.cos, args[1].rotary.sin)))
    expected = rotary_table(torch.arange(600)[None], 8, LLAMA_LIKE.rope_theta)
    if cast == "to":
        model.to(torch.bfloat16)
    elif cast in ("bfloat16", "half"):
        getattr(model, cast)()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if cast == "default dtype" else before)
    try:
        model(random_tokens(1, 600))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(seen[0], expected.cos) and torch.equal(seen[1], expected.sin)


def test_gradient_is_the_opposite_rotation() -> None:
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    table = rotary_table(torch.tensor([[0, 3, 9], [4, 5, 6]]), 8, THETA)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, table, torch.float64), (x,))
    y = apply_rotary(x, table, torch.float64)
    back = torch.autograd.grad(y, x, y)[0]
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)


def test_rows_may_have_positions_of_their_own() -> None:
    x = torch.randn(2, 3, 1, 8)
    both = apply_rotary(x, rotary_table(torch.tensor([[0, 1, 2], [7, 8, 9]]), 8, THETA), torch.float32)
    for row, values in enumerate(((0, 1, 2), (7, 8, 9))):
        alone = apply_rotary(x[row : row + 1], rotary_table(positions(*values), 8, THETA), torch.float32)
        assert torch.equal(both[row : row + 1], alone)
