"""Rotary embedding: a rotation by position times frequency, stretched or not, exact at far positions and in low precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.models import LLAMA_LIKE, build, random_tokens
from torch import Tensor

from llmtrain.config.typed import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, YarnScaling
from llmtrain.model.cache import KVCache
from llmtrain.model.init import materialize
from llmtrain.model.transformer import Transformer
from llmtrain.ops.rotary import RotaryTable, apply_rotary, rotary_frequencies, rotary_table
from llmtrain.plan.precision import PRECISION_TABLES

HEAD_DIM, THETA, LENGTH = 64, 10000.0, 4096
SCALINGS: dict[str, RopeScaling | None] = {
    "none": None,
    "linear": LinearScaling(4.0),
    "llama3": Llama3Scaling(8.0, 512, 1.0, 4.0),
    "yarn": YarnScaling(4.0, 512, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0),
}
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)


def scale_of(scaling: RopeScaling | None) -> float:
    """What queries and keys are multiplied by."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


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


@scalings
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_b47_score_depends_on_distance_only(dtype: torch.dtype, tolerance: float, scaling: RopeScaling | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        turned = [
            apply_rotary(x, rotary_table(positions(position), HEAD_DIM, THETA, scaling), dtype).double()
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    size = float(query.double().norm() * key.double().norm()) * scale_of(scaling) ** 2
    for distance in (0, 1, 5, 63, 600):
        for start in (1, 256, 257, 511, 2047, LENGTH - 64, 131071):
            assert abs(score(start + distance, start) - score(distance, 0)) < tolerance * size


@scalings
def test_b47_table_is_exact_at_every_position(scaling: RopeScaling | None) -> None:
    """Up to the first position and far beyond the original length of a stretch."""
    places = torch.cat([torch.arange(LENGTH), torch.arange(131000, 131072)])
    table = rotary_table(places[None], HEAD_DIM, THETA, scaling)
    angles = places.double()[:, None] * torch.tensor(frequencies_by_hand(scaling), dtype=torch.float64)  # [T, C / 2]
    assert table.cos.dtype is table.sin.dtype is torch.float32
    # Frequencies rounded to bf16 would be 0.22 off below position 512, positions rounded to bf16 would make 257 equal 256.
    assert (table.cos[0, :, 0, : HEAD_DIM // 2] - scale_of(scaling) * angles.cos()).abs().max() < 1e-7
    assert (table.sin[0, :, 0] - scale_of(scaling) * angles.sin()).abs().max() < 1e-7
    assert not torch.equal(table.sin[0, 257], table.sin[0, 256])


def frequencies_by_hand(scaling: RopeScaling | None, head_dim: int = HEAD_DIM, theta: float = THETA) -> list[float]:
    """One pair after the other, from wavelengths as the papers and Meta's release have them."""
    found = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / frequency
        if isinstance(scaling, LinearScaling):
            frequency /= scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            if wavelength > scaling.original_max_positions / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength > scaling.original_max_positions / scaling.high_freq_factor:
                smooth = scaling.original_max_positions / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        elif isinstance(scaling, YarnScaling):
            # The pair whose wavelength is L / turns: 2 pi theta^(2i / C) = L / turns.
            low, high = (
                head_dim * math.log(scaling.original_max_positions / turns / (2 * math.pi)) / (2 * math.log(theta))
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            frequency = frequency / scaling.factor * ramp + frequency * (1 - ramp)
        found.append(frequency)
    return found


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@scalings
def test_frequencies_by_hand(scaling: RopeScaling | None, head_dim: int, theta: float) -> None:
    found = rotary_frequencies(head_dim, theta, scaling)
    expected = torch.tensor(frequencies_by_hand(scaling, head_dim, theta), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_linear_stretch_is_a_position_divided() -> None:
    """Four times the position gives the table of the position itself (Chen et al. 2023, equation 4)."""
    near, far = torch.arange(300)[None], 4 * torch.arange(300)[None]
    plain, stretched = rotary_table(near, HEAD_DIM, THETA), rotary_table(far, HEAD_DIM, THETA, LinearScaling(4.0))
    assert torch.equal(plain.cos, stretched.cos) and torch.equal(plain.sin, stretched.sin)


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_fast_pairs_stay_and_slow_pairs_are_divided(name: str) -> None:
    """By turns over the original length: llama3 4 and 1, yarn 32 and 1; between the two every pair lies between."""
    scaling = SCALINGS[name]
    assert isinstance(scaling, Llama3Scaling | YarnScaling)
    plain, stretched = rotary_frequencies(HEAD_DIM, THETA, None), rotary_frequencies(HEAD_DIM, THETA, scaling)
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    fast, slow = turns >= (4 if name == "llama3" else 32), turns < 1
    slow[int(slow.nonzero()[0])] = name == "llama3"  # yarn's border is the first whole pair beyond one turn
    shares = stretched / plain
    assert fast.sum() > 2 and slow.sum() > 2 and (~fast & ~slow).sum() > 2
    torch.testing.assert_close(shares[fast], torch.ones_like(shares[fast]), rtol=1e-12, atol=0)
    torch.testing.assert_close(shares[slow], torch.full_like(shares[slow], 1 / scaling.factor), rtol=1e-12, atol=0)
    assert (shares.diff() <= 1e-12).all()


def test_a_stretch_by_one_changes_nothing() -> None:
    table = rotary_table(torch.arange(900)[None], HEAD_DIM, THETA)
    for scaling in (LinearScaling(1.0), Llama3Scaling(1.0, 512, 1.0, 4.0), YarnScaling(1.0, 512, 32.0, 1.0, 1.0)):
        same = rotary_table(torch.arange(900)[None], HEAD_DIM, THETA, scaling)
        torch.testing.assert_close(same.cos, table.cos, rtol=0, atol=1e-6)
        torch.testing.assert_close(same.sin, table.sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("original", [1, 7, 10**9], ids=["no pair turns once", "one does", "all do"])
def test_yarn_is_finite_where_its_ramp_is_outside_the_pairs(original: int) -> None:
    scaling = YarnScaling(4.0, original, 32.0, 1.0, 1.0)
    shares = rotary_frequencies(HEAD_DIM, THETA, scaling) / rotary_frequencies(HEAD_DIM, THETA, None)
    assert ((shares >= 0.25 - 1e-12) & (shares <= 1.0 + 1e-12)).all()
    assert shares[-1] == pytest.approx(1.0 if original == 10**9 else 0.25)


def test_yarn_scales_queries_and_keys() -> None:
    x = torch.randn(1, 5, 2, HEAD_DIM)
    scaling = YarnScaling(4.0, 512, 32.0, 1.0, 1.25)
    y = apply_rotary(x, rotary_table(positions(0, 3, 511, 512, 2047), HEAD_DIM, THETA, scaling), torch.float32)
    torch.testing.assert_close(y.norm(dim=-1), 1.25 * x.norm(dim=-1))
    assert torch.equal(y[:, 0], 1.25 * x[:, 0])


def tables_of(model: Transformer, length: int) -> list[Tensor]:
    """cos and sin as the first block gets them."""
    seen: list[Tensor] = []

    def keep(_module: torch.nn.Module, args: tuple[object, ...]) -> None:
        table = args[1].rotary  # type: ignore[attr-defined]
        assert isinstance(table, RotaryTable)
        seen.extend((table.cos, table.sin))

    with model.blocks["0"].register_forward_pre_hook(keep):
        model(random_tokens(1, length))
    return seen


def scaled_model(scaling: RopeScaling | None) -> ModelConfig:
    return replace(LLAMA_LIKE, rope_scaling=scaling)


@scalings
@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "default dtype"])
def test_b47_casting_the_model_leaves_positions_exact(cast: str, scaling: RopeScaling | None) -> None:
    model = build(scaled_model(scaling))
    expected = rotary_table(torch.arange(600)[None], 8, LLAMA_LIKE.rope_theta, scaling)
    if cast == "to":
        model.to(torch.bfloat16)
    elif cast in ("bfloat16", "half"):
        getattr(model, cast)()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if cast == "default dtype" else before)
    try:
        cos, sin = tables_of(model, 600)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(cos, expected.cos) and torch.equal(sin, expected.sin)


@scalings
def test_b47_a_model_from_the_meta_device_has_the_same_positions(scaling: RopeScaling | None) -> None:
    with torch.device("meta"):
        model = Transformer(scaled_model(scaling), PRECISION_TABLES["fp32"], "reference")
    assert list(model.buffers()) == []
    materialize(model, seed=0, device="cpu")
    cos, sin = tables_of(model, 600)
    expected = rotary_table(torch.arange(600)[None], 8, LLAMA_LIKE.rope_theta, scaling)
    assert torch.equal(cos, expected.cos) and torch.equal(sin, expected.sin)


@scalings
@torch.no_grad()
def test_b47_decoding_past_the_original_length_is_the_full_forward(scaling: RopeScaling | None) -> None:
    model, tokens = build(scaled_model(scaling)), random_tokens(1, 600)
    cache = KVCache(model.config, model.precision, batch_size=1, capacity=600, device="cpu")
    pieces = [model(piece, cache=cache) for piece in tokens.split([505, *[1] * 15, 80], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-5, atol=1e-5)


@scalings
def test_gradient_is_the_opposite_rotation(scaling: RopeScaling | None) -> None:
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    table = rotary_table(torch.tensor([[0, 3, 9], [4, 5, 6]]), 8, THETA, scaling)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, table, torch.float64), (x,))
    y = apply_rotary(x, table, torch.float64)
    back = torch.autograd.grad(y, x, y)[0]
    torch.testing.assert_close(back, x * scale_of(scaling) ** 2, rtol=1e-6, atol=1e-6)


def test_rows_may_have_positions_of_their_own() -> None:
    x = torch.randn(2, 3, 1, 8)
    both = apply_rotary(x, rotary_table(torch.tensor([[0, 1, 2], [7, 8, 9]]), 8, THETA), torch.float32)
    for row, values in enumerate(((0, 1, 2), (7, 8, 9))):
        alone = apply_rotary(x[row : row + 1], rotary_table(positions(*values), 8, THETA), torch.float32)
        assert torch.equal(both[row : row + 1], alone)
