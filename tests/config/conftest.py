"""Shared by the tests of the config: composing without asking Hydra for the same list of files twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from llmtrain.config import compose
from llmtrain.config.errors import ConfigError


@pytest.fixture(scope="module")
def remembered_files() -> Iterator[None]:
    """Remember which files a choice of groups leads to; the files do not change while the tests of a module run."""
    answers = {}

    def remember(primary, overrides, folders):
        question = (primary, tuple(overrides), folders)
        if question not in answers:
            answers[question] = original(primary, overrides, folders)
        return answers[question]

    original = compose._defaults_list
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_defaults_list", remember)
        yield


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Compose words that must be refused and return the report."""

    def refuse(*words: str, **options) -> str:
        with pytest.raises(ConfigError) as caught:
            compose.compose_config(words, **options)
        return str(caught.value)

    return refuse
