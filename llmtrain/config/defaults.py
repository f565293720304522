"""Values that a key has when nobody gives it one, where more than the schema has to know them."""

from __future__ import annotations

DEFAULT_STEPS = 1000
DEFAULT_GLOBAL_BATCH_SIZE = 16
DEFAULT_VALIDATION_FRACTION = 0.05
DEFAULT_BPE_VOCAB_SIZE = 4096
DEFAULT_MAX_DOCUMENT_BYTES = 2**28
DEFAULT_BUCKET_MIB = 25.0
DEFAULT_FIRST_BUCKET_MIB = 1.0

BYTE_VOCAB_SIZE = 258
"""256 byte values, begin of text, end of text."""

LONGEST_AUTO_WARMUP = 100


def auto_warmup_steps(steps: int) -> int:
    """Updates of warm-up in a run of `steps`: a tenth, at most `LONGEST_AUTO_WARMUP`."""
    return min(LONGEST_AUTO_WARMUP, steps // 10)


def auto_decay_steps(steps: int) -> int:
    """Updates of the decay of wsd in a run of `steps`: a fifth."""
    return steps // 5
