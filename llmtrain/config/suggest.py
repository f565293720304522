"""Nearest names and nearest numbers: what an error message offers instead of what was typed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from llmtrain.config import schema
from llmtrain.config.keys import leaves, sections

CLOSE = 0.55
"""Similarity (0 to 1) from which a name is worth offering."""

DOCUMENTED = 0.7
"""Score of a key whose documentation holds every word of the name."""

LAST_PART = 0.9
"""Weight of a likeness of last parts against one of whole names."""

SPREAD = 0.25
"""How much less alike than the best an offered name may be."""


def nearest_words(word: str, words: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of `words` that look like `word`, best first."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    return [by_lower[match] for match in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=CLOSE)]


def nearest_keys(name: str, count: int = 3) -> list[str]:
    """Up to `count` groups, sections or keys that `name` may have meant, best first.

    Compares the whole dotted name, and the last part with that of any key (`steps` finds `train.steps`); a key whose documentation
    holds every word of the last part comes after those (`learning_rate` finds `optimizer.lr`).
    """
    last = name.rpartition(".")[2].lower()
    tokens = set(re.findall(r"[a-z]+", last))
    scores = {}
    for key in dict.fromkeys([*leaves(), *sorted(sections()), *schema.GROUPS]):
        scores[key] = max(_similarity(name.lower(), key), LAST_PART * _similarity(last, key.rpartition(".")[2]))
        if key in leaves() and tokens and tokens <= set(re.findall(r"[a-z]+", leaves()[key].doc.lower())):
            scores[key] = max(scores[key], DOCUMENTED)
    best = max(scores.values())
    return [key for key in sorted(scores, key=lambda key: -scores[key]) if scores[key] >= max(CLOSE, best - SPREAD)][:count]


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def either(options: Iterable[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    texts = [str(option) for option in options]
    return " or ".join(part for part in (", ".join(texts[:-1]), "".join(texts[-1:])) if part)


def multiples_near(value: int, step: int) -> list[int]:
    """The positive multiples of `step` on either side of `value`."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, smallest first; the work is that of the square root of its largest factor."""
    found, factor, rest = [1], 2, number
    while rest > 1:
        if factor * factor > rest:
            factor = rest
        powers = [1]
        while rest % factor == 0:
            rest //= factor
            powers.append(powers[-1] * factor)
        found = [divisor * power for divisor in found for power in powers]
        factor += 1
    return sorted(found)


def divisors_near(number: int, value: int) -> list[int]:
    """The divisors of `number` on either side of `value`."""
    every = divisors(number)
    below = [divisor for divisor in every if divisor <= value]
    above = [divisor for divisor in every if divisor > value]
    return below[-1:] + above[:1]
