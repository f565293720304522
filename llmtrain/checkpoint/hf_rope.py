"""The rotary embedding in a config.json: `rope_theta` and `rope_scaling` as files had them, `rope_parameters` as they have now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmtrain.config.errors import Problem
from llmtrain.config.typed import LinearScaling, Llama3Scaling, ModelConfig, YarnScaling

_KNOWN = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""By type of scaling, the keys it reads."""
_NAMES = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_FIXED = {"partial_rotary_factor": 1.0, "truncate": True}
"""Keys of which one value is known, which is also their default."""


def read_rope(values: Mapping[str, Any], given: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Keys `rope.…` of the `model` section.

    Args:
        values: keys of the config.json with defaults filled in.
        given: those that it has.
        problems: what cannot be honoured is added here.
    """
    name = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    rope: Mapping[str, Any] = values[name] or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KNOWN:
        problems.append(Problem(f"{name}.rope_type={kind}", f"known are {', '.join(_KNOWN)}"))
        return {}
    theta = rope.get("rope_theta") or values["rope_theta"]
    problems += _disagreements(values, given, theta)
    for key, value in rope.items():
        if key in _FIXED and value in (None, _FIXED[key]):
            continue
        if key in _FIXED or (value is not None and key not in _KNOWN[kind] | _NAMES):
            rule = f"only {_FIXED[key]} is known" if key in _FIXED else f"no setting of rope_type={kind} that llmtrain knows"
            problems.append(Problem(f"{name}.{key}={value}", rule))
        elif key not in ("rope_type", "type") and value is not None and not _is_positive(value):
            problems.append(Problem(f"{name}.{key}={value}", "a number above 0"))
    missing = sorted(key for key in _KNOWN[kind] & {"factor"} if rope.get(key) is None)
    problems += [Problem(f"{name}.rope_type={kind}", f"needs {key}") for key in missing]
    if problems:
        return {}
    return {"rope.theta": float(theta), **_scaling(kind, rope, values["max_position_embeddings"])}


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _disagreements(values: Mapping[str, Any], given: Mapping[str, Any], used: Any) -> list[Problem]:
    """Old and new names with different values: releases of the library would compute different models from the same file.

    Args:
        used: theta as it is read here; the library's default where it stands under another name than the scaling.
    """
    old, new = values["rope_scaling"] or {}, values["rope_parameters"] or {}
    thetas = {
        key: theta
        for key, theta in (
            ("rope_theta", given.get("rope_theta")),
            ("rope_scaling.rope_theta", old.get("rope_theta")),
            ("rope_parameters.rope_theta", new.get("rope_theta")),
        )
        if theta is not None
    }
    if used not in thetas.values():
        thetas = {"rope_theta (left out)": used, **thetas}
    cure = "rope_theta beside the scaling" if "rope_theta (left out)" in thetas else "leave the wrong one out"
    found = []
    if len(set(thetas.values())) > 1:
        told = " ".join(f"{key}={theta}" for key, theta in thetas.items())
        found.append(Problem(told, "two names of one setting, with different values", cure))
    both = [{**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))} for rope in (old, new)]
    names = (set(both[0]) | set(both[1])) - {"type", "rope_theta"}
    if old and new and any(both[0].get(key) != both[1].get(key) for key in names):
        rule = "two names of one setting, with different values"
        found.append(Problem(f"rope_scaling={old} rope_parameters={new}", rule, "leave the wrong one out"))
    return found


def _scaling(kind: str, rope: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    if kind == "default":
        return {}
    keys: dict[str, Any] = {"kind": kind, "factor": float(rope["factor"])}
    if kind != "linear":
        keys["original_max_positions"] = rope.get("original_max_position_embeddings") or max_positions
    if kind == "llama3":
        keys |= {name: rope.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        keys |= {name: rope.get(name) for name in ("beta_fast", "beta_slow")}
        keys["attention_factor"] = rope.get("attention_factor") or _attention_factor(rope)
    return {f"rope.scaling.{name}": value for name, value in keys.items() if value is not None}


def _attention_factor(rope: Mapping[str, Any]) -> float | None:
    """YaRN's factor where it is given by two others (DeepSeek); None = the usual one."""
    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if not numerator or not denominator:
        return None
    log = math.log(rope["factor"])
    return (0.1 * numerator * log + 1.0) / (0.1 * denominator * log + 1.0)


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The rotary embedding of a model under its old names and its new one."""
    scaling = model.rope_scaling
    keys: dict[str, Any] = {}
    if isinstance(scaling, LinearScaling):
        keys = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        keys = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    elif isinstance(scaling, YarnScaling):
        keys = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
        }
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": keys or None,
        "rope_parameters": {"rope_type": "default", **keys, "rope_theta": model.rope_theta},
    }
