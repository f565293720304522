"""Numbers and lines of text as people read them: three significant digits, units with a space, nothing wider than the screen."""

from __future__ import annotations

import re
import unicodedata

from rich.cells import cell_len

from llmtrain.plan.report import three_digits

UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
COMMAND_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|['"\\])+""")


def format_count(number: float) -> str:
    """`950`, `36.6k`, `1.1M`, `31.4B`: at most three digits."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * factor:
            return f"{number / factor:.3g}{suffix}" if abs(number) < 999.5 * factor else f"{number / factor:.0f}{suffix}"
    return f"{number:.3g}"


def format_flops(flops_per_second: float) -> str:
    """`870 GFLOP/s`, `989 TFLOP/s`."""
    for factor, unit in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s")):
        if flops_per_second >= 0.9995 * factor:
            return f"{three_digits(flops_per_second / factor)} {unit}"
    return f"{three_digits(flops_per_second / 1e9)} GFLOP/s"


def format_share(share: float) -> str:
    """`31 %`, `4.2 %`."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def format_duration(seconds: float) -> str:
    """`0:34`, `1:52`, `1:02:03`, `2d 03:04:05`."""
    total = round(seconds)
    days, hours, minutes, rest = total // 86400, total // 3600 % 24, total // 60 % 60, total % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_lr(lr: float) -> str:
    """`3.1e-4`, `1e-3`, `0`."""
    mantissa, _, exponent = f"{lr:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return "0" if lr == 0 else f"{mantissa}e{int(exponent)}"


def printable(text: str) -> str:
    """Text without anything a terminal would obey; line ends stay, tabs become spaces.

    What a model writes or a file contains may hold escape sequences.
    """
    return "".join(_printable(character) for character in text)


def shorten(text: str, width: int) -> str:
    """Text cut to `width` columns, an ellipsis showing that it was."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[:-1]
    return text.rstrip() + "…" if width > 0 else ""


def wrap(text: str, width: int) -> list[str]:
    """Text as lines of at most `width` columns, broken at spaces, within words only where one is wider than a line."""
    assert width > 0
    lines: list[str] = []
    line: str | None = None
    for word in text.split(" "):
        joined = word if line is None else f"{line} {word}"
        if cell_len(joined) > width:
            if line is not None:
                lines.append(line)
            *full, joined = _pieces(word, width)
            lines += full
        line = joined
    return [*lines, line or ""]


def wrap_command(command: str, width: int) -> list[str]:
    """A shell command as lines that can be pasted: broken between words, all but the last ending in a backslash.

    A single word wider than the line stays whole: cut, it would be another command.
    """
    lines, line = [], ""
    for word in COMMAND_WORD.findall(command):
        joined = f"{line} {word}" if line else word
        if line and cell_len(joined) > width - 2:
            lines.append(line + " \\")
            joined = f"  {word}"
        line = joined
    return [*lines, line]


def _printable(character: str) -> str:
    if character == "\n" or character.isprintable():
        return character
    if character == "\t":
        return "    "
    return " " if unicodedata.category(character) == "Zs" else UNPRINTABLE


def _pieces(word: str, width: int) -> list[str]:
    pieces, piece = [], ""
    for character in word:
        if cell_len(piece + character) > width:
            pieces.append(piece)
            piece = ""
        piece += character
    return [*pieces, piece]
