"""What all blocks of one forward share besides the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llmtrain.model.cache import KVCache
from llmtrain.ops.random import DropoutKey
from llmtrain.ops.rotary import RotaryTable


@dataclass(frozen=True)
class ForwardContext:
    """Made once per forward; a recomputed block gets the same one again."""

    rotary: RotaryTable | None
    """None when positions are learned."""
    allowed: Tensor | None
    """[B, 1, T, T] bool, the keys each query may see; None when each row is one document."""
    dropout_key: DropoutKey | None
    """None when nothing is dropped."""
    cache: KVCache | None
    """None when training."""
