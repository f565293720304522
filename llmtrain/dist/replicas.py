"""Whether copies of tensors are equal on all ranks, told by one number a tensor.

The digest of a tensor is a sum over its 8-byte words w_i of mix(w_i + i·g) modulo 2^64, where mix is the finalizer of SplitMix64
(Steele, Lea and Flood 2014), a bijection in which every bit of the input decides about half of the bits of the result, and g its odd
increment. So a flipped bit always changes it, and so do elements that change places, but for a chance of about 2^-64; a plain
weighted sum would miss, for instance, two elements of opposite sign that change places.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llmtrain.config.errors import ExitCode, NumericsError, PeerError, Problem
from llmtrain.dist.collectives import Collectives
from llmtrain.dist.failure import describe_ranks
from llmtrain.dist.meeting import Meeting, told_where_differing

CHUNK_WORDS = 2**20
"""Words looked at together; four tensors of this size exist at once: 32 MiB."""
WORD_BYTES = 8
SHOWN_TENSORS = 3
"""Differing tensors that a message names."""
SHOWN_RANKS = 64
"""Ranks that it names for each."""


def _signed(word: int) -> int:
    """An unsigned 64-bit constant as the int64 that torch takes."""
    return word - 2**64 if word >= 2**63 else word


INCREMENT = _signed(0x9E3779B97F4A7C15)
ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
LAST_SHIFT = 31


def digests(tensors: Mapping[str, Tensor], tick: Callable[[], None] = lambda: None) -> Tensor:
    """[n] int64 on the CPU: a number for each tensor, in the order of the mapping, that depends on dtype, shape, and every bit.

    Tensors may be of any dtype and device; one that is not contiguous is copied for the time of its digest. `tick` is called after each.
    """
    numbers = []
    for tensor in tensors.values():
        numbers.append(_digest(tensor))
        tick()
    return torch.tensor(numbers, dtype=torch.int64)


def check_replicas(
    collectives: Collectives,
    meeting: Meeting,
    tensors: Mapping[str, Tensor],
    what: str,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Check that `tensors` are equal on all ranks, bit by bit; all ranks call it together. One rank has nothing to compare.

    Raises:
        NumericsError: on rank 0, naming the first tensors that differ and the ranks outside the largest group of equal ones.
        PeerError: on the others, when rank 0 raises.
    """
    if collectives.size == 1:
        return
    own = dict(zip(tensors, digests(tensors, tick).tolist(), strict=True))
    by_rank = told_where_differing(meeting, what, own)
    if by_rank is None:
        return
    if collectives.rank != 0:
        raise PeerError(0, ExitCode.NUMERICS)
    heard = {rank: found for rank, found in enumerate(by_rank) if found is not None}
    names = [name for name in dict.fromkeys(name for found in heard.values() for name in found) if _outsiders(heard, name)]
    parts = [f"{name} on {_ranks(_outsiders(heard, name))}" for name in names[:SHOWN_TENSORS]]
    shown = "; ".join(parts) + (f" and {len(names) - SHOWN_TENSORS} more" if len(names) > SHOWN_TENSORS else "")
    others = [rank for rank, found in enumerate(by_rank) if found is None]
    raise NumericsError(
        Problem(
            f"{what} differ between ranks: {shown}{f'; {_ranks(others)} differ in other ways' if others else ''}",
            "every rank keeps the same copy, or the ranks train different models and average what has no meaning",
            "the same software and hardware on every rank; a rank that is named again and again may have bad memory",
        )
    )


def _outsiders(heard: Mapping[int, Mapping[str, int]], name: str) -> list[int]:
    """Ranks that do not have what most have; of groups of equal size the one with the lowest rank counts as most."""
    values = {rank: found.get(name) for rank, found in heard.items()}
    common = Counter(values.values()).most_common(1)[0][0]
    return [rank for rank, value in values.items() if value != common]


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return describe_ranks(ranks[:SHOWN_RANKS]) + more


def _digest(tensor: Tensor) -> int:
    """Signed 64-bit number of one tensor."""
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    chunk = max(1, min(CHUNK_WORDS, -(-content.numel() // WORD_BYTES)))
    scratch = [torch.empty(chunk, dtype=torch.int64, device=content.device) for _ in range(2)]
    steps = torch.arange(chunk, dtype=torch.int64, device=content.device) * INCREMENT
    total = torch.full((), kind, dtype=torch.int64, device=content.device)
    for first in range(0, content.numel(), chunk * WORD_BYTES):
        words, spare = (buffer[: -(-(content.numel() - first) // WORD_BYTES)] for buffer in scratch)
        part = content[first : first + chunk * WORD_BYTES]
        words[-1] = 0  # what fills up the last word
        words.view(torch.uint8)[: part.numel()].copy_(part)
        words += steps[: len(words)]
        # The place of the chunk; arithmetic modulo 2^64 is that of unsigned words.
        words += _signed(first // WORD_BYTES * INCREMENT % 2**64)
        total += _mix(words, spare).sum()
    return int(total)


def _mix(words: Tensor, spare: Tensor) -> Tensor:
    """SplitMix64's finalizer in place; `spare` is overwritten."""
    for shift, factor in ROUNDS:
        _shift_in(words, spare, shift)
        words *= factor
    _shift_in(words, spare, LAST_SHIFT)
    return words


def _shift_in(words: Tensor, spare: Tensor, shift: int) -> None:
    """words ^= words >> shift, the shift taken as that of unsigned words."""
    torch.bitwise_right_shift(words, shift, out=spare)
    spare &= 2 ** (64 - shift) - 1
    words ^= spare
