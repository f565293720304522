"""Dropout (Srivastava et al. 2014) whose mask is a counter-based function of where it is applied; see `ops/random.py`."""

from __future__ import annotations

import math

from torch import Tensor

from llmtrain.ops.random import LANE_LEVELS, DropoutKey, Site, uniform_lanes


def dropout(x: Tensor, probability: float, key: DropoutKey | None, layer: int, site: Site) -> Tensor:
    """Zero each element with `probability` and scale the others so that the expectation stays.

    Args:
        x: [B, T, ...]; the trailing dimensions together are the channels.
        probability: in [0, 1); honoured to 1 / 65536, and the scale uses the probability as honoured.
        key: None = no dropout.

    Returns:
        [B, T, ...] in the dtype of x; x itself when there is nothing to drop.
    """
    level = round(probability * LANE_LEVELS)
    if key is None or level == 0:
        return x
    num_channels = math.prod(x.shape[2:])
    lanes = uniform_lanes(key, layer, site, x.shape[1], num_channels)  # [B, T, C]
    dropped = (lanes < level - LANE_LEVELS // 2).view(x.shape)
    return x.masked_fill(dropped, 0.0) * (LANE_LEVELS / (LANE_LEVELS - level))
