"""N updates = k + resume + (N - k), bit for bit: weights, moments, counters, token ids, every line of metrics.jsonl."""

import pytest
import torch
from helpers.runs import assert_same_training, records, run, run_words, saved, write_text

from llmtrain.config.errors import DataError, ExitCode
from llmtrain.data.loader import TokenLoader

STEPS = 12
DROPOUT = [f"model.dropout.{site}=0.2" for site in ("embedding", "attention", "residual", "feed_forward")]
WORDS = (
    f"train.steps={STEPS}",
    "train.eval_every=4",
    "train.eval_tokens=48",
    "accumulation.global_batch_size=6",
    "accumulation.micro_batch_size=2",
    "attention=reference",
    "data.packing=document",
    "data.sequence_length=38",
    "checkpoint.every=0",
    *DROPOUT,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def read_ids(module_monkeypatch):
    """Records (first sample, tokens) of every training batch read."""
    log = []
    plain = TokenLoader.batch

    def recording(self, first_sample, count):
        batch = plain(self, first_sample, count)
        log.append((first_sample, batch.tokens.tolist()))
        log_epochs.append((first_sample + count) / self.samples_per_epoch)
        return batch

    log_epochs: list[float] = []
    module_monkeypatch.setattr(TokenLoader, "batch", recording)
    log_of = {"ids": log, "epochs": log_epochs}
    return log_of


@pytest.fixture(scope="module")
def module_monkeypatch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def whole(request, text, tmp_path_factory, read_ids):
    """An uninterrupted run: (runs folder, words, ids it read)."""
    runs = tmp_path_factory.mktemp("runs")
    words = (*WORDS, f"precision.kind={request.param}")
    read_ids["ids"].clear()
    read_ids["epochs"].clear()
    code, _ = run(*run_words(text, runs, "whole", *words))
    assert code == ExitCode.DONE
    assert 2.3 < max(read_ids["epochs"]) < 2.8, "the run is to see about two and a half epochs"
    return runs, words, list(read_ids["ids"])


@pytest.mark.parametrize("k", range(STEPS + 1))
def test_b45_stop_at_any_update_and_resume(whole, text, read_ids, k):
    """Also B25 and B58: ids and records of k + the rest are those of the whole run."""
    runs, words, ids = whole
    name = f"stopped-{k}"
    read_ids["ids"].clear()
    if k:
        code, _ = run(*run_words(text, runs, name, *words, f"train.stop_after={k}"))
        assert code == ExitCode.DONE and saved(runs / name).step == k
        assert records(runs / name) == records(runs / "whole")[:k]
    code, printed = run(*run_words(text, runs, name, *words))
    assert code == ExitCode.DONE
    if 0 < k < STEPS:
        assert f"going on from step {k}" in printed
    assert read_ids["ids"] == ids
    assert_same_training(runs / name, runs / "whole")


def test_finished_run_says_so_and_changes_nothing(whole, text):
    runs, words, _ = whole
    before = {path: path.stat().st_mtime_ns for path in (runs / "whole" / "checkpoints").rglob("*")}
    code, printed = run(*run_words(text, runs, "whole", *words))
    assert code == ExitCode.DONE and "is finished" in printed
    assert {path: path.stat().st_mtime_ns for path in (runs / "whole" / "checkpoints").rglob("*")} == before


def test_b27_another_text_is_refused(whole, text, tmp_path):
    runs, words, _ = whole
    run(*run_words(text, runs, "moved", *words, "train.stop_after=3"))
    other = write_text(tmp_path / "other", seed=1)
    with pytest.raises(DataError, match="differs from that of checkpoint step 3"):
        run(*run_words(other, runs, "moved", *words, "run.on_change=continue"))


def test_b27_resume_with_another_split_of_the_batch_reads_the_same_samples(whole, text, read_ids):
    runs, words, ids = whole
    run(*run_words(text, runs, "split", *words, "train.stop_after=5"))
    read_ids["ids"].clear()
    code, _ = run(*run_words(text, runs, "split", *words, "accumulation.micro_batch_size=3", "+recompute=full"))
    assert code == ExitCode.DONE
    flat = [row for _, rows in ids for row in rows]
    assert [row for _, rows in read_ids["ids"] for row in rows] == flat[5 * 6 :]
    mine, other = saved(runs / "split"), saved(runs / "whole")
    for name, tensor in mine.tensors.items():
        assert torch.allclose(tensor, other.tensors[name], rtol=1e-2, atol=1e-4), name


def test_b53_evaluation_leaves_the_training_untouched(text, tmp_path):
    for name, words in {"never": ("train.eval_every=0",), "always": ("train.eval_every=1",)}.items():
        run(*run_words(text, tmp_path, name, *WORDS, *words))
    mine, other = saved(tmp_path / "never"), saved(tmp_path / "always")
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in mine.tensors.items())
    assert all("val_loss" in record for record in records(tmp_path / "always"))
    assert not any("val_loss" in record for record in records(tmp_path / "never"))
