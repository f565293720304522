"""Plain text in columns, for pages that are read on a terminal or piped into a file."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

NARROWEST, WIDEST = 60, 128
"""Columns a page is laid out for, whatever the terminal has."""
GROUP_COLUMN, NAME_COLUMN, KEY_COLUMN = 13, 13, 32


def page_width() -> int:
    """Columns of the terminal within limits; 100 where there is none."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, NARROWEST), WIDEST)


def name_rows(pairs: Sequence[tuple[str, str]], width: int, group: str = "") -> Iterator[str]:
    """Two columns, the second one wrapped; `group` stands left of the first row and blanks left of the others."""
    for number, (name, text) in enumerate(pairs):
        left = f"{group if number == 0 else '':{GROUP_COLUMN}}{name:{NAME_COLUMN}}" if group else f"{name:{KEY_COLUMN}}"
        head = f"  {left} "
        first, *others = textwrap.wrap(text, max(width - len(head), NARROWEST // 2)) or [""]
        yield (head + first).rstrip()
        yield from (" " * len(head) + line for line in others)


def align(rows: Sequence[Sequence[str]], left: set[int]) -> list[str]:
    """Pad cells to columns; those numbered in `left` start together, the others end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        (
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return [("  " + "  ".join(cells)).rstrip() for cells in padded]
