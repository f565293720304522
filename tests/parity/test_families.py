"""Every preset has the parameters of the transformers library's model of that name, tensor by tensor, without memory for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.twins import GPT2, LLAMA, QWEN3, Family, transformers

from llmtrain.config.compose import compose_config
from llmtrain.config.typed import ModelConfig, NormKind
from llmtrain.model.transformer import Transformer
from llmtrain.plan.precision import PRECISION_TABLES
from llmtrain.plan.shapes import num_parameters, parameter_shapes

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs/model").glob("*.yaml"))


def model_of(preset: str) -> ModelConfig:
    model = compose_config([f"model={preset}"]).config.model
    return model if model.vocab_size is not None else replace(model, vocab_size=258)


def family_of(model: ModelConfig) -> Family:
    if model.norm is NormKind.LAYER:
        return GPT2
    return QWEN3 if model.attention.qk_norm else LLAMA


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_tensors_of_their_twins(preset: str) -> None:
    model = model_of(preset)
    family = family_of(model)
    with torch.device("meta"):
        ours, twin = Transformer(model, PRECISION_TABLES["fp32"], "reference"), family.build(model)
    theirs = family.tensors(dict(twin.named_parameters()), model)
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert shapes == parameter_shapes(model)
    assert num_parameters(model) == sum(parameter.numel() for parameter in twin.parameters())


def test_the_smallest_gpt2_is_what_their_config_builds_by_itself() -> None:
    model, theirs = model_of("gpt2_124m"), transformers.GPT2Config()
    assert (model.dim, model.num_layers, model.attention.num_heads) == (theirs.n_embd, theirs.n_layer, theirs.n_head)
    assert (model.vocab_size, model.max_positions) == (theirs.vocab_size, theirs.n_positions)
    assert (model.norm_eps, model.init_std) == (theirs.layer_norm_epsilon, theirs.initializer_range)
    assert theirs.activation_function == "gelu_new" and theirs.tie_word_embeddings and model.tie_embeddings
