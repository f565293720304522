"""Tokens in several parts read like one array, against numpy on the parts joined; ids outside the vocabulary never leave."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.config.errors import DataError
from llmtrain.data.token_array import Origin, TokenArray, map_file


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 0),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_parts_read_like_one_array(lengths: list[int], data: st.DataObject) -> None:
    whole = np.random.default_rng(sum(lengths)).integers(0, 60_000, sum(lengths))
    dtypes = [data.draw(st.sampled_from(["<u2", "<u4", "<i8"])) for _ in lengths]
    borders = np.cumsum([0, *lengths])
    array = TokenArray([whole[a:b].astype(dtype) for a, b, dtype in zip(borders, borders[1:], dtypes)])
    assert len(array) == len(whole)
    places = np.array(data.draw(st.lists(st.lists(st.integers(0, len(whole) - 1), min_size=3, max_size=3), max_size=5)))
    places = places.astype(np.int64).reshape(-1, 3)
    read = array.read(places)
    assert read.dtype == np.int64 and read.shape == places.shape and (read == whole[places]).all()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert array.read_range(start, stop).tolist() == whole[start:stop].tolist()
    part = array.slice(start, stop)
    assert len(part) == stop - start and part.read_range(0, len(part)).tolist() == whole[start:stop].tolist()
    assert np.concatenate([*array.blocks(2), []]).tolist() == whole.tolist()


@pytest.mark.parametrize(("dtype", "bad"), [("<u2", 50_000), ("<u4", 2**32 - 1), ("<i4", -1), ("<i8", -(2**40))])
def test_b32_an_id_outside_the_vocabulary_names_file_and_byte(tmp_path: Path, dtype: str, bad: int) -> None:
    ids = np.arange(20).astype(dtype)
    ids[13] = bad
    ids.tofile(tmp_path / "second.bin")
    mapped = map_file(tmp_path / "second.bin", np.dtype(dtype), 0, 20)
    origins = [Origin(tmp_path / "first.bin", 0), Origin(tmp_path / "second.bin", 0)]
    array = TokenArray([np.zeros(5, "<u2"), mapped], vocab_size=50_000, origins=origins)
    told = f"second.bin: the token at byte {13 * ids.itemsize} has id {bad}"
    for attempt in (
        lambda: array.read(np.array([[3, 4], [17, 18]])),
        lambda: array.read_range(16, 19),
        lambda: array.check(0, 25),
        lambda: array.slice(7, 22).read(np.arange(15)),
    ):
        with pytest.raises(DataError) as caught:
            attempt()
        assert told in str(caught.value)
    assert array.read(np.array([17, 19])).tolist() == [12, 14]


def test_a_map_says_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone.bin"):
        map_file(tmp_path / "gone.bin", np.dtype("<u2"), 0, 1)
    (tmp_path / "short.bin").write_bytes(b"1234")
    with pytest.raises(DataError, match="3 values of 2 bytes from byte 0 on do not fit"):
        map_file(tmp_path / "short.bin", np.dtype("<u2"), 0, 3)
    assert len(map_file(tmp_path / "gone.bin", np.dtype("<u2"), 0, 0)) == 0


def test_more_files_than_a_process_may_open_by_default(tmp_path: Path) -> None:
    """The soft limit is raised long before it is met, so that other files can be opened too; a batch over all is read like any other."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(150):
        np.array([number], "<u2").tofile(tmp_path / f"{number}.bin")
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        few = [map_file(tmp_path / f"{number}.bin", np.dtype("<u2"), 0, 1) for number in range(40)]
        others = [(tmp_path / f"{number}.bin").open("rb") for number in range(100)]
        for other in others:
            other.close()
        few += [map_file(tmp_path / f"{number}.bin", np.dtype("<u2"), 0, 1) for number in range(40, 150)]
        array = TokenArray(few)
        assert array.read(np.arange(149, -1, -1)).tolist() == list(range(149, -1, -1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
