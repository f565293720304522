"""Whole runs on CUDA: train, resume, evaluate, generate."""

import json

import pytest
import torch
from helpers.runs import records, run, run_words, saved, write_text

from llmtrain.cli.dispatch import dispatch
from llmtrain.config.errors import ExitCode

pytestmark = pytest.mark.gpu
WORDS = ("launch.device=cuda", "train.steps=6", "accumulation.global_batch_size=4", "accumulation.micro_batch_size=2")


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", ["reference", "chunked"])
@pytest.mark.parametrize("packing", ["concat", "document", "padded"])
def test_losses_are_those_of_the_cpu(text, tmp_path, precision, loss, packing):
    words = (*WORDS, f"precision.kind={precision}", f"loss.kind={loss}", f"data.packing={packing}")
    run(*run_words(text, tmp_path, "cuda", *words, "recompute.kind=selective"))
    run(*run_words(text, tmp_path, "cpu", *words, "launch.device=cpu", "attention.backend=reference"))
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    mine, other = records(tmp_path / "cuda"), records(tmp_path / "cpu")
    assert [r["loss"] for r in mine] == pytest.approx([r["loss"] for r in other], rel=tolerance)


def test_deterministic_runs_resume_to_the_same_bits(text, tmp_path):
    words = (*WORDS, "train.deterministic=true", "precision.kind=bf16", "attention.backend=reference")
    run(*run_words(text, tmp_path, "whole", *words))
    run(*run_words(text, tmp_path, "parts", *words, "train.stop_after=3"))
    run(*run_words(text, tmp_path, "parts", *words))
    mine, other = saved(tmp_path / "parts"), saved(tmp_path / "whole")
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in mine.tensors.items())


def test_memory_is_that_of_the_allocator_and_the_verbs_work(text, tmp_path, capsys):
    run(*run_words(text, tmp_path, "a", *WORDS))
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["peak_memory_bytes"] > 0 for line in lines)
    assert dispatch(["evaluate", str(tmp_path / "a"), "output=json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["targets"] > 0
    assert dispatch(["generate", str(tmp_path / "a"), "generate.prompt=ab"]) == ExitCode.DONE
