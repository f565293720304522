"""What ranks tell each other is compared whatever its size, and stays small: torch's store takes 8 MiB at once."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any

import pytest
from helpers.meetings import Ranks, meet
from torch.distributed import HashStore, TCPStore

from llmtrain.config.errors import ConfigError, ExitCode
from llmtrain.dist import meeting as meeting_module
from llmtrain.dist.meeting import MAX_VALUE_BYTES, LocalMeeting, StoreMeeting, _joined, compare
from llmtrain.dist.position import Position

pytestmark = pytest.mark.timeout(60)


def comparing(*values: dict[str, Any]) -> list[Any]:
    def work(meeting: StoreMeeting) -> None:
        compare(meeting, "config", values[meeting.rank])

    return meet(*[work] * len(values))


def test_equal_values_pass() -> None:
    values = {"optimizer.lr": 3e-4, "loss": math.nan, "model.layers": [1, 2], "none": None}
    assert comparing(values, dict(reversed(values.items())), values) == [None] * 3
    compare(LocalMeeting(Position()), "config", values)


def test_differing_keys_are_listed_with_ranks_and_values() -> None:
    ends = comparing(
        {"optimizer.lr": 0.1, "seed": 1, "same": 7},
        {"optimizer.lr": 0.2, "seed": 1, "same": 7, "extra": None},
        {"optimizer.lr": 0.2, "seed": 1.0, "same": 7},
    )
    text = str(ends[0])
    assert isinstance(ends[0], ConfigError) and len(ends[0].problems) == 3
    assert "optimizer.lr: rank 0: 0.1; ranks 1-2: 0.2" in text
    assert "seed: ranks 0-1: 1; rank 2: 1.0" in text
    assert "extra: ranks 0, 2: not set; rank 1: null" in text
    assert "same:" not in text
    assert [(end.rank, end.exit_code) for end in ends[1:]] == [(0, ExitCode.CONFIG)] * 2


def test_long_values_are_shown_where_they_differ() -> None:
    text = str(comparing({"files": ["a" * 500, "here", "z" * 500]}, {"files": ["a" * 500, "there", "z" * 500]})[0])
    assert '"here"' in text and '"there"' in text
    assert max(map(len, text.splitlines())) < 200


def test_many_differences_are_counted() -> None:
    values = [{f"key{number}": rank for number in range(100)} for rank in range(2)]
    text = str(comparing(*values)[0])
    assert text.count("rank 0: 0; rank 1: 1") == 20
    assert "80 further keys differ" in text


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20), use_libuv=True)


@pytest.mark.parametrize("too_many", [0, 1])
def test_the_largest_value_passes_and_a_larger_one_is_refused_by_us(server: TCPStore, too_many: int) -> None:
    """The limit is that of torch's store, which cuts the connection of who sends more."""
    around = len(_joined([json.dumps(["share text", json.dumps("")]).encode(), json.dumps(["share text", "null"]).encode()]))
    text = "x" * (MAX_VALUE_BYTES - around + too_many)
    ends = Ranks([lambda meeting: len(meeting.share("text", lambda: text))] * 2, server).wait()
    if not too_many:
        assert ends == [len(text)] * 2
        return
    assert isinstance(ends[0], ValueError) and "8,388,609 bytes in `share text`" in str(ends[0])
    assert (ends[1].rank, ends[1].exit_code) == (0, ExitCode.FAULT)


def test_a_rank_with_too_large_a_value_of_its_own_is_the_one_that_fails(server: TCPStore) -> None:
    values = [1, "x" * MAX_VALUE_BYTES]
    ends = Ranks([lambda meeting: meeting.gather("odd", values[meeting.rank])] * 2, server).wait()
    assert isinstance(ends[1], ValueError) and "`gather odd`" in str(ends[1])
    assert (ends[0].rank, ends[0].exit_code) == (1, ExitCode.FAULT)


class Told(HashStore):
    """Counts what is set: a meeting's result is read by every rank, so it has to stay small."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[int] = []

    def set(self, key: str, value: Any) -> None:
        if key.count("/") == 1:
            self.results.append(len(value))
        super().set(key, value)


@pytest.mark.parametrize("size", [2, 12])
def test_what_all_ranks_say_alike_costs_the_same_however_many_they_are(size: int) -> None:
    store = Told()
    values = {f"key{number}": "v" * 50 for number in range(200)}

    def work(meeting: StoreMeeting) -> Any:
        with meeting.together("data"):
            compare(meeting, "config", values)
        return meeting.gather("host", ["a", 4])

    assert Ranks([work] * size, store).wait() == [[["a", 4]] * size] * size
    assert max(store.results) < 120, "a digest and a name, not 200 values"


def test_where_ranks_differ_what_is_told_does_not_grow_with_their_number() -> None:
    store = Told()

    def work(meeting: StoreMeeting) -> None:
        compare(meeting, "config", {"seed": meeting.rank % 10, **{f"key{number}": "v" * 50 for number in range(200)}})

    ends = Ranks([work] * 12, store).wait()
    text = str(ends[0])
    assert "seed: ranks 0, 10: 0; ranks 1, 11: 1; rank 2: 2; rank 3: 3" in text
    assert "ranks 4-9 differ from these as well" in text and len(ends[0].problems) == 2
    assert max(store.results) < 4 * 200 * 100


def test_values_of_any_length_and_number_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "MAX_VALUE_BYTES", 2**20)
    same = {f"key{number}": number for number in range(12_345)}
    ends = comparing(*[same | {"last": "\\" * 10**6 + last} for last in "ab"])
    assert isinstance(ends[0], ConfigError) and len(ends[0].problems) == 1
    zero, one = str(ends[0].problems[0].what).removeprefix("last: ").split("; ")
    assert zero.removeprefix("rank 0") != one.removeprefix("rank 1"), "told apart by their digests"
