"""The special tokens around a document: [BOS?] text [EOS?], each exactly once, added here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.typed_data import DataConfig
from llmtrain.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Framing:
    """Ids to put before and after a document; None = nothing."""

    bos_id: int | None
    eos_id: int | None

    def add(self, ids: NDArray[np.int64], *, begins: bool, ends: bool) -> NDArray[np.int64]:
        """The ids of a stretch of a document with the tokens that belong to its ends."""
        before = [self.bos_id] if begins and self.bos_id is not None else []
        after = [self.eos_id] if ends and self.eos_id is not None else []
        return np.concatenate([np.array(before, dtype=np.int64), ids, np.array(after, dtype=np.int64)])


def settle_framing(data: DataConfig, tokenizer: Tokenizer) -> Framing:
    """What `data.bos` and `data.eos` mean with this tokenizer.

    Raises:
        DataError: a token is asked for that the tokenizer does not have.
    """
    bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
    if data.bos and bos_id is None:
        raise DataError(Problem("data.bos=true", "the tokenizer has no begin-of-text token", "data.bos=false or auto"))
    if data.eos and eos_id is None:
        cure = "data.eos=false, or a tokenizer with one (tokenizer.eos_token=TOKEN for tokenizer=file)"
        raise DataError(Problem("data.eos=true", "the tokenizer has no end-of-text token", cure))
    wants_bos = bos_id != eos_id if data.bos is None else data.bos
    return Framing(bos_id if wants_bos else None, eos_id if data.eos else None)
