"""Numbers, wrapping and commands."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from llmtrain.metrics import format as fmt


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (fmt.format_count, 950, "950"),
        (fmt.format_count, 36_600, "36.6k"),
        (fmt.format_count, 999_499, "999k"),
        (fmt.format_count, 999_600, "1M"),
        (fmt.format_count, 1_100_000, "1.1M"),
        (fmt.format_count, 31_400_000, "31.4M"),
        (fmt.format_count, 8e9, "8B"),
        (fmt.format_flops, 870e9, "870 GFLOP/s"),
        (fmt.format_flops, 54e9, "54.0 GFLOP/s"),
        (fmt.format_flops, 989.5e12, "990 TFLOP/s"),
        (fmt.format_duration, 34.4, "0:34"),
        (fmt.format_duration, 112, "1:52"),
        (fmt.format_duration, 3723, "1:02:03"),
        (fmt.format_duration, 2 * 86400 + 3 * 3600 + 61, "2d 03:01:01"),
        (fmt.format_lr, 3.1e-4, "3.1e-4"),
        (fmt.format_lr, 1e-3, "1e-3"),
        (fmt.format_lr, 0.0, "0"),
        (fmt.format_lr, 2.5, "2.5e0"),
        (fmt.format_share, 0.31, "31 %"),
        (fmt.format_share, 0.042, "4.2 %"),
    ],
)
def test_numbers(function: object, value: float, expected: str) -> None:
    assert callable(function)
    assert function(value) == expected


SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)
TEXTS = st.text(alphabet=st.sampled_from("ab ·éç漢字 -\n\t\x1b[31m\x07" + "😀"), max_size=200)


@SETTINGS
@given(TEXTS, st.integers(2, 40))
def test_wrapped_text_fits_and_loses_nothing_but_spaces(text: str, width: int) -> None:
    clean = fmt.printable(text).replace("\n", " ")
    lines = fmt.wrap(clean, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == clean.replace(" ", "")


@SETTINGS
@given(TEXTS)
def test_printable_text_has_nothing_a_terminal_obeys(text: str) -> None:
    assert all(character == "\n" or character.isprintable() for character in fmt.printable(text))


def test_indentation_stays() -> None:
    assert fmt.wrap("    return x", 40) == ["    return x"]


@SETTINGS
@given(TEXTS, st.integers(2, 40))
def test_shortened_text_fits(text: str, width: int) -> None:
    clean = fmt.printable(text)
    short = fmt.shorten(clean, width)
    assert cell_len(short) <= width
    assert short == clean or short.endswith("…")


@SETTINGS
@given(st.lists(st.text(alphabet="ab='\" $\\", max_size=12), min_size=1, max_size=10), st.integers(10, 40))
def test_wrapped_command_means_the_same(words: list[str], width: int) -> None:
    command = shlex.join(words)
    lines = fmt.wrap_command(command, width)
    # A shell joins a line that ends in a backslash with the next one.
    pasted = "\n".join(lines).replace("\\\n", "")
    assert shlex.split(pasted) == words
    for line in lines:
        assert cell_len(line) <= width or len(fmt.COMMAND_WORD.findall(line.removesuffix(" \\"))) == 1
