import math

import pytest
import torch

from llmtrain.optim.clip import clip_by_norm, global_norm


def gradients():
    return [torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [-4.0]])]


@pytest.mark.parametrize("norm_type, value", [(2.0, 5.0), (math.inf, 4.0)])
def test_b07_norm_is_that_of_one_long_vector(norm_type, value):
    assert global_norm(gradients(), norm_type).item() == value


@pytest.mark.parametrize("max_norm, after", [(0.5, 0.5), (5.0, 5.0), (1e9, 5.0), (None, 5.0)])
def test_after_clipping_the_norm_is_the_smaller_of_the_two(max_norm, after):
    grads = gradients()
    clip_by_norm(grads, global_norm(grads).item(), max_norm)
    assert global_norm(grads).item() == pytest.approx(after, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_show_in_the_norm(bad):
    grads = gradients()
    grads[1][0, 0] = bad
    assert not math.isfinite(global_norm(grads).item())


def test_bf16_gradients_are_summed_in_fp32():
    grads = [torch.full((4096,), 0.1, dtype=torch.bfloat16)]
    assert global_norm(grads).item() == pytest.approx(0.1 * 64, rel=1e-2)
    assert global_norm(grads).dtype == torch.float32
