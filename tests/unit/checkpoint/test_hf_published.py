"""config.json as published with well-known models, transformers 4 spellings and all: each is the model of its option in configs/model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmtrain.checkpoint.hf_config import read_config
from llmtrain.config.compose import compose_config, config_from_wire
from llmtrain.config.errors import ConfigError

SAMPLING = {"text-generation": {"do_sample": True, "max_length": 50}}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": SAMPLING,
    "vocab_size": 50257,
}
GPT2_MEDIUM = GPT2 | {"n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True}
GPT2_XL = GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, **LLAMA3_ROPE},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_1_8B_INSTRUCT = LLAMA_3_1_8B | {"eos_token_id": [128001, 128008, 128009], "transformers_version": "4.42.3"}
LLAMA_3_2_1B = LLAMA_3_1_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {"factor": 32.0, **LLAMA3_ROPE},
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B = QWEN3_0_6B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
SMOLLM2_1_7B = {
    "_name_or_path": "/fsx/checkpoints",
    **{key: value for key, value in SMOLLM2_135M.items() if key not in ("is_llama_config", "rope_interleaved")},
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "num_key_value_heads": 32,
    "rope_theta": 130000,
}
PUBLISHED = [
    ("gpt2_124m", GPT2),
    ("gpt2_355m", GPT2_MEDIUM),
    ("gpt2_1558m", GPT2_XL),
    ("llama3_8b", LLAMA_3_1_8B),
    ("llama3_8b", LLAMA_3_1_8B_INSTRUCT),
    ("llama3_1b", LLAMA_3_2_1B),
    ("qwen3_0.6b", QWEN3_0_6B),
    ("qwen3_8b", QWEN3_8B),
    ("smollm2_135m", SMOLLM2_135M),
    ("smollm2_135m", SMOLLM2_135M | {"gradient_checkpointing": False}),
    ("smollm2_1.7b", SMOLLM2_1_7B),
]


@pytest.mark.parametrize(("option", "document"), PUBLISHED)
def test_b60_a_published_config_is_the_model_of_its_option(option: str, document: dict[str, Any]) -> None:
    section = read_config(document, "config.json").section
    length = section["max_positions"]
    wire = {f"model.{key}": value for key, value in section.items()}
    model = config_from_wire(wire | {"data.kind": "synthetic", "tokenizer.kind": "ids", "data.sequence_length": 8}).model
    preset = compose_config([f"model={option}", f"data.sequence_length={length}"]).config.model
    # How deep layers were drawn at first is not in a config.json.
    assert model == replace(preset, depth_scaled_init=model.depth_scaled_init)


def test_b60_interleaved_rotary_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope_interleaved=True"):
        read_config(SMOLLM2_135M | {"rope_interleaved": True}, "config.json")
