"""Whether copies of tensors are equal on all ranks, told by one number a tensor.

The digest of a tensor is a sum over its 8-byte words w_i of mix(w_i + i·g) modulo 2^64, where mix is the finalizer of SplitMix64
(Steele, Lea and Flood 2014), a bijection in which every bit of the input decides about half of the bits of the result, and g its odd
increment. So a flipped bit always changes it, and so do elements that change places, but for a chance of about 2^-64; a plain
weighted sum would miss, for instance, two elements of opposite sign that change places.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from llmtrain.config.errors import ExitCode, NumericsError, PeerError, Problem
from llmtrain.dist.collectives import Collectives
from llmtrain.dist.meeting import Meeting

CHUNK_WORDS = 2**20
"""Words looked at together; four tensors of this size exist at once: 32 MiB."""
WORD_BYTES = 8
SHOWN_TENSORS = 3
"""Differing tensors that a message names."""


def _signed(word: int) -> int:
    """An unsigned 64-bit constant as the int64 that torch takes."""
    return word - 2**64 if word >= 2**63 else word


INCREMENT = _signed(0x9E3779B97F4A7C15)
ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
LAST_SHIFT = 31


def digests(tensors: Mapping[str, Tensor]) -> Tensor:
    """[n] int64 on the CPU: a number for each tensor, in the order of the mapping, that depends on dtype, shape, and every bit.

    Tensors may be of any dtype and device; one that is not contiguous is copied for the time of its digest.
    """
    return torch.tensor([_digest(tensor) for tensor in tensors.values()], dtype=torch.int64)


def check_replicas(collectives: Collectives, meeting: Meeting, tensors: Mapping[str, Tensor], what: str) -> None:
    """Check that `tensors` are equal on all ranks, bit by bit; all ranks call it together. One rank has nothing to compare.

    Raises:
        NumericsError: on rank 0, naming the first tensors that differ and the ranks outside the largest group of equal ones.
        PeerError: on the others, when rank 0 raises.
    """
    if collectives.size == 1:
        return
    own = dict(zip(tensors, digests(tensors).tolist(), strict=True))
    by_rank = meeting.gather(f"digests of {what}", own)
    if all(other == by_rank[0] for other in by_rank):
        return
    if collectives.rank != 0:
        raise PeerError(0, ExitCode.NUMERICS)
    names = [name for name in dict.fromkeys(name for found in by_rank for name in found) if not _agree(by_rank, name)]
    shown = "; ".join(f"{name} on {_ranks(_outsiders(by_rank, name))}" for name in names[:SHOWN_TENSORS])
    more = f" and {len(names) - SHOWN_TENSORS} more" if len(names) > SHOWN_TENSORS else ""
    raise NumericsError(
        Problem(
            f"{what} differ between ranks: {shown}{more}",
            "every rank keeps the same copy, or the ranks train different models and average what has no meaning",
            "the same software and hardware on every rank; a rank that is named again and again may have bad memory",
        )
    )


def _agree(by_rank: list[dict[str, int]], name: str) -> bool:
    return len({found.get(name) for found in by_rank}) == 1


def _outsiders(by_rank: list[dict[str, int]], name: str) -> list[int]:
    """Ranks that do not have what most have; of groups of equal size the one with the lowest rank counts as most."""
    values = [found.get(name) for found in by_rank]
    common = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != common]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


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
