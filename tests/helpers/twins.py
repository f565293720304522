"""Models of the transformers library of the same shape as ours, and their tensors under our names.

Importing this skips the test where that library is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from llmtrain.config.typed import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, YarnScaling

transformers = pytest.importorskip("transformers")

LLAMA_PARTS = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
GPT2_PARTS = {
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Family:
    """How the transformers library builds a model of our shape, and how its tensors are called here."""

    build: Callable[[ModelConfig], nn.Module]
    tensors: Callable[[dict[str, Tensor], ModelConfig], dict[str, Tensor]]
    """(their tensors by their name, our shape) → the same tensors by our name"""


def rope_parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Our rotary settings in the words of a `config.json`."""
    words: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if isinstance(scaling, LinearScaling):
        words |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        words |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    elif isinstance(scaling, YarnScaling):
        words |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
        }
    return words


def llama_words(model: ModelConfig, **more: Any) -> dict[str, Any]:
    """Our shape in the words of the configs of Llama and its relatives."""
    return {
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": rope_parameters(model.rope_theta, model.rope_scaling),
        "num_attention_heads": model.attention.num_heads,
        "num_key_value_heads": model.attention.num_kv_heads,
        "head_dim": model.attention.head_dim,
        "intermediate_size": model.feed_forward.hidden_dim,
        "tie_word_embeddings": model.tie_embeddings,
        "attn_implementation": "eager",
    } | more


def build_llama(model: ModelConfig) -> nn.Module:
    words = llama_words(model, attention_bias=model.attention.bias, mlp_bias=model.feed_forward.bias)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**words))


def build_mistral(model: ModelConfig) -> nn.Module:
    """One window for all layers."""
    (window,) = set(model.layer_windows)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**llama_words(model, sliding_window=window)))


def build_qwen2(model: ModelConfig) -> nn.Module:
    """Biases on the projections to queries, keys and values only."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**llama_words(model)))


def build_qwen3(model: ModelConfig) -> nn.Module:
    """Normalised queries and keys; a window or none for each layer."""
    windows = model.layer_windows
    words = llama_words(
        model,
        attention_bias=model.attention.bias,
        use_sliding_window=any(windows),
        sliding_window=max((window or 0 for window in windows), default=0) or None,
        layer_types=["sliding_attention" if window else "full_attention" for window in windows],
    )
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**words))


def build_gpt2(model: ModelConfig) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=model.dim,
        n_layer=model.num_layers,
        n_head=model.attention.num_heads,
        n_inner=model.feed_forward.hidden_dim,
        vocab_size=model.vocab_size,
        n_positions=model.max_positions,
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def llama_tensors(theirs: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    places = {"embed": "model.embed_tokens", "norm": "model.norm"}
    if not model.tie_embeddings:
        places["head"] = "lm_head"
    for layer in range(model.num_layers):
        places |= {f"blocks.{layer}.{ours}": f"model.layers.{layer}.{part}" for ours, part in LLAMA_PARTS.items()}
    kinds = ("weight", "bias")
    found = {f"{ours}.{kind}": theirs.get(f"{place}.{kind}") for ours, place in places.items() for kind in kinds}
    known = {name: tensor for name, tensor in found.items() if tensor is not None}
    assert len(known) == len(theirs), f"{len(theirs)} tensors of theirs, {len(known)} have a name here"
    return known


def gpt2_tensors(theirs: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """GPT-2 stores matrices transposed, and query, key and value as one."""
    ours = {"embed.weight": theirs["transformer.wte.weight"], "position_embed.weight": theirs["transformer.wpe.weight"]}
    for kind in ("weight", "bias"):
        ours[f"norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for layer in range(model.num_layers):
            block, twin = f"blocks.{layer}", f"transformer.h.{layer}"
            for part, name in GPT2_PARTS.items():
                ours[f"{block}.{part}.{kind}"] = _transposed(theirs[f"{twin}.{name}.{kind}"])
            joined = _transposed(theirs[f"{twin}.attn.c_attn.{kind}"])
            for part, tensor in zip("qkv", joined.chunk(3), strict=True):
                ours[f"{block}.attention.{part}.{kind}"] = tensor
    return ours


def _transposed(x: Tensor) -> Tensor:
    return x if x.ndim == 1 else x.mT


LLAMA = Family(build_llama, llama_tensors)
MISTRAL = Family(build_mistral, llama_tensors)
QWEN2 = Family(build_qwen2, llama_tensors)
QWEN3 = Family(build_qwen3, llama_tensors)
GPT2 = Family(build_gpt2, gpt2_tensors)
