"""What the composition root does before a training: in which order things are found out."""

from __future__ import annotations

import pytest
from helpers.material import write_material
from helpers.runs import run, run_words, write_text

from llmtrain.config.errors import DataError, PlanError
from llmtrain.data import corpus
from llmtrain.train import build


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("attention=flash_attn",), "attention.backend=flash_attn"),
        (("model.dim=65536", "model.num_layers=64", "accumulation.micro_batch_size=16"), "micro_batch_size=16"),
    ],
)
def test_what_cannot_run_is_refused_before_the_text_is_prepared(tmp_path, monkeypatch, words, told):
    def prepared(*arguments, **keys):
        raise AssertionError("hours of preparation")

    monkeypatch.setattr(build, "build_corpus", prepared)
    text = write_text(tmp_path / "text", 3)
    with pytest.raises(AssertionError, match="hours of preparation"):
        run(*run_words(text, tmp_path, "fine"))
    with pytest.raises(PlanError, match=told):
        run(*run_words(text, tmp_path, "a", *words))


def test_a_vocabulary_that_is_known_is_checked_before_the_text_is_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "prepare_tokens", lambda *arguments: pytest.fail("hours of preparation"))
    write_material(tmp_path)
    words = ("tokenizer=file", f"tokenizer.path={tmp_path / 'tokenizer.json'}", "tokenizer.eos_token=<end>")
    with pytest.raises(DataError, match="the tokenizer has 260 ids"):
        run(*run_words(write_text(tmp_path / "text"), tmp_path, "a", *words, "model.vocab_size=200"))


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_bad_records_are_a_warning_with_places(tmp_path, policy):
    write_material(tmp_path)
    words = ("data.kind=jsonl", f"data.path={tmp_path / 'bad.jsonl'}", f"data.on_bad={policy}", "data.validation_fraction=0.3")
    _, printed = run(*run_words(tmp_path, tmp_path, "a", "train.steps=1", *words))
    told = " ".join(printed.split())
    assert "1 bad record (1 null instead of a text) left out, for example" in told and "bad.jsonl:31" in told
    assert ("copies in" in told and "quarantine.jsonl" in told) == (policy == "quarantine")


def test_a_field_that_no_record_has_is_what_the_message_is_about(tmp_path):
    write_material(tmp_path)
    words = ("data.kind=jsonl", f"data.path={tmp_path / 'good.jsonl'}", "data.on_bad=skip", "data.text_field=txt")
    with pytest.raises(DataError) as caught:
        run(*run_words(tmp_path, tmp_path, "a", *words))
    assert "60 bad records" in str(caught.value) and "try   data.text_field=NAME" in str(caught.value)
