"""Rotary frequencies and attention factors are those of the transformers library."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.twins import llama_words, rope_parameters, transformers

from llmtrain.config.compose import compose_config
from llmtrain.config.typed import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from llmtrain.ops.rotary import rotary_frequencies, rotary_table

SCALINGS: dict[str, RopeScaling] = {
    "linear": LinearScaling(2.5),
    "llama 3.1": Llama3Scaling(8.0, 8192, 1.0, 4.0),
    "llama 3.2": Llama3Scaling(32.0, 8192, 1.0, 4.0),
    "llama3 of one's own": Llama3Scaling(4.0, 300, 2.0, 9.0),
    "yarn": YarnScaling(4.0, 32768, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0),
    "yarn of one's own": YarnScaling(40.0, 4096, 20.0, 0.5, 1.3),
}


def their_parameters(head_dim: int, theta: float, words: dict[str, object]) -> tuple[torch.Tensor, float]:
    rope_utils = transformers.modeling_rope_utils
    config = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters={**words, "rope_theta": theta}
    )
    return rope_utils.ROPE_INIT_FUNCTIONS[words["rope_type"]](config, "cpu")


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factors(name: str, head_dim: int, theta: float) -> None:
    scaling = SCALINGS[name]
    expected, factor = their_parameters(head_dim, theta, rope_parameters(theta, scaling))
    found = rotary_frequencies(head_dim, theta, scaling)
    torch.testing.assert_close(found, expected.double(), rtol=2e-6, atol=0)  # theirs are worked out in fp32
    assert factor == pytest.approx(getattr(scaling, "attention_factor", 1.0))


def test_defaults_of_the_config_are_their_defaults() -> None:
    """What a config leaves out: ramps, and YaRN's attention factor for a stretch."""
    for kind, words in (("yarn", {}), ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0})):
        given = [f"model.rope.scaling.{key}" for key in (f"kind={kind}", "factor=6", "original_max_positions=2048")]
        model = compose_config([*given, "model.attention.head_dim=64", "model.rope.theta=500000"]).config.model
        theirs = {"rope_type": kind, "factor": 6.0, "original_max_position_embeddings": 2048} | words
        expected, factor = their_parameters(64, 500000.0, theirs)
        found = rotary_frequencies(64, model.rope_theta, model.rope_scaling)
        torch.testing.assert_close(found, expected.double(), rtol=2e-6, atol=0)
        assert factor == pytest.approx(getattr(model.rope_scaling, "attention_factor", 1.0))


@pytest.mark.parametrize("preset", ["llama3_1b", "llama3_8b", "qwen3_0.6b", "smollm2_1.7b"])
def test_tables_of_presets_beyond_their_original_length(preset: str) -> None:
    model = compose_config([f"model={preset}"]).config.model
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**llama_words(model)))
    places = torch.tensor([[0, 1, 511, 8191, 8192, 20000, 131071]])
    cos, sin = rotary(torch.zeros(1), places)
    ours = rotary_table(places, model.attention.head_dim, model.rope_theta, model.rope_scaling)
    # Their angles are fp32: at position p off by up to p / 2^24, here a hundredth.
    torch.testing.assert_close(ours.cos[:, :, 0], cos, rtol=0, atol=2e-2)
    torch.testing.assert_close(ours.sin[:, :, 0].repeat(1, 1, 2), sin, rtol=0, atol=2e-2)
    torch.testing.assert_close(ours.cos[:, :3, 0], cos[:, :3], rtol=0, atol=5e-5)
