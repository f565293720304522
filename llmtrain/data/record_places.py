"""Where a record lies, as `file:line` or `file:row`.

A process that starts reading lines in the middle of a file does not know how many come before: it tells the line from there on, and
the few places that somebody gets to see are counted at the end, each file once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain.data.paths import unreadable

_COUNT_BYTES = 1 << 22
_FROM_BYTE = re.compile(r"(.*):line (\d+) from byte (\d+) on", re.DOTALL)


def place_from(path: Path, byte: int, record: int) -> str:
    """The place of a line, counted from 0 from where a line begins at `byte`; `PlaceTeller` knows what it means."""
    return f"{path}:line {record + 1} from byte {byte} on" if byte else f"{path}:{record + 1}"


class PlaceTeller:
    """Turns what `place_from` gave into `file:line`; other places are left as they are.

    A file is read once, up to the last place, if its places come in order.
    """

    def __init__(self) -> None:
        self._counted: dict[str, tuple[int, int]] = {}
        """File -> (byte, lines before it)."""

    def tell(self, place: str) -> str:
        """Raises DataError if the file cannot be read."""
        found = _FROM_BYTE.fullmatch(place)
        if found is None:
            return place
        path, line, byte = found[1], int(found[2]), int(found[3])
        return f"{path}:{self._lines_before(path, byte) + line}"

    def tell_copies(self, copies: bytes) -> bytes:
        """The same for JSON lines whose `place` is one."""
        if b" from byte " not in copies:
            return copies
        lines = [json.loads(line) for line in copies.splitlines()]
        return b"".join(json.dumps({**line, "place": self.tell(line["place"])}).encode() + b"\n" for line in lines)

    def _lines_before(self, path: str, byte: int) -> int:
        start, lines = self._counted.get(path, (0, 0))
        if start > byte:
            start, lines = 0, 0
        try:
            with open(path, "rb") as stream:
                stream.seek(start)
                while start < byte and (block := stream.read(min(_COUNT_BYTES, byte - start))):
                    start += len(block)
                    lines += block.count(b"\n")
        except OSError as error:
            raise unreadable(Path(path), error) from error
        self._counted[path] = (start, lines)
        return lines


def told_places(places: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Places by reason, each told; files are read once, whatever the order.

    Raises:
        DataError: a file cannot be read.
    """
    teller = PlaceTeller()
    told = {place: teller.tell(place) for place in sorted({place for kept in places.values() for place in kept}, key=_order)}
    return {reason: [told[place] for place in kept] for reason, kept in places.items()}


def _order(place: str) -> tuple[str, int]:
    found = _FROM_BYTE.fullmatch(place)
    return (place, 0) if found is None else (found[1], int(found[3]))
