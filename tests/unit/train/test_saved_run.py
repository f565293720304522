"""A run folder looked at again, from other folders, with other checkpoints, with text that has changed."""

import json
import os
import signal

import pytest
import torch
from helpers.material import write_tokenizer
from helpers.runs import records, run, run_words, saved, write_text

from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError, DataError, ExitCode, StoppedError, StorageError
from llmtrain.config.typed import LaunchConfig
from llmtrain.train import saved_run
from llmtrain.train.saved_run import evaluate_run, generate_text, load_run

WORDS = (
    "train.steps=6",
    "accumulation.global_batch_size=4",
    "checkpoint.every=3",
    "train.eval_every=6",
    "train.eval_tokens=null",
)
CPU = LaunchConfig(nproc=None, device="cpu", threads=1)


def evaluate(folder, *words):
    return evaluate_run(folder, compose_config(("launch.threads=1", *words)), lambda text: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run made with relative paths."""
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    words = [word for word in run_words("text", tmp_path / "runs", "a", *WORDS) if "cache_dir" not in word]
    run(*words, f"data.cache_dir={tmp_path / 'cache'}")
    return tmp_path / "runs" / "a"


def test_evaluate_gives_the_loss_of_the_last_record_from_any_folder(folder, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = evaluate(folder)
    assert result["loss"] == pytest.approx(records(folder)[-1]["val_loss"], rel=1e-6)
    assert result["step"] == 6 and result["bits_per_byte"] > 0
    assert evaluate(folder, "evaluate.batch_size=1")["loss"] == pytest.approx(result["loss"], rel=1e-6)


def test_an_older_checkpoint_and_one_that_is_not_there(folder):
    assert evaluate(folder, "evaluate.step=3")["step"] == 3
    with pytest.raises(ConfigError, match="step 4") as caught:
        evaluate(folder, "evaluate.step=4")
    assert "3, 6" in str(caught.value)


def test_changed_text_is_refused_by_evaluate_and_does_not_matter_to_generate(folder, tmp_path):
    (tmp_path / "text" / "00.txt").write_text("something else altogether")
    with pytest.raises(DataError, match="has changed"):
        evaluate(folder)
    assert isinstance("".join(generate_text(folder, compose_config(("generate.max_tokens=5",)).config)), str)


def test_a_run_keeps_the_precision_it_was_planned_with(folder):
    plan = json.loads((folder / "plan.json").read_text())
    plan["precision_name"] = "bf16"
    (folder / "plan.json").write_text(json.dumps(plan))
    assert load_run(folder, CPU).plan.precision_name == "bf16"


def test_no_run_folder(tmp_path):
    with pytest.raises(StorageError, match="no run folder"):
        load_run(tmp_path, CPU)


def test_b14_a_tied_head_is_the_embedding_again_after_loading(tmp_path):
    """Also B43: nothing is left unset and nothing is loaded loosely."""
    words = run_words(write_text(tmp_path / "text"), tmp_path / "runs", "tied", *WORDS)
    run(*words, "model.tie_embeddings=true", "model.position=learned")
    folder = tmp_path / "runs" / "tied"
    model = load_run(folder, CPU).model
    assert model.head_weight is model.embed.weight
    for name, tensor in saved(folder).tensors.items():
        if name.startswith("model/"):
            assert torch.equal(model.get_parameter(name.removeprefix("model/")), tensor), name
    assert evaluate(folder)["loss"] == pytest.approx(records(folder)[-1]["val_loss"], rel=1e-6)


def test_other_text_is_scored_whole_with_the_tokenizer_of_the_run(folder, tmp_path):
    other = write_text(tmp_path / "other", 5, seed=9)
    result = evaluate(folder, "data=text", f"data.path={other}", f"data.cache_dir={tmp_path / 'cache'}")
    num_bytes = sum(file.stat().st_size for file in other.iterdir())
    assert result["targets"] == num_bytes + 2 * 5 - 1  # a begin and an end token for each document
    assert result["data"] == f"all of {other}" and result["loss"] > 0
    held_out = evaluate(
        folder, "data=text", f"data.path={other}", f"data.cache_dir={tmp_path / 'cache'}", "data.validation_fraction=0.5"
    )
    assert held_out["targets"] < result["targets"]


def test_longer_rows_of_the_own_text(folder):
    longer = evaluate(folder, "data.sequence_length=64")
    assert longer["targets"] == evaluate(folder)["targets"] and longer["loss"] != evaluate(folder)["loss"]


def test_the_tokenizer_file_is_not_needed_any_more(tmp_path):
    """The checkpoint has the tokenizer."""
    write_tokenizer(tmp_path / "tokenizer.json", [("a", "b")])
    words = ("tokenizer=file", f"tokenizer.path={tmp_path / 'tokenizer.json'}", "tokenizer.eos_token=<end>")
    run(*run_words(write_text(tmp_path / "text"), tmp_path, "a", *WORDS, *words))
    before = evaluate(tmp_path / "a")["loss"]
    (tmp_path / "tokenizer.json").unlink()
    assert evaluate(tmp_path / "a")["loss"] == before
    assert isinstance("".join(generate_text(tmp_path / "a", compose_config(("generate.max_tokens=5",)).config)), str)


def test_b55_a_scheduler_may_stop_the_preparation_of_other_text(folder, tmp_path, monkeypatch):
    def stopped(*arguments, **keys):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not seen")

    monkeypatch.setattr(saved_run, "build_corpus", stopped)
    with pytest.raises(StoppedError) as caught:
        evaluate(folder, "data=text", f"data.path={write_text(tmp_path / 'other')}")
    assert caught.value.exit_code is ExitCode.REQUEUE
