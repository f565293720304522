"""Help pages: complete, true to the schema, and never wider than asked."""

from __future__ import annotations

import pytest

from llmtrain.cli.dispatch import dispatch
from llmtrain.cli.help import COMMON_KEYS, overview, topic_page
from llmtrain.cli.verbs import VERBS
from llmtrain.config.compose import group_options
from llmtrain.config.errors import ConfigError
from llmtrain.config.keys import leaves, sections
from llmtrain.config.schema import GROUPS


def test_overview_lists_every_verb_group_option_and_its_summary() -> None:
    lines = overview([], 128)
    text = " ".join(" ".join(lines).split())
    for verb in VERBS:
        assert f" {verb}" in text
    for group in GROUPS:
        assert any(line.startswith(f"  {group} ") for line in lines), group
    for group, options in group_options().items():
        for option, summary in options.items():
            assert f"{option} {summary}" in text, f"{group}={option}"
    for name in COMMON_KEYS:
        assert name in text and leaves()[name].doc in text


@pytest.mark.parametrize("width", [60, 80, 128])
def test_pages_fit(width: int) -> None:
    lines = [*overview([], width), *(line for topic in sections() for line in topic_page(topic, [], width))]
    assert max(map(len, lines)) <= max(width, 80)


@pytest.mark.parametrize("section", sorted(sections()))
def test_a_section_shows_each_of_its_keys(section: str) -> None:
    text = " ".join(" ".join(topic_page(section, [], 100)).split())
    for name, info in leaves().items():
        if name.startswith(f"{section}."):
            assert name in text and " ".join(info.doc.split()) in text and info.describe() in text


def test_a_key_shows_default_unit_range_and_words() -> None:
    assert topic_page("optimizer.lr", [], 100)[1:] == ["    peak learning rate; a number > 0; default 0.001"]
    text = " ".join(topic_page("optimizer.kind", [], 120))
    assert "one of adamw" in text and "not available in this version: adamw_8bit" in text
    assert "only with loss=chunked" in " ".join(" ".join(topic_page("loss.chunk_size", [], 128)).split())
    assert "(updates)" in " ".join(topic_page("train.steps", [], 120))


def test_verbs_have_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["evaluate", "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("llmtrain evaluate RUN_FOLDER [overrides]") and "evaluate.batch_size" in page
    assert dispatch(["--help", "evaluate"]) == 0
    assert capsys.readouterr().out == page
    assert "not available in this version" in topic_page("bench", [], 100)[1]


def test_an_unknown_topic_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="llmtrain --help optimizer"):
        topic_page("optimiser", [], 100)
