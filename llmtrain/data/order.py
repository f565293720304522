"""The order in which the rows of an epoch are visited: a shuffle that is computed, not stored.

`shuffled` maps a place in an epoch to a row number by a keyed one-to-one function, so the order needs no table (a table costs 8
bytes a row), no state to save, and stays the same across library versions. The function is a Feistel network over the smallest
power of two that holds all rows; a result outside the range is sent through again until it lands inside ("cycle walking": Black
and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Half rounds of the network; four already make it hard to tell from a random permutation (Luby and Rackoff, 1988)."""


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers one to one: neighbours become unrelated (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def stream_keys(*words: int | str) -> NDArray[np.uint64]:
    """Eight 64-bit keys that depend on every word; other words give unrelated keys."""
    text = "/".join(str(word) for word in words)
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=64).digest(), dtype="<u8").astype(np.uint64)


def shuffled(places: NDArray[np.int64], num_rows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Row number at each place of an epoch.

    Args:
        places: [B] places in the epoch, each in [0, num_rows), in any order.
        num_rows: rows of an epoch; over all places each row appears exactly once.

    Returns:
        [B] row numbers: a function of (seed, epoch, place) and nothing else.
    """
    bits = max(2, (num_rows - 1).bit_length())
    keys = stream_keys("order", seed, epoch)
    rows = places.astype(np.uint64)
    outside = np.arange(rows.size)
    while outside.size:
        rows[outside] = _scramble(rows[outside], bits, keys)
        outside = outside[rows[outside] >= num_rows]
    return rows.astype(np.int64)


def _scramble(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute [0, 2**bits): each half round changes one half of the bits by a function of the other, which can be undone."""
    low_bits = np.uint64(bits - bits // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for index in range(0, ROUNDS, 2):
        high = high ^ (mix64(low + keys[index]) & high_mask)
        low = low ^ (mix64(high + keys[index + 1]) & low_mask)
    return (high << low_bits) | low
