"""From what was written to what a key holds.

A value reaches us as text of a command line or a YAML file and keeps its spelling until the key it belongs to is known: `1e5` is
a name for `run.name`, a number for `optimizer.lr` and 100000 for `train.steps`. Generic parsers decide before they know the key, and
then a name becomes 100000.0 and a step count a float.
"""

from __future__ import annotations

import decimal
import math
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from llmtrain.config.declare import AUTO
from llmtrain.config.keys import KeyInfo, ValueKind
from llmtrain.config.suggest import either, nearest_words

_WHOLE = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
_EXPONENT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]{1,3}")
_NUMBER = re.compile(r"[+-]?([0-9](_?[0-9])*(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LARGEST = 2**63 - 1
_SWITCHES = {"true": True, "false": False}
_LIKELY_SWITCHES = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}


_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Raw:
    """A scalar as it was spelled, without quotes; quoted text is a plain `str`."""

    text: str


class Refused(Exception):
    """A value its key cannot hold; `rule` and `cure` as in `errors.Problem`."""

    def __init__(self, rule: str, cure: str = "") -> None:
        super().__init__(rule)
        self.rule, self.cure = rule, cure


def show(value: Any) -> str:
    """A value as one would type it; bytes that are not UTF-8 are escaped so that it can be printed."""
    if isinstance(value, Raw):
        return value.text.encode(errors="backslashreplace").decode()
    if isinstance(value, list):
        return f"[{','.join(show(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{show(item)}' for name, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and (value == "" or _NUMBER.fullmatch(value)):
        return f"'{value}'"
    return str(value).encode(errors="backslashreplace").decode()


def convert(info: KeyInfo, value: Any) -> Any:
    """The value a key holds.

    Args:
        info: the key.
        value: `Raw`, quoted `str`, `None`, a list or dict of these, or the Python value of an already resolved config.

    Raises:
        Refused: wrong type, outside the range, not one of the legal words, or not built in this version.
    """
    if value is None:
        if not info.optional:
            cure = f"leave out {info.name}"
            cure += f", or {info.name}=\"'null'\" for the word" if info.kind is ValueKind.TEXT and not info.choices else ""
            raise Refused(f"{info.describe()}; null means not given, which this key cannot be", cure)
        return None
    if info.auto and (value.text.strip() if isinstance(value, Raw) else value) == AUTO:
        return AUTO
    result = _CONVERTERS[info.kind](info, value)
    if not info.built and result != info.default:
        raise Refused("not available in this version", f"leave out {info.name}")
    return result


def _whole(info: KeyInfo, value: Any) -> int:
    text = _scalar_text(info, value, int)
    if _WHOLE.fullmatch(text):
        number = int(text) if len(text) < 40 else _LARGEST + 1
    elif _EXPONENT.fullmatch(text) and decimal.Decimal(text) == decimal.Decimal(text).to_integral_value():
        number = int(decimal.Decimal(text))
    else:
        raise Refused(info.describe(), _whole_cure(info, text))
    if abs(number) > _LARGEST:
        raise Refused(f"a whole number that fits in 64 bits, at most {_LARGEST}")
    return _bounded(info, number)


def _whole_cure(info: KeyInfo, text: str) -> str:
    """The whole numbers on either side of what was typed, if that was a number."""
    if not _NUMBER.fullmatch(text) or not abs(float(text)) < _LARGEST:
        return ""
    number = float(text)
    return either(f"{info.name}={near}" for near in sorted({math.floor(number), math.ceil(number)}) if _within(info, near))


def _number(info: KeyInfo, value: Any) -> float:
    text = _scalar_text(info, value, int, float)
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        raise Refused(f"{info.describe()}; finite, and written as in 0.1 or 1e-3")
    return _bounded(info, number)


def _switch(info: KeyInfo, value: Any) -> bool:
    text = _scalar_text(info, value, bool).lower()
    if text in _SWITCHES:
        return _SWITCHES[text]
    cure = f"{info.name}={show(_LIKELY_SWITCHES[text])}" if text in _LIKELY_SWITCHES else ""
    raise Refused(info.describe(), cure)


def _text(info: KeyInfo, value: Any) -> str:
    if isinstance(value, Raw):
        value = value.text
    if not isinstance(value, str):
        raise Refused("text", f"{info.name}='{show(value)}'")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused("text in UTF-8") from None
    return _word(info, value.strip()) if info.choices or info.later else value


def _word(info: KeyInfo, word: str) -> str:
    if word in info.choices:
        return word
    options = f"{info.name}={either(info.choices)}" if info.choices else f"leave out {info.name}"
    if word in info.later:
        raise Refused("not available in this version", options)
    near = nearest_words(word, info.choices, 1)
    cure = f"{info.name}={near[0]}" if near else options
    raise Refused(info.describe(), cure)


def _list(info: KeyInfo, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise Refused(info.describe(), f"{info.name}=[{show(value)}]")
    words = []
    for item in value:
        try:
            words.append(_text(info, item))
        except Refused as refused:
            near = [near for other in value for near in nearest_words(show(other), info.choices, 1)] or list(info.choices)
            raise Refused(refused.rule, f"{info.name}={show(near)}" if near else refused.cure) from None
    if len(set(words)) < len(words):
        raise Refused("each word once", f"{info.name}={show(list(dict.fromkeys(words)))}")
    return words


def _map(info: KeyInfo, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refused(info.describe(), f"{info.name}.NAME=VALUE")
    return {name: _text(info, item) for name, item in value.items()}


_CONVERTERS = {
    ValueKind.WHOLE: _whole,
    ValueKind.NUMBER: _number,
    ValueKind.SWITCH: _switch,
    ValueKind.TEXT: _text,
    ValueKind.LIST: _list,
    ValueKind.MAP: _map,
}


def _scalar_text(info: KeyInfo, value: Any, *python_types: type) -> str:
    """The spelling of a scalar that is no text: raw text, or a Python value of one of these types."""
    if isinstance(value, Raw):
        return value.text.strip()
    if type(value) in python_types:
        return str(value)
    raise Refused(info.describe())


def _bounded(info: KeyInfo, number: _Number) -> _Number:
    if _within(info, number):
        return number
    edges = [info.ge, info.le]
    if info.kind is ValueKind.WHOLE:
        edges += [None if info.gt is None else info.gt + 1, None if info.lt is None else info.lt - 1]
    # Below an open bound there is no nearest number, and the one at the other end is far from what was meant.
    is_open = info.kind is not ValueKind.WHOLE and any(
        (info.gt is not None and number <= info.gt, info.lt is not None and number >= info.lt)
    )
    nearest = min(
        (edge for edge in edges if edge is not None and not is_open), key=lambda edge: abs(edge - number), default=None
    )
    raise Refused(info.describe(), "" if nearest is None else f"{info.name}={nearest:.15g}")


def _within(info: KeyInfo, number: float) -> bool:
    return (
        (info.ge is None or number >= info.ge)
        and (info.gt is None or number > info.gt)
        and (info.le is None or number <= info.le)
        and (info.lt is None or number < info.lt)
    )
