"""What all blocks of one forward share besides the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain.model.cache import KVCache
from llmtrain.ops.attention_masks import Mask
from llmtrain.ops.random import DropoutKey
from llmtrain.ops.rotary import RotaryTable


@dataclass(frozen=True)
class ForwardContext:
    """Made once per forward; a recomputed block gets the same one again."""

    rotary: RotaryTable | None
    """None when positions are learned."""
    masks: Mapping[int | None, Mask]
    """By window of a layer: which keys a query may see, as the attention backend takes it."""
    dropout_key: DropoutKey | None
    """None when nothing is dropped."""
    cache: KVCache | None
    """None when training."""
