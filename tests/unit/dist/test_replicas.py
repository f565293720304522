"""Digests of tensors see every bit and every place, and a rank whose copy differs is named."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.group import grouped
from torch import Tensor

from llmtrain.config.errors import ExitCode, NumericsError, PeerError
from llmtrain.dist import meeting, replicas
from llmtrain.dist.collectives import NoCollectives
from llmtrain.dist.meeting import StoreMeeting
from llmtrain.dist.position import Position
from llmtrain.dist.replicas import check_replicas, digests
from llmtrain.metrics.memory import StorageLedger

MIB = 2**20
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64)


def some(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Random content of a dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 256, shape, generator=generator).to(dtype)


def one(tensor: Tensor) -> int:
    return int(digests({"": tensor}))


def mix(word: int) -> int:
    """SplitMix64's finalizer in the integers of Python."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def spelt_out(tensor: Tensor) -> int:
    content = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    total = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for index in range(0, len(content), 8):
        word = int.from_bytes(content[index : index + 8], "little")
        total += mix((word + index // 8 * 0x9E3779B97F4A7C15) % 2**64)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 2**20])
def test_a_digest_is_what_its_formula_says_however_it_is_chunked(monkeypatch, dtype: torch.dtype, chunk: int) -> None:
    monkeypatch.setattr(replicas, "CHUNK_WORDS", chunk)
    for shape in ((), (1,), (7,), (8,), (9, 5), (0,), (3, 0), (4, 6, 11)):
        tensor = some(dtype, *shape)
        assert one(tensor) == spelt_out(tensor), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    tensor = some(dtype, 13)
    content = tensor.view(torch.uint8)
    seen = {one(tensor)}
    bits = (0,) if dtype is torch.bool else range(8)
    for byte in range(content.numel()):
        for bit in bits:
            content[byte] ^= 1 << bit
            seen.add(one(tensor))
            content[byte] ^= 1 << bit
    assert len(seen) == 1 + content.numel() * len(bits)


@pytest.mark.parametrize("pair", [(1.0, -1.0), (1.0, 2.0), (0.0, -0.0), (float("nan"), float("inf")), (1.0, 1.0 + 2**-23)])
def test_elements_that_change_places_are_seen(pair: tuple[float, float]) -> None:
    for first, second in ((0, 1), (1, 3), (0, 2), (5, 4099), (4098, 4099)):
        tensor = torch.zeros(5000)
        tensor[first], tensor[second] = pair
        swapped = tensor.clone()
        swapped[first], swapped[second] = pair[1], pair[0]
        assert one(tensor) != one(swapped), (first, second)


def test_tensors_that_change_places_are_seen_and_layout_is_not() -> None:
    a, b = some(torch.float32, 4, 6), some(torch.float32, 4, 6, seed=1)
    assert digests({"a": a, "b": b}).tolist() != digests({"a": b, "b": a}).tolist()
    assert one(a) != one(a.reshape(6, 4)) and one(a) != one(a.view(torch.int32))
    assert one(a) == one(a.t().contiguous().t())
    assert one(some(torch.uint8, 64)[3:40]) == one(some(torch.uint8, 64)[3:40].clone()), "alignment"
    assert one(torch.nn.Parameter(a)) == one(a)
    assert digests({}).shape == (0,)


def test_a_large_tensor_needs_little_beside_it() -> None:
    tensor = some(torch.float32, 25 * MIB)  # 100 MiB
    ledger = StorageLedger(torch.device("cpu"))
    ledger.adopt([tensor], "params")
    with ledger.window():
        digests({"tensor": tensor})
    summary = ledger.summary()
    assert summary is not None
    assert 16 * MIB < summary.peak_bytes - tensor.nbytes <= 64 * MIB


def check_all(copies: list[dict[str, Tensor]]) -> list[BaseException | None]:
    """What the check raised on each of the ranks that have these copies."""
    store = dist.HashStore()

    def check(rank: int) -> BaseException | None:
        position = Position()
        collectives: Any = NoCollectives(position)
        collectives.rank, collectives.size = rank, len(copies)
        try:
            check_replicas(collectives, StoreMeeting(store, rank, len(copies), position), copies[rank], "weights")
        except (NumericsError, PeerError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(check, range(len(copies))))


def weights(**changes: float) -> dict[str, Tensor]:
    tensors = {f"w{index}": some(torch.float32, 3, 5, seed=index) for index in range(6)}
    for name, change in changes.items():
        tensors[name][1, 2] += change
    return tensors


def test_equal_copies_pass_on_every_rank() -> None:
    assert check_all([weights(), weights(), weights()]) == [None] * 3


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        ([weights(), weights(w3=1.0), weights()], ["weights differ", "w3 on rank 1"]),
        ([weights(w0=1.0), weights(), weights()], ["w0 on rank 0"]),
        ([weights(), weights(w1=1.0), weights(w1=2.0), weights()], ["w1 on ranks 1-2"]),
        ([weights(), weights(w1=1.0)], ["w1 on rank 1"]),
        ([weights(w5=1.0), weights(w2=1.0), weights()], ["w2 on rank 1", "w5 on rank 0"]),
        (
            [weights(), weights(), weights(w0=1.0, w1=1.0, w2=1.0, w3=1.0, w4=1.0)],
            ["w0 on rank 2; w1 on rank 2; w2 on rank 2 and 2 more"],
        ),
        ([weights(), weights() | {"extra": torch.zeros(1)}], ["extra on rank 1"]),
    ],
)
def test_a_rank_outside_the_largest_group_is_named(copies: list[dict[str, Tensor]], words: list[str]) -> None:
    main, *others = check_all(copies)
    assert isinstance(main, NumericsError)
    for word in words:
        assert word in str(main)
    for other in others:
        assert isinstance(other, PeerError) and (other.rank, other.exit_code) == (0, ExitCode.NUMERICS)


def test_what_is_told_stays_small_with_many_ranks_and_tensors(monkeypatch) -> None:
    """51 ranks with 80 layers met the limit of torch's store; here every rank has copies of its own, in the same proportion."""
    monkeypatch.setattr(meeting, "MAX_VALUE_BYTES", 2**17)
    num_tensors = 1500
    copies = [{f"model.layers.{index}.weight": torch.tensor([index]) for index in range(num_tensors)} for _ in range(9)]
    for rank in range(3, 9):
        copies[rank]["model.layers.1400.weight"] = torch.tensor([-rank])
    text = str(check_all(copies)[0])
    assert "weights differ between ranks: model.layers.1400.weight on ranks 3-5; ranks 6-8 differ in other ways" in text
    assert check_all(copies[:3]) == [None] * 3


def test_names_count_as_well_as_numbers() -> None:
    assert "w9 on rank 1" in str(check_all([{"w": torch.ones(1)}, {"w9": torch.ones(1)}])[0])


def test_one_rank_has_nothing_to_compare_and_looks_at_nothing() -> None:
    check_replicas(NoCollectives(Position()), None, {"w": None}, "weights")  # type: ignore[arg-type, dict-item]


def really_compared(place: Any, folder: str, spoilt: bool) -> str:
    with grouped(place, folder) as world:
        store = dist.PrefixStore("meeting", dist.FileStore(f"{folder}/meeting", world.size))
        meetings = StoreMeeting(store, world.rank, world.size, world.position)
        tensors = weights(w4=float(spoilt and world.rank == 1))
        try:
            check_replicas(world.collectives, meetings, tensors, "weights")
        except (NumericsError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


def test_ranks_compare_over_the_store(ranks, tmp_path) -> None:
    for spoilt in (False, True):
        folder = tmp_path / str(spoilt)
        folder.mkdir()
        main, other = ranks.run(really_compared, 2, str(folder), spoilt)
        assert ("w4 on rank 1" in main, "PeerError" in other) == (spoilt, spoilt)
        assert spoilt or main == other == ""
