"""The run that nobody disturbs, which the disturbed ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from helpers.ranks import RankPool
from helpers.runs import run_words

from llmtrain.config.errors import ExitCode


def calm_run(ranks: RankPool, text: Path, runs: Path, words: Sequence[str]) -> tuple[Path, float]:
    """The folder of a finished run of two ranks, `calm`, and the seconds it took with its data prepared."""
    ranks.launch(run_words(text, runs, "prepared", *words), 2)
    told = ranks.launch(run_words(text, runs, "calm", *words), 2)
    assert told.code == ExitCode.DONE, told.printed
    return runs / "calm", told.seconds
