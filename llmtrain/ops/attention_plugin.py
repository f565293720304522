"""Attention by an installed plugin: it is given one dense mask, whatever the run asks for.

Legend: B batch, T query positions, S key positions, H query heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.plugins import Installed, build
from llmtrain.ops.attention_masks import AttentionDropout, AttentionFunction, MaskRequest, hidden_keys


def allowed_keys(request: MaskRequest) -> Tensor:
    """[T, S], with documents [B, 1, T, T], bool: True where a query may see a key."""
    return hidden_keys(request).logical_not_()


def plugin_attention(plugin: Installed, options: Any) -> AttentionFunction:
    """The function that the plugin makes of its options, in the form of the other backends.

    Raises:
        ConfigError: what it makes is no function, or a package it needs is missing.
    """
    attend = build(plugin, options)
    if not callable(attend):
        rule = f"{plugin.package} made a {type(attend).__name__} and not a function"
        raise ConfigError(Problem(f"{plugin.chooser}={plugin.word}", rule, "a function as docs/plugins.md describes it"))

    def attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, drop: AttentionDropout) -> Tensor:
        mixed: Tensor = attend(query, key, value, allowed)
        return mixed

    return attention
