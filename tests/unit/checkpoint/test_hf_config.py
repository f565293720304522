"""config.json: what is translated, what is kept, what is refused by name, and what an export says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.models import GPT2_LIKE, LLAMA_LIKE, QK_NORM

from llmtrain.checkpoint.hf_config import HfModel, read_config, write_config
from llmtrain.checkpoint.hf_families import family_of
from llmtrain.config.compose import config_from_wire
from llmtrain.config.errors import ConfigError
from llmtrain.config.typed import (
    DropoutConfig,
    FeedForwardKind,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NormKind,
    YarnScaling,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 99}
LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(document: dict[str, Any]) -> HfModel:
    return read_config(document, "folder/config.json")


def shape(document: dict[str, Any]) -> ModelConfig:
    """The shape that a config.json means to a run."""
    wire: dict[str, Any] = {f"model.{key}": value for key, value in read(document).section.items()}
    rest = {"data.sequence_length": 8, "data.kind": "synthetic", "tokenizer.kind": "ids"}
    return config_from_wire(wire | rest).model


def test_what_is_left_out_has_the_librarys_default() -> None:
    model = shape(LLAMA)
    assert (model.norm_eps, model.rope_theta, model.max_positions) == (1e-6, 10000.0, 2048)
    assert (model.attention.head_dim, model.attention.bias, model.tie_embeddings) == (8, False, False)
    bare = {key: value for key, value in QWEN3.items() if key not in ("num_key_value_heads", "head_dim")}
    assert shape(bare | {"num_attention_heads": 32}).attention.head_dim == 128
    assert shape(GPT2).tie_embeddings and shape(GPT2).feed_forward.hidden_dim == 192 and shape(GPT2).max_positions == 1024


def test_null_means_worked_out_and_not_the_default() -> None:
    model = shape(QWEN3 | {"num_key_value_heads": None, "head_dim": None})
    assert (model.attention.num_kv_heads, model.attention.head_dim) == (6, 8)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {"rope_theta": 500000, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        },
    ],
)
def test_b60_theta_and_scaling_under_every_name(spelling: dict[str, Any]) -> None:
    model = shape(LLAMA | spelling)
    assert model.rope_theta == 500000.0
    assert model.rope_scaling == Llama3Scaling(8.0, 64, 1.0, 4.0)


def test_scaling_of_each_type() -> None:
    assert shape(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}}).rope_scaling == LinearScaling(4.0)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert shape(LLAMA | {"rope_parameters": yarn}).rope_scaling == YarnScaling(4.0, 64, 32.0, 1.0, pytest.approx(1.1386294))
    # Without it, the library takes the length the model is made for.
    del yarn["original_max_position_embeddings"]
    assert shape(LLAMA | {"rope_scaling": yarn, "max_position_embeddings": 256}).rope_scaling.original_max_positions == 256
    scaled = shape(LLAMA | {"rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 0.5}}).rope_scaling
    assert scaled.attention_factor == pytest.approx((1 + 0.13862944) / (1 + 0.06931472))


def test_windows_of_qwen3() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
    assert shape(QWEN3 | sliding).layer_windows == (None, None, 32, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    model = shape(QWEN3 | sliding | {"layer_types": kinds})
    assert model.layer_windows == (32, None, 32, None)
    assert read(QWEN3 | sliding | {"layer_types": kinds}).section["attention.window_pattern"] == "SL"
    assert shape(QWEN3 | {"sliding_window": 32}).layer_windows == (None,) * 4  # the library does not look at it then


REFUSED = [
    (LLAMA, {"model_type": "mamba"}, "model_type=mamba"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act=gelu"),
    (LLAMA, {"pretraining_tp": 2}, "pretraining_tp=2"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config="),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (LLAMA, {"original_max_position_embeddings": 64}, "original_max_position_embeddings=64"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures=LlamaForSequenceClassification"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type=dynamic"),
    (LLAMA, {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type=longrope"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention="),
    (
        LLAMA,
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor=0.5",
    ),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "rope_scaling.truncate=False"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type=linear"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": "8"}}, "rope_scaling.factor=8"),
    (LLAMA, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta=10000.0 rope_parameters.rope_theta="),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, "rope_scaling="),
    (
        LLAMA,
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 5e5},
        },
        "rope_theta (left out)=10000.0 rope_parameters.rope_theta=500000.0",
    ),
    (LLAMA, {"num_hidden_layers": "four"}, "num_hidden_layers=four"),
    (LLAMA, {"rms_norm_eps": -1}, "rms_norm_eps=-1"),
    (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
    (QWEN3, {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types=chunked_attention"),
    (QWEN3, {"layer_types": ["full_attention"] * 3}, "layer_types of 3 layers"),
    (QWEN3, {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window=false"),
    (QWEN3, {"mlp_bias": True}, "mlp_bias=True"),
    (GPT2, {"activation_function": "gelu"}, "activation_function=gelu"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights=False"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention=True"),
]


@pytest.mark.parametrize(("document", "change", "named"), REFUSED, ids=[named for _, _, named in REFUSED])
def test_what_would_change_the_function_is_refused_by_name(
    document: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(document | change)
    assert [problem.what for problem in caught.value.problems if problem.what.startswith(named)]
    assert all("folder/config.json" in problem.rule for problem in caught.value.problems)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read(LLAMA | {"hidden_act": "relu", "pretraining_tp": 2, "sinks": 4})
    assert len(caught.value.problems) == 3


def test_keys_without_effect_are_kept() -> None:
    extra = {"eos_token_id": [2, 7], "use_cache": False, "attention_dropout": 0.1, "transformers.js_config": {"a": 1}}
    told = {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "initializer_range": 0.04, "unknown": None}
    model = read(LLAMA | extra | told)
    assert model.kept == extra
    assert model.section["init_std"] == 0.04
    assert model.dropout == {"attention_dropout": 0.1}
    again = write_config(shape(LLAMA), dtype="bf16", bos_id=1, eos_id=5, kept=model.kept)
    assert extra.items() <= again.items()
    assert again["bos_token_id"] == 1 and again["torch_dtype"] == again["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "model",
    [
        LLAMA_LIKE,
        GPT2_LIKE,
        replace(GPT2_LIKE, tie_embeddings=False, norm_eps=1e-6),
        replace(LLAMA_LIKE, rope_theta=500000.0, rope_scaling=Llama3Scaling(8.0, 64, 1.0, 4.0)),
        replace(LLAMA_LIKE, rope_scaling=YarnScaling(4.0, 64, 16.0, 2.0, 1.25), norm_eps=1e-6),
        replace(LLAMA_LIKE, rope_scaling=LinearScaling(2.0), tie_embeddings=True),
        replace(LLAMA_LIKE, attention=replace(LLAMA_LIKE.attention, bias=True, output_bias=True, head_dim=10)),
        replace(LLAMA_LIKE, feed_forward=replace(LLAMA_LIKE.feed_forward, bias=True)),
        replace(QK_NORM, attention=replace(QK_NORM.attention, output_bias=True, windows=(16, None))),
    ],
)
def test_b60_what_is_written_is_read_back(model: ModelConfig) -> None:
    document = write_config(model, dtype="fp32", bos_id=None, eos_id=3)
    back = shape(document)
    assert replace(back, depth_scaled_init=True, attention=replace(back.attention, windows=(None,))) == replace(
        model, attention=replace(model.attention, windows=(None,))
    )
    assert back.layer_windows == model.layer_windows
    # One spelling alone says the same: what an old reader finds, and what a new one does.
    old = {key: value for key, value in document.items() if key not in ("rope_parameters", "dtype")}
    new = {key: value for key, value in document.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    assert shape(old) == shape(new) == back


def test_b60_a_tokenizer_without_end_is_not_given_the_librarys() -> None:
    document = write_config(LLAMA_LIKE, dtype="fp32", bos_id=None, eos_id=None)
    assert document["bos_token_id"] is None and document["eos_token_id"] is None


@pytest.mark.parametrize("value", [0.0, -0.1, None, "x", True])
def test_an_initializer_range_that_draws_nothing_is_not_read(value: object) -> None:
    assert "init_std" not in read(LLAMA | {"initializer_range": value}).section
    assert read(LLAMA | {"initializer_range": 1}).section["init_std"] == 1.0


def test_dropout_is_written_and_what_was_kept_stays() -> None:
    dropped = replace(GPT2_LIKE, dropout=DropoutConfig(0.1, 0.0, 0.3, 0.0))
    document = write_config(dropped, dtype="fp32", bos_id=None, eos_id=None)
    assert (document["embd_pdrop"], document["attn_pdrop"], document["resid_pdrop"]) == (0.1, 0.0, 0.3)
    assert write_config(GPT2_LIKE, dtype="fp32", bos_id=None, eos_id=None, kept={"attn_pdrop": 0.1})["attn_pdrop"] == 0.1


HEADS, INNER = LLAMA_LIKE.attention, LLAMA_LIKE.feed_forward
NO_CLASS = [
    (replace(LLAMA_LIKE, norm=NormKind.LAYER), "model.norm=layer"),
    (replace(LLAMA_LIKE, feed_forward=replace(INNER, kind=FeedForwardKind.GELU)), "model.feed_forward.kind=gelu"),
    (replace(LLAMA_LIKE, attention=replace(HEADS, windows=(16, None))), "model.attention.window=16"),
    (replace(LLAMA_LIKE, attention=replace(HEADS, bias=True)), "model.attention.output_bias=false"),
    (replace(QK_NORM, feed_forward=replace(INNER, bias=True)), "model.feed_forward.bias=true"),
    (replace(GPT2_LIKE, norm=NormKind.RMS), "model.norm=rms"),
    (replace(GPT2_LIKE, feed_forward=replace(INNER, bias=True)), "model.feed_forward.kind=swiglu"),
    (replace(GPT2_LIKE, attention=replace(GPT2_LIKE.attention, num_kv_heads=2)), "model.attention.num_kv_heads=2"),
    (replace(GPT2_LIKE, attention=replace(GPT2_LIKE.attention, head_dim=16)), "model.attention.head_dim=16"),
    (replace(GPT2_LIKE, attention=replace(GPT2_LIKE.attention, output_bias=False)), "model.attention.output_bias=false"),
    (replace(GPT2_LIKE, attention=replace(GPT2_LIKE.attention, qk_norm=True)), "model.attention.qk_norm=true"),
    (replace(GPT2_LIKE, attention=replace(GPT2_LIKE.attention, windows=(8,))), "model.attention.window=8"),
]


@pytest.mark.parametrize(("model", "named"), NO_CLASS, ids=[named for _, named in NO_CLASS])
def test_a_model_no_class_computes_is_refused_naming_the_key(model: ModelConfig, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        family_of(model)
    assert named in [problem.what for problem in caught.value.problems]
