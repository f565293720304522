"""Counter-based random numbers: a draw is a pure function of where it is used, never of what was drawn before.

A dropout mask depends on (seed, update, layer, site, global sample, position, channel) and on nothing else, so it is the same
however the batch is cut into micro-batches or spread over ranks, and when a block is recomputed. The generator is SplitMix64
(Steele, Lea and Flood 2014): a 64-bit counter put through a finaliser in which every input bit flips each output bit with
probability one half. One 64-bit result gives four 16-bit lanes, one per channel.

Legend: B batch, T positions, C channels, G = ceil(C / 4) groups of four channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

LANES_PER_WORD = 4
LANE_LEVELS = 2**16
"""Number of equally likely values of one lane; probabilities are honoured to 1 / LANE_LEVELS."""

_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15
_SECOND_WEYL = 0xD1B54A32D192ED03
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Site(IntEnum):
    """Places of a network that draw numbers; the value is part of the counter, so it never changes meaning."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_RESIDUAL = 2
    FEED_FORWARD = 3
    FEED_FORWARD_RESIDUAL = 4


@dataclass(frozen=True)
class DropoutKey:
    """What identifies the sequences of one forward pass among all of a run."""

    seed: int
    update: int
    """Index of the optimizer update the batch belongs to."""
    samples: Tensor
    """[B] int64: index of each sequence in the whole run's sample order."""


def uniform_lanes(key: DropoutKey, layer: int, site: Site, num_positions: int, num_channels: int) -> Tensor:
    """Draw integers that are uniform on [-32768, 32767], one per channel.

    Position is the place in the row, not the (possibly restarting) position id, so two documents of a row never share a mask.

    Returns:
        [B, T, C] int16, on the device of `key.samples`.
    """
    base = _mix_int(_mix_int(_mix_int(key.seed) + key.update) + layer * len(Site) + site)
    samples = _mix_(key.samples * _signed(_GOLDEN) + _signed(base))  # [B]
    positions = torch.arange(num_positions, device=samples.device) * _signed(_SECOND_WEYL)  # [T]
    rows = _mix_(samples[:, None] + positions)  # [B, T]
    num_groups = -(-num_channels // LANES_PER_WORD)
    groups = torch.arange(1, num_groups + 1, device=samples.device) * _signed(_GOLDEN)  # [G]
    words = _mix_(rows[:, :, None] + groups)  # [B, T, G]
    return words.view(torch.int16)[:, :, :num_channels]  # [B, T, C]


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place on int64; a product that overflows wraps, which is what is wanted."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(_MIX_1))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(_MIX_2))
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 is signed in torch, so the copies of the sign bit are cut off."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _mix_int(x: int) -> int:
    """The same finaliser on a Python integer, after one step of the counter."""
    x = (x + _GOLDEN) % _WORD
    x = (x ^ (x >> 30)) * _MIX_1 % _WORD
    x = (x ^ (x >> 27)) * _MIX_2 % _WORD
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return x - _WORD if x >= _WORD // 2 else x
