"""Rows of the three packing rules, against tables worked out by hand and against the rule that nothing is lost or doubled.

Token i of the test stream is 1000 + i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmtrain.config.typed_data import Packing
from llmtrain.data.packing import RowArrays, Rows, TokenStream, pack
from llmtrain.data.token_array import TokenArray
from llmtrain.ops.cross_entropy import IGNORE_INDEX

Maker = Callable[[Sequence[int]], TokenStream]
X = IGNORE_INDEX


def read_all(rows: Rows) -> RowArrays:
    return rows.read(np.arange(rows.num_rows, dtype=np.int64))


def test_concat_rows(make_stream: Maker) -> None:
    rows = read_all(pack(make_stream([5, 9, 2]), Packing.CONCAT, 6))
    assert (rows.tokens - 1000)[:2].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert (rows.targets - 1000)[:2].tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    assert (rows.tokens[2, :3] - 1000).tolist() == [12, 13, 14]
    assert rows.targets[2].tolist() == [1013, 1014, 1015, X, X, X]
    assert rows.positions is None and rows.document_ids is None


def test_b30_document_rows_keep_documents_apart(make_stream: Maker) -> None:
    """Documents of 5, 9 and 2 tokens in rows of 8: the second is cut by a row end, the third starts inside the second row."""
    rows = read_all(pack(make_stream([5, 9, 2]), Packing.DOCUMENT, 8))
    assert (rows.tokens - 1000).tolist()[0] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (rows.tokens - 1000).tolist()[1][:7] == [8, 9, 10, 11, 12, 13, 14]
    # Token 5 opens document 2 and token 14 document 3: nobody predicts them.
    assert rows.targets.tolist()[0] == [1001, 1002, 1003, 1004, X, 1006, 1007, 1008]
    assert rows.targets.tolist()[1] == [1009, 1010, 1011, 1012, 1013, X, 1015, X]
    assert rows.positions is not None and rows.document_ids is not None
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 0]]
    assert rows.document_ids[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    first, third, padding = rows.document_ids[1, [0, 6, 7]].tolist()
    assert rows.document_ids[1].tolist() == [first] * 6 + [third, padding]
    assert len({first, third, padding}) == 3


def test_b30_border_exactly_at_a_row_end(make_stream: Maker) -> None:
    rows = read_all(pack(make_stream([8, 4, 5]), Packing.DOCUMENT, 8))
    assert rows.targets.tolist()[0] == [1001, 1002, 1003, 1004, 1005, 1006, 1007, X]
    assert rows.positions is not None and rows.positions[1].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert rows.targets[1].tolist() == [1009, 1010, 1011, X, 1013, 1014, 1015, 1016]


def test_padded_rows(make_stream: Maker) -> None:
    """Documents of 5, 9, 2, 1 and 0 tokens in rows of 4: ceil((L - 1) / 4) rows each."""
    rows = read_all(pack(make_stream([5, 9, 2, 1, 0]), Packing.PADDED, 4))
    assert (rows.tokens - 1000).tolist()[:3] == [[0, 1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert rows.targets.tolist() == [
        [1001, 1002, 1003, 1004],
        [1006, 1007, 1008, 1009],
        [1010, 1011, 1012, 1013],
        [1015, X, X, X],
    ]
    assert rows.tokens[3, 0] == 1014
    assert rows.positions is not None and rows.positions.tolist() == [[0, 1, 2, 3]] * 3 + [[0, 0, 1, 2]]
    assert rows.document_ids is not None and rows.document_ids.tolist() == [[0] * 4] * 3 + [[0, -1, -1, -1]]


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 1),
    length=st.integers(2, 12),
    packing=st.sampled_from(list(Packing)),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_token_with_a_predecessor_is_a_target_once(
    make_stream: Maker, lengths: list[int], length: int, packing: Packing
) -> None:
    stream = make_stream(lengths)
    rows = pack(stream, packing, length)
    if rows.num_rows == 0:
        assert rows.num_targets == 0
        return
    arrays = read_all(rows)
    scored = arrays.targets != X
    starts = {0} if packing is Packing.CONCAT else set(stream.offsets.tolist())
    expected = [1000 + i for i in range(sum(lengths)) if i not in starts]
    assert sorted(arrays.targets[scored].tolist()) == expected
    assert rows.num_targets == len(expected)
    # The target is the token after the input.
    assert (arrays.targets[scored] == arrays.tokens[scored] + 1).all()
    if arrays.document_ids is not None and arrays.positions is not None:
        check_document_columns(arrays, stream, length)


def check_document_columns(arrays: RowArrays, stream: TokenStream, length: int) -> None:
    """Ids change exactly where the document of the token does; positions count up from 0 in each run of equal ids."""
    assert arrays.document_ids is not None and arrays.positions is not None
    document_of = np.searchsorted(stream.offsets, arrays.tokens - 1000, side="right")
    document_of[arrays.tokens == 0] = -1  # padding
    assert ((np.diff(arrays.document_ids, axis=1) != 0) == (np.diff(document_of, axis=1) != 0)).all()
    for ids, positions in zip(arrays.document_ids, arrays.positions):
        assert len(set(ids.tolist())) == 1 + int((np.diff(ids) != 0).sum())
        for document in set(ids.tolist()):
            assert positions[ids == document].tolist() == list(range(int((ids == document).sum())))
    assert arrays.positions.max() < length


@pytest.mark.parametrize("packing", list(Packing))
def test_b35_targets_are_the_next_token_of_cyclic_text(packing: Packing) -> None:
    """Text 0, 1, …, V - 1, 0, …: the target is x + 1 mod V, not x + 2, not x, and never a token of another row's document."""
    vocab = 11
    lengths = [23, 7, 40]
    tokens = np.concatenate([np.arange(n) % vocab for n in lengths]).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    arrays = read_all(pack(TokenStream(TokenArray([tokens]), offsets), packing, 8))
    scored = arrays.targets != X
    wrong = arrays.targets[scored] != (arrays.tokens[scored] + 1) % vocab
    # Only in concat does a row predict across a border: 22 % 11 = 0 -> 0 and 6 -> 0.
    assert wrong.sum() == (2 if packing is Packing.CONCAT else 0)
    assert arrays.tokens.dtype == arrays.targets.dtype == np.int64


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 1),
    cuts=st.lists(st.integers(0, 240), max_size=5),
    length=st.integers(2, 12),
    packing=st.sampled_from(list(Packing)),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_do_not_depend_on_how_tokens_lie_in_files(
    make_stream: Maker, lengths: list[int], cuts: list[int], length: int, packing: Packing
) -> None:
    """Parts cut anywhere, also inside documents and rows; borders that are found only when they are asked for."""
    whole = make_stream(lengths)
    ids = whole.tokens.read_range(0, len(whole.tokens))
    borders = sorted({0, len(ids), *(cut % len(ids) for cut in cuts)})
    parts = [ids[start:stop].astype([np.uint16, np.uint32][start % 2]) for start, stop in zip(borders, borders[1:])]
    rows, expected = pack(TokenStream(TokenArray(parts), lambda: whole.offsets), packing, length), pack(whole, packing, length)
    assert (rows.num_rows, rows.num_targets) == (expected.num_rows, expected.num_targets)
    numbers = np.arange(rows.num_rows, dtype=np.int64)[::-1]
    for found, column in zip(vars(rows.read(numbers)).values(), vars(expected.read(numbers)).values()):
        assert (found is None) == (column is None) and (found is None or (found == column).all())


@pytest.mark.parametrize("packing", [Packing.DOCUMENT, Packing.PADDED])
def test_b30_what_a_document_holds_changes_no_other(make_stream: Maker, packing: Packing) -> None:
    """Document 1 is swapped for other ids: everything else of every row is the same."""
    stream = make_stream([5, 9, 2, 11])
    before, after = stream.tokens.read_range(0, 27), stream.tokens.read_range(0, 27)
    after[:5] = [7, 7, 8, 9, 9]
    rows = [read_all(pack(TokenStream(TokenArray([ids]), stream.offsets), packing, 8)) for ids in (before, after)]
    assert rows[0].document_ids is not None and rows[1].document_ids is not None
    assert (rows[0].document_ids == rows[1].document_ids).all()
    changed = (rows[0].tokens != rows[1].tokens) | (rows[0].targets != rows[1].targets)
    assert changed.any() and set(rows[0].tokens[changed].tolist()) <= set(range(1000, 1005))
    assert set(rows[0].targets[changed].tolist()) <= {*range(1000, 1005), X}


def test_concat_asks_for_no_borders() -> None:
    """Finding them may mean reading every token, and `concat` does not need them."""

    def find() -> NDArray[np.int64]:
        raise AssertionError

    assert pack(TokenStream(TokenArray([np.arange(9, dtype=np.uint16)]), find), Packing.CONCAT, 4).num_rows == 2
