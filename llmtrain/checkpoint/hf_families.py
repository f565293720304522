"""The model families of Hugging Face that a Transformer of ours can be: what their config.json may say, and which one a shape is.

A config.json says what a model computes through keys that are given and keys that are left out. So a family lists every key that
decides on the function with the default that the transformers library has for it, the keys we know with some values only, and the
keys that decide on nothing. A key in none of the lists is refused: what it does is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.typed import FeedForwardKind, ModelConfig, NormKind, PositionKind


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    model_type: str
    architecture: str
    """Class with the head for the next token."""
    base: str
    """Class without it, whose weights may be saved alone when the head is tied."""
    prefix: str
    """In front of every tensor but the head's."""
    defaults: Mapping[str, Any]
    """Keys that decide on the function, each with the library's default; None = worked out from the others."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Keys that decide on the function and that a model of ours can have with these values only, the default first."""
    dropout: Mapping[str, str]
    """Their key of a dropout → ours below `model.dropout`. Dropout is no part of a trained model's function."""
    nullable: frozenset[str]
    """Of `defaults`, those that may be null."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys."""
    harmless: frozenset[str] = frozenset()
    """Keys without effect on the function, besides `HARMLESS`."""


HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _from_model_config _model_name_or_path _name_or_path
    architectures attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cls_token_id
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
    initializer_range is_decoder label2id length_penalty mask_token_id max_length min_length model_type name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_past output_scores pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
    use_bfloat16 use_cache
    """.split()
)
"""Keys that say how weights are stored, how text is sampled, or nothing at all about the function."""

TOKEN_KEYS = frozenset(
    """
    bad_words_ids begin_suppress_tokens bos_token_id cls_token_id decoder_start_token_id eos_token_id forced_bos_token_id
    forced_eos_token_id mask_token_id pad_token_id sep_token_id suppress_tokens tokenizer_class unk_token_id
    """.split()
)
"""Those of them that are only true together with the tokenizer."""

_SILU = ("silu", "swish")
_ROTARY = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None}
_LLAMA_SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    **_ROTARY,
}
_LLAMA_FIXED = {
    "hidden_act": _SILU,
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
_LLAMA_NULLABLE = frozenset({"num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters"})

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    base="LlamaModel",
    prefix="model.",
    defaults={**_LLAMA_SHAPE, "mlp_bias": False},
    fixed={**_LLAMA_FIXED, "pretraining_tp": (1,)},
    dropout={"attention_dropout": "attention"},
    nullable=_LLAMA_NULLABLE,
    harmless=frozenset({"is_llama_config"}),
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    base="Qwen3Model",
    prefix="model.",
    defaults={
        **_LLAMA_SHAPE,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    fixed=_LLAMA_FIXED,
    dropout={"attention_dropout": "attention"},
    nullable=_LLAMA_NULLABLE | {"sliding_window", "layer_types"},
)
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    base="GPT2Model",
    prefix="transformer.",
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({},),
    },
    dropout={"resid_pdrop": "residual", "embd_pdrop": "embedding", "attn_pdrop": "attention"},
    nullable=frozenset({"n_inner"}),
    spellings={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    harmless=frozenset(
        """
        n_ctx n_special predict_special_tokens reorder_and_upcast_attn summary_type summary_use_proj summary_activation
        summary_proj_to_labels summary_first_dropout
        """.split()
    ),
)
_SHARED_NAMES = {"vocab_size": "vocab_size", "tie_embeddings": "tie_word_embeddings", "init_std": "initializer_range"}
_LLAMA_NAMES = {
    **_SHARED_NAMES,
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attention.num_heads": "num_attention_heads",
    "attention.num_kv_heads": "num_key_value_heads",
    "attention.head_dim": "head_dim",
    "attention.bias": "attention_bias",
    "attention.output_bias": "attention_bias",
    "attention.window": "sliding_window",
    "attention.window_pattern": "layer_types",
    "feed_forward.hidden_dim": "intermediate_size",
    "feed_forward.bias": "mlp_bias",
    "rope.theta": "rope_theta",
    "rope.scaling.kind": "rope_type",
    "rope.scaling.original_max_positions": "original_max_position_embeddings",
    **{f"rope.scaling.{name}": name for name in ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")},
    **{f"rope.scaling.{name}": name for name in ("beta_fast", "beta_slow")},
}
_GPT2_NAMES = {
    **_SHARED_NAMES,
    "dim": "n_embd",
    "num_layers": "n_layer",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "attention.num_heads": "n_head",
    "attention.num_kv_heads": "n_head",
    "attention.head_dim": "n_embd / n_head",
    "feed_forward.hidden_dim": "n_inner",
}
THEIR_NAMES: Mapping[str, Mapping[str, str]] = {"llama": _LLAMA_NAMES, "qwen3": _LLAMA_NAMES, "gpt2": _GPT2_NAMES}
"""By `model_type`, our keys below `model.` → theirs, for messages about a config.json."""
FAMILIES = {family.model_type: family for family in (LLAMA, QWEN3, GPT2)}


def family_of(model: ModelConfig) -> Family:
    """The family whose classes compute what this model computes.

    Raises:
        ConfigError: none does; names every key that stands in the way.
    """
    family, problems = _nearest(model)
    if problems:
        raise ConfigError(*problems)
    return family


def _nearest(model: ModelConfig) -> tuple[Family, list[Problem]]:
    """The family that the positions of a model point to, and what about the model it does not have."""
    if model.position is PositionKind.LEARNED:
        return GPT2, _unlike_gpt2(model)
    family = QWEN3 if model.attention.qk_norm else LLAMA
    return family, _unlike_llama(model, family)


def _unlike_gpt2(model: ModelConfig) -> list[Problem]:
    heads = model.attention
    facts = {
        f"model.norm={model.norm}": (model.norm is NormKind.LAYER, "model.norm=layer"),
        f"model.feed_forward.kind={model.feed_forward.kind}": (
            model.feed_forward.kind is FeedForwardKind.GELU,
            "model.feed_forward.kind=gelu",
        ),
        f"model.feed_forward.bias={_word(model.feed_forward.bias)}": (model.feed_forward.bias, "model.feed_forward.bias=true"),
        f"model.attention.bias={_word(heads.bias)}": (heads.bias, "model.attention.bias=true"),
        f"model.attention.output_bias={_word(heads.output_bias)}": (heads.output_bias, "model.attention.output_bias=true"),
        f"model.attention.qk_norm={_word(heads.qk_norm)}": (not heads.qk_norm, "model.attention.qk_norm=false"),
        f"model.attention.num_kv_heads={heads.num_kv_heads}": (
            heads.num_kv_heads == heads.num_heads,
            f"model.attention.num_kv_heads={heads.num_heads}",
        ),
        f"model.attention.head_dim={heads.head_dim}": (
            heads.head_dim * heads.num_heads == model.dim,
            f"model.dim / model.attention.num_heads = {model.dim / heads.num_heads:g}",
        ),
        f"model.attention.window={_window(model)}": (_window(model) is None, "no model.attention.window"),
    }
    return _told("model.position=learned", GPT2, facts)


def _unlike_llama(model: ModelConfig, family: Family) -> list[Problem]:
    heads, inner = model.attention, model.feed_forward
    facts = {
        f"model.norm={model.norm}": (model.norm is NormKind.RMS, "model.norm=rms"),
        f"model.feed_forward.kind={inner.kind}": (inner.kind is FeedForwardKind.SWIGLU, "model.feed_forward.kind=swiglu"),
        f"model.attention.output_bias={_word(heads.output_bias)}": (
            heads.output_bias == heads.bias,
            f"model.attention.output_bias={_word(heads.bias)}, as model.attention.bias",
        ),
    }
    if family is QWEN3:
        facts[f"model.feed_forward.bias={_word(inner.bias)}"] = (not inner.bias, "model.feed_forward.bias=false")
    else:
        facts[f"model.attention.window={_window(model)}"] = (_window(model) is None, "no model.attention.window")
    shape = "model.position=rotary" + (" with model.attention.qk_norm=true" if family is QWEN3 else "")
    return _told(shape, family, facts)


def _told(shape: str, family: Family, facts: Mapping[str, tuple[bool, str]]) -> list[Problem]:
    rule = f"with {shape} the class of Hugging Face would be {family.architecture}, which does not have that"
    return [Problem(what, rule, f"a model with {wanted}") for what, (holds, wanted) in facts.items() if not holds]


def _window(model: ModelConfig) -> int | None:
    return next((window for window in model.layer_windows if window is not None), None)


def _word(value: bool) -> str:
    return str(value).lower()
