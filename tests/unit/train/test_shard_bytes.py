"""How text was cut into shards is no part of what a run was trained on."""

import pytest
from helpers.runs import records, run, run_words, write_text

from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ExitCode
from llmtrain.train.saved_run import evaluate_run

WORDS = ("accumulation.global_batch_size=4", "train.eval_every=3", "train.eval_tokens=null", "checkpoint.every=3")


def test_a_run_goes_on_and_is_evaluated_with_another_shard_bytes(tmp_path):
    """As an undisturbed one: the same text in one shard and in dozens, each prepared into a cache of its own."""
    text = write_text(tmp_path / "text")
    losses = {}
    for name, first, second in (("same", 1 << 20, 1 << 20), ("other", 64, 1 << 20)):
        for steps, shard_bytes in ((3, first), (6, second)):
            cache = tmp_path / f"cache {shard_bytes}"
            words = (*WORDS, f"data.cache_dir={cache}", f"prepare.shard_bytes={shard_bytes}", f"train.steps={steps}")
            code, _ = run(*run_words(text, tmp_path / "runs", name, *words, "schedule.kind=constant"))
            assert code is ExitCode.DONE
        found = records(tmp_path / "runs" / name)
        assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
        losses[name] = [record["loss"] for record in found]
        result = evaluate_run(tmp_path / "runs" / name, compose_config(("launch.threads=1",)), lambda line: None)
        assert result["loss"] == pytest.approx(found[-1]["val_loss"], rel=1e-6)
    assert losses["same"] == losses["other"]
    assert len(list((tmp_path / "cache 64").glob("*/*.tokens"))) > 12
