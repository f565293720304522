"""config.json of a Hugging Face folder ↔ the `model` section of a run.

Reading: every key is translated, or known to decide on nothing and kept for the way back, or refused by name. Writing: keys that were
renamed are written under both names, so that the transformers library in either major version and other engines find them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmtrain.checkpoint.hf_families import FAMILIES, GPT2, HARMLESS, THEIR_NAMES, Family, family_of
from llmtrain.checkpoint.hf_rope import read_rope, write_rope
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.typed import ModelConfig

NOT_KEPT = frozenset(
    """
    _commit_hash _model_name_or_path _name_or_path architectures dtype initializer_range model_type name_or_path torch_dtype
    transformers_version
    """.split()
)
"""Harmless keys that an export writes itself or that are only true of the folder they were read from."""
FULL, SLIDING = "full_attention", "sliding_attention"
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class HfModel:
    """What a config.json says."""

    family: Family
    section: dict[str, Any]
    """Keys of the `model` section, dotted below `model.`."""
    kept: dict[str, Any]
    """Keys without effect on the function, as they were."""
    dropout: dict[str, float]
    """Dropouts other than 0, by their own key; they are in `kept` too."""


def read_config(document: Mapping[str, Any], where: str) -> HfModel:
    """Translate a config.json.

    Args:
        document: its content.
        where: its path, for messages.

    Raises:
        ConfigError: listing every setting that a Transformer of ours cannot have, and every one that is not known.
    """
    family = FAMILIES.get(str(document.get("model_type")))
    if family is None:
        rule = f"{where}: of the families {', '.join(FAMILIES)}"
        raise ConfigError(Problem(f"model_type={document.get('model_type')}", rule, "a model of one of these families"))
    given = {family.spellings.get(key, key): value for key, value in document.items()}
    values, problems = _values(given, family)
    problems += _unknown(given, family) + _other_class(given, family)
    if not problems:
        section = _gpt2_section(values) if family is GPT2 else _llama_section(values, given, problems)
    if problems:
        raise ConfigError(*(Problem(one.what, f"{where}: {one.rule}", one.cure) for one in problems))
    std = given.get("initializer_range")
    if isinstance(std, int | float) and not isinstance(std, bool) and std > 0:
        section["init_std"] = float(std)
    kept = {key: value for key, value in given.items() if key not in NOT_KEPT and _is_harmless(key, family)}
    return HfModel(family, section, kept, {key: given[key] for key in family.dropout if given.get(key)})


def in_their_words(problem: Problem, family: Family, where: str) -> Problem:
    """A problem of the `model` section as one of the config.json that it was translated from.

    Args:
        where: path of the config.json.
    """
    names = THEIR_NAMES[family.model_type]

    def translated(text: str) -> str:
        return re.sub(r"model\.([a-z_]+(?:\.[a-z_]+)*)", lambda found: names.get(found[1], found[0]), text)

    return Problem(translated(problem.what), f"{where}: {translated(problem.rule)}", translated(problem.cure))


def _is_harmless(key: str, family: Family) -> bool:
    return key in HARMLESS or key in family.harmless or key in family.dropout


def _values(given: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[Problem]]:
    """The keys that decide on the function, those left out with the library's default, and what is wrong with them."""
    values, problems = dict(family.defaults), []
    for key, default in family.defaults.items():
        if key not in given:
            continue
        values[key] = value = given[key]
        if value is None and isinstance(default, bool):
            values[key] = False
        elif not (value is None and key in family.nullable) and not _is_like(value, key, default):
            problems.append(Problem(f"{key}={value}", f"a {_kind(key, default)}"))
    for key, legal in family.fixed.items():
        value = given.get(key, legal[0])
        if value not in legal and value is not None:
            words = " or ".join(map(str, legal))
            problems.append(Problem(f"{key}={value}", f"a model of llmtrain can only have {words} there"))
    return values, problems


def _is_like(value: Any, key: str, default: Any) -> bool:
    kind = _kind(key, default)
    if kind == "switch":
        return isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if kind == "count":
        return isinstance(value, int) and not isinstance(value, bool) and value >= (0 if key == "max_window_layers" else 1)
    return isinstance(value, dict if kind == "section" else list)


def _kind(key: str, default: Any) -> str:
    if key in ("rope_scaling", "rope_parameters"):
        return "section"
    if key == "layer_types":
        return "list"
    return "switch" if isinstance(default, bool) else "number" if isinstance(default, float) else "count"


def _unknown(given: Mapping[str, Any], family: Family) -> list[Problem]:
    """Keys that nobody here knows. Null says that something is not used."""
    rule = f"not a setting that llmtrain knows for model_type={family.model_type}, so it may change what the model computes"
    cure = "see what it does; if it does nothing, take it out of config.json"
    return [
        Problem(f"{key}={_short(value)}", rule, cure)
        for key, value in given.items()
        if value is not None and key not in family.defaults and key not in family.fixed and not _is_harmless(key, family)
    ]


def _other_class(given: Mapping[str, Any], family: Family) -> list[Problem]:
    known = (family.architecture, family.base)
    return [
        Problem(f"architectures={name}", f"model_type={family.model_type} is read for {' and '.join(known)}")
        for name in given.get("architectures") or ()
        if name not in known
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _gpt2_section(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "dim": values["n_embd"],
        "num_layers": values["n_layer"],
        "vocab_size": values["vocab_size"],
        "max_positions": values["n_positions"],
        "position": "learned",
        "norm": "layer",
        "norm_eps": values["layer_norm_epsilon"],
        "tie_embeddings": values["tie_word_embeddings"],
        "attention.num_heads": values["n_head"],
        "attention.bias": True,
        "attention.output_bias": True,
        "feed_forward.kind": "gelu",
        "feed_forward.hidden_dim": values["n_inner"] or 4 * values["n_embd"],
        "feed_forward.bias": True,
    }


def _llama_section(values: Mapping[str, Any], given: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    bias = values["attention_bias"]
    return {
        "dim": values["hidden_size"],
        "num_layers": values["num_hidden_layers"],
        "vocab_size": values["vocab_size"],
        "max_positions": values["max_position_embeddings"],
        "position": "rotary",
        "norm": "rms",
        "norm_eps": values["rms_norm_eps"],
        "tie_embeddings": values["tie_word_embeddings"],
        "attention.num_heads": heads,
        "attention.num_kv_heads": values["num_key_value_heads"] or heads,
        "attention.head_dim": values["head_dim"] or values["hidden_size"] // heads,
        "attention.qk_norm": given["model_type"] == "qwen3",
        "attention.bias": bias,
        "attention.output_bias": bias,
        "feed_forward.kind": "swiglu",
        "feed_forward.hidden_dim": values["intermediate_size"],
        "feed_forward.bias": values.get("mlp_bias", False),
        **read_rope(values, given, problems),
        **_windows(values, problems),
    }


def _windows(values: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Which layers see a window only; the library ignores `sliding_window` where `use_sliding_window` is off."""
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    layers = values["num_hidden_layers"]
    kinds = values.get("layer_types")
    if kinds is None:
        first = values.get("max_window_layers", layers)
        kinds = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
    for kind in sorted(set(map(str, kinds)) - {FULL, SLIDING}):
        problems.append(Problem(f"layer_types={kind}", f"layers of llmtrain are {FULL} or {SLIDING}"))
    if len(kinds) != layers:
        problems.append(Problem(f"layer_types of {len(kinds)} layers", f"num_hidden_layers is {layers}"))
    if SLIDING not in kinds or problems:
        return {}
    if window is None:
        rule = f"layer_types has {SLIDING}, and no window is on to slide"
        problems.append(Problem("use_sliding_window=false", rule, "use_sliding_window=true with sliding_window"))
        return {}
    letters = "".join("S" if kind == SLIDING else "L" for kind in kinds)
    return {"attention.window": window, "attention.window_pattern": _shortest_period(letters)}


def _shortest_period(letters: str) -> str:
    """The shortest text that gives `letters` when it is repeated and cut."""
    count = len(letters)
    return next(letters[:period] for period in range(1, count + 1) if (letters[:period] * count)[:count] == letters)


def write_config(
    model: ModelConfig, *, dtype: str, bos_id: int | None, eos_id: int | None, kept: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json of a model.

    Args:
        model: its shape, with `vocab_size` settled.
        dtype: `fp32`, `bf16` or `fp16`.
        bos_id, eos_id: of the tokenizer; None is written as null, since the library's default would be some other token.
        kept: keys without effect from the config.json the model once came from.

    Raises:
        ConfigError: no class of the transformers library computes this model.
    """
    family, dropout, kept = family_of(model), vars(model.dropout), kept or {}
    # What a run does not drop is left to what the folder said that it came from.
    drop = {key: dropout[ours] for key, ours in family.dropout.items() if dropout[ours] or key not in kept}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "use_cache": True,
        **kept,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        **(_gpt2_keys(model) if family is GPT2 else _llama_keys(model, family)),
        **drop,
        "dtype": DTYPE_NAMES[dtype],
        "torch_dtype": DTYPE_NAMES[dtype],
    }


def _gpt2_keys(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.dim,
        "n_layer": model.num_layers,
        "n_head": model.attention.num_heads,
        "n_inner": model.feed_forward.hidden_dim,
        "n_positions": model.max_positions,
        "n_ctx": model.max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
    }


def _llama_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    heads = model.attention
    keys = {
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "intermediate_size": model.feed_forward.hidden_dim,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "max_position_embeddings": model.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_bias": heads.bias,
        **write_rope(model),
    }
    if "mlp_bias" in family.defaults:
        return {**keys, "mlp_bias": model.feed_forward.bias}
    window = next((one for one in model.layer_windows if one is not None), None)
    kinds = [FULL if one is None else SLIDING for one in model.layer_windows]
    # Old readers know only a first windowed layer; they cannot have read a pattern that is not of that form either.
    first = next((layer for layer, kind in enumerate(kinds) if kind == SLIDING), model.num_layers)
    windows = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}
    return {**keys, **windows, "layer_types": kinds}
