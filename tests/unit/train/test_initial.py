"""A run that begins with the weights of another: the same weights, the same tokenizer, the same shape without saying it again."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers.runs import run, run_words, saved, write_text

from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError, StorageError
from llmtrain.train.initial import initial_weights
from llmtrain.train.saved_run import generate_text

SHAPE = ("model.dim=32", "model.num_layers=2", "model.attention.num_heads=4")
WORDS = ("train.steps=3", "accumulation.global_batch_size=4")
STILL = ("train.steps=1", "accumulation.global_batch_size=4", "optimizer.lr=1e-30", "optimizer.weight_decay=0")
"""An update that changes nothing an fp32 number can hold."""


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text")


@pytest.fixture
def first(tmp_path, text):
    """A finished run with tied weights and a vocabulary learnt from its text."""
    run(*run_words(text, tmp_path, "first", *WORDS, "model.tie_embeddings=true", "tokenizer=bpe", "tokenizer.vocab_size=280"))
    return tmp_path / "first"


def begin(tmp_path, first, name, *words):
    """Train on other text from the weights of `first`; no word says what the model looks like."""
    other = write_text(tmp_path / "other", seed=5)
    plain = [word for word in run_words(other, tmp_path, name) if word not in SHAPE]
    return run(*plain, f"model.init_from={first}", *words)


def test_the_weights_and_the_tokenizer_are_those_of_the_other_run(tmp_path, first):
    _, printed = begin(tmp_path, first, "second", *STILL)
    ours, theirs = saved(tmp_path / "second"), saved(first)
    weights = [name for name in theirs.tensors if name.startswith("model/")]
    assert weights and all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in weights)
    assert ours.state["tokenizer"] == theirs.state["tokenizer"]
    assert f"begins with the weights of {first} at step 3" in printed


def test_it_trains_resumes_and_is_looked_at_when_the_other_run_is_gone(tmp_path, first):
    begin(tmp_path, first, "second", *WORDS, "train.stop_after=2")
    _, printed = begin(tmp_path, first, "second", *WORDS)
    assert "going on from step 2" in printed and "begins with" not in printed
    shutil.rmtree(first)
    assert isinstance("".join(generate_text(tmp_path / "second", compose_config(("generate.max_tokens=5",)).config)), str)


def test_what_is_set_beside_it_wins_and_has_to_fit(tmp_path, first):
    composed = compose_config([f"model.init_from={first}", "model.dropout.residual=0.1"])
    assert composed.config.model.dim == 32 and composed.config.model.tie_embeddings
    assert composed.config.model.dropout.residual == 0.1 and composed.config.model.max_positions == 256
    assert composed.origins["model.dim"].startswith(f"{first}/config.yaml:")
    with pytest.raises(StorageError, match="blocks.0.attention.q.weight") as caught:
        begin(tmp_path, first, "third", *STILL, "model.dim=64")
    assert "model.init_from" in str(caught.value)


def test_the_marks_around_texts_come_with_the_tokenizer(tmp_path, text):
    run(*run_words(text, tmp_path, "bare", *WORDS, "data.bos=false", "data.eos=false"))
    named = f"model.init_from={tmp_path / 'bare'}"
    composed = compose_config([named])
    assert composed.config.data.bos is False and composed.config.data.eos is False
    assert composed.origins["data.bos"].startswith(f"{tmp_path / 'bare'}/config.yaml:")
    assert compose_config([named, "data.bos=true"]).config.data.bos is True
    assert compose_config([named, "tokenizer=byte"]).config.data.eos is True
    assert compose_config([named, "data=synthetic"]).config.data.eos is True
    assert compose_config([named, "data=tokens", "data.path=x"]).config.data.eos is True


def test_another_tokenizer_than_that_of_the_weights_is_refused(tmp_path, first):
    other = ("tokenizer=bpe", "tokenizer.vocab_size=280")  # as many tokens, learnt from the other text
    with pytest.raises(ConfigError, match="other tokens in its rows") as caught:
        begin(tmp_path, first, "second", *STILL, *other)
    assert "leave the tokenizer section out, or run.on_change=continue" in str(caught.value)
    code, printed = begin(tmp_path, first, "second", *STILL, *other, "run.on_change=continue")
    assert code == 0 and "warning 1  another tokenizer" in printed
    code, printed = begin(tmp_path, first, "third", *STILL)
    assert code == 0 and "another tokenizer" not in printed


def test_a_changed_function_is_told(tmp_path, first):
    harmless = ("model.dropout.residual=0.1", "model.init_std=0.5", "model.depth_scaled_init=false")
    _, printed = begin(tmp_path, first, "second", *STILL, "model.rope.theta=500", "model.norm_eps=1e-3", *harmless)
    changed = [line.split("changed ")[1].strip() for line in printed.splitlines() if "changed " in line]
    assert changed == ["model.norm_eps: 1e-05 -> 0.001", "model.rope.theta: 10000.0 -> 500.0"]
    _, printed = begin(tmp_path, first, "third", *STILL, *harmless)
    assert "  changed  " not in printed


def test_a_position_table_keeps_its_rows(tmp_path, text):
    run(*run_words(text, tmp_path, "table", *WORDS, "model.position=learned"))
    model = compose_config([f"model.init_from={tmp_path / 'table'}", "data.sequence_length=16"]).config.model
    assert model.max_positions == 24
    assert initial_weights(tmp_path / "table").tensors["position_embed.weight"].shape == (24, 32)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path, text, first):
    shutil.rmtree(first / "checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        begin(tmp_path, first, "second", *STILL)
    with pytest.raises(ConfigError, match="not a run folder"):
        compose_config([f"model.init_from={tmp_path}"])
