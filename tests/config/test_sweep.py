"""The `-m` forms: which jobs a command line stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError
from llmtrain.config.sweep import MAX_JOBS, expand_sweep

pytestmark = pytest.mark.usefixtures("remembered_files")


def changes(*words: str, **options) -> list[dict[str, str]]:
    return [job.changed for job in expand_sweep(words, **options)]


def test_both_spellings_of_a_group_sweep() -> None:
    expected = [
        {"precision": "fp32", "recompute": "none"},
        {"precision": "fp32", "recompute": "full"},
        {"precision": "bf16", "recompute": "none"},
        {"precision": "bf16", "recompute": "full"},
    ]
    for sign in ("", "+"):
        jobs = expand_sweep([f"{sign}precision=fp32,bf16", "train.steps=5", f"{sign}recompute=none,full"])
        assert [job.changed for job in jobs] == expected
        assert jobs[1].words == (f"{sign}precision=fp32", "train.steps=5", f"{sign}recompute=full")
        configs = [compose_config(job.words).config for job in jobs]
        assert [(config.precision, str(config.recompute.kind)) for config in configs] == [
            tuple(row.values()) for row in expected
        ]
        assert all(config.train.steps == 5 for config in configs)


def test_without_a_sweep_there_is_one_job() -> None:
    words = ("precision=bf16", "recompute.keep=[attention,matmul]", "generate.prompt='a,b'", "run.name=x(1,2)", "junk")
    assert [(job.words, job.changed) for job in expand_sweep(words)] == [(words, {})]


@pytest.mark.parametrize(
    "word,values",
    [
        ("train.steps=1e3,2e3", ["1e3", "2e3"]),
        ("optimizer.lr=1e-4, 3e-4", ["1e-4", "3e-4"]),
        ("run.name=1e5,true", ["1e5", "true"]),
        ("train.steps=choice(1e3,2e3)", ["1e3", "2e3"]),
        ("generate.prompt='a,b',\"c, d\",e", ["'a,b'", '"c, d"', "e"]),
        ("generate.prompt=a\\,b,c", ["a\\,b", "c"]),
        ("recompute.keep=[matmul],[attention,matmul]", ["[matmul]", "[attention,matmul]"]),
        ("train.steps=range(1,4)", ["1", "2", "3"]),
        ("train.steps=range(10,40,10)", ["10", "20", "30"]),
        ("optimizer.beta1=range(0,0.75,0.25)", ["0.0", "0.25", "0.5"]),
        ("train.steps=sort(3,1,2)", ["1", "2", "3"]),
        ("precision=glob(*32)", ["fp32"]),
        ("precision=glob([bf*,fp*],exclude=bf16)", ["fp32"]),
        ("train.eval_every=${checkpoint.every},5", ["${checkpoint.every}", "5"]),
    ],
)
def test_forms_of_a_sweep_keep_the_spelling(word: str, values: list[str]) -> None:
    key = word.partition("=")[0]
    jobs = expand_sweep(["train.gc_every=1", word])
    assert [job.changed for job in jobs] == [{key: value} for value in values]
    assert [job.words for job in jobs] == [("train.gc_every=1", f"{key}={value}") for value in values]


def test_b56_values_of_a_sweep_keep_their_type() -> None:
    """Small floats arrived as text, step counts as 1000.0."""
    jobs = expand_sweep(["train.steps=1e3,7", "optimizer.lr=1e-4,0.1"])
    configs = [compose_config(job.words).config for job in jobs]
    assert [(type(c.train.steps), c.train.steps, c.optimizer.lr) for c in configs] == [
        *((int, 1000, 1e-4), (int, 1000, 0.1), (int, 7, 1e-4), (int, 7, 0.1)),
    ]


def test_glob_sees_folders_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny_wide.yaml").write_text("dim: 256", encoding="utf-8")
    assert changes("model=glob(tiny*)", config_dirs=[tmp_path]) == [{"model": m} for m in ("tiny", "tiny_gpt2", "tiny_wide")]


@pytest.mark.parametrize(
    "word,rule",
    [
        ("train.steps=interval(1,5)", "a sweep lists its values"),
        ("train.steps=range(1,5,0)", "a sweep lists its values"),
        ("train.steps=range(5,5)", "there is none"),
        ("precision=glob(x*)", "there is none"),
        ("train.steps=glob(*)", "there is none"),
        ("train.steps=range(0,1e15)", f"at most {MAX_JOBS} jobs"),
    ],
)
def test_sweeps_that_list_nothing_usable(word: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        expand_sweep(["precision=fp32,bf16", word])
    assert len(caught.value.problems) == 1


def test_unknown_values_are_found_by_the_job_that_has_them() -> None:
    good, bad = expand_sweep(["precision=bf16,bf17"])
    assert compose_config(good.words).config.precision == "bf16"
    with pytest.raises(ConfigError, match="precision=bf17"):
        compose_config(bad.words)
