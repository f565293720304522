"""Config mistakes: each message names the key, the value, the rule and a cure, and says where the value was set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError, ExitCode

pytestmark = pytest.mark.usefixtures("remembered_files")

# Words as typed; then fragments: key with value, rule, cure.
MISTAKES = [
    # names
    (["trian.steps=10"], ["trian.steps=10", "no such group, section or key", "train.steps"]),
    (["+precison=bf16"], ["+precison=bf16", "no such", "precision"]),
    (["++model.n_lyaer=3"], ["++model.n_lyaer=3", "no such", "model.num_layers"]),
    (["optimizer.learning_rate=1"], ["optimizer.learning_rate=1", "no such", "optimizer.lr"]),
    (["precision=bf17"], ["precision=bf17", "the options of precision are auto, bf16, fp32", "precision=bf16"]),
    (["+experiment=demoo"], ["+experiment=demoo", "the options of experiment are demo, smoke", "experiment=demo"]),
    (["~train.stop_after"], ["~train.stop_after", "none can be removed", "train.stop_after=null"]),
    (["train.steps"], ["train.steps", "key=value", "train.steps=VALUE"]),
    (["model.attention=sdpa"], ["model.attention=sdpa", "a section", "num_heads", "model.attention.num_heads"]),
    (["precision@model=bf16"], ["precision@model=bf16", "section of its group", "precision=bf16"]),
    # not in this version
    (["precision=fp16"], ["precision=fp16", "not available in this version", "precision=auto, bf16 or fp32"]),
    (["optimizer.kind=muon"], ["optimizer.kind=muon", "not available in this version", "optimizer.kind=adamw"]),
    (["tracker.wandb.project=x"], ["tracker.wandb.project=x", "is not used", "tracker=wandb"]),
    (["tracker=wandbb"], ["tracker=wandbb", "the options of tracker are tensorboard, wandb", "tracker=wandb"]),
    (["cluster.nodes=2"], ["cluster.nodes=2", "not available in this version", "leave out cluster.nodes"]),
    (["parallelism.tp=2"], ["parallelism.tp=2", "not available in this version, whose ranks keep whole", "parallelism.tp=1"]),
    (["parallelism=fsdp"], ["parallelism=fsdp", "not available in this version", "parallelism=ddp"]),
    (["parallelism.compression=fp8"], ["compression=fp8", "one of none, bf16", "parallelism.compression=none or bf16"]),
    (
        ["parallelism.reduction=canonical"],
        ["reduction=canonical", "not available in this version", "parallelism.reduction=ring"],
    ),
    # ranks
    (["launch.nproc=0"], ["launch.nproc=0", "a whole number >= 1", "(ranks)", "launch.nproc=1"]),
    (["launch.device=gpu"], ["launch.device=gpu", "one of auto, cpu, cuda, mps", "launch.device=cpu"]),
    (["launch.timeout_seconds=0.5"], ["timeout_seconds=0.5", "a number >= 1", "(seconds)", "launch.timeout_seconds=1"]),
    (["launch.timeout_seconds=inf"], ["timeout_seconds=inf", "finite", "launch.timeout_seconds="]),
    (["launch.env.RANK=3"], ["launch.env.RANK=3", "what starts the ranks sets this one itself", "leave out launch.env.RANK"]),
    (["launch.env.HF_TOKEN=abc"], ["launch.env.HF_TOKEN", "no secret belongs", "export HF_TOKEN before the command"]),
    (["parallelism.bucket_mib=0"], ["parallelism.bucket_mib=0", "a number > 0", "(MiB)"]),
    (
        ["parallelism.first_bucket_mib=99"],
        ["first_bucket_mib=99", "at most parallelism.bucket_mib = 25", "first_bucket_mib=25"],
    ),
    (["sweep.jobs=0"], ["sweep.jobs=0", "a whole number >= 1", "(jobs)", "sweep.jobs=1"]),
    (["sweep.only=-1"], ["sweep.only=-1", "a whole number >= 0", "sweep.only=0"]),
    # values
    (["train.steps=1000.0"], ["train.steps=1000.0", "a whole number >= 1 and <= 1099511627776 (updates)", "train.steps=1000"]),
    (["train.log_every=0"], ["train.log_every=0", "a whole number >= 1", "train.log_every=1"]),
    (["run.seed=-1"], ["run.seed=-1", ">= 0 and < 4294967296", "run.seed=0"]),
    (["optimizer.lr=fast"], ["optimizer.lr=fast", "a number > 0", "0.1 or 1e-3"]),
    (["optimizer.lr=nan"], ["optimizer.lr=nan", "a number > 0; finite", "0.1 or 1e-3"]),
    (["optimizer.beta2=1"], ["optimizer.beta2=1", "a number >= 0 and < 1"]),
    (["train.deterministic=yes"], ["train.deterministic=yes", "true or false", "train.deterministic=true"]),
    (["run.dir=null"], ["run.dir=null", "null means not given", "leave out run.dir"]),
    (["data.packing=concatenate"], ["data.packing=concatenate", "one of concat, document, padded", "data.packing=concat"]),
    (["train.eval_every=100,200"], ["train.eval_every=100,200", "several values", "-m train.eval_every=100,200"]),
    (["generate.prompt=Hi, you"], ["generate.prompt=Hi, you", "several values", "\"'Hi, you'\""]),
    (["train.eval_every=${train.step}"], ["train.eval_every=${train.step}", "refers to no key", "${train.steps}"]),
    (["train.eval_every=${train.eval_every}"], ["${train.eval_every}", "refers to itself", "give train.eval_every a value"]),
    (["train.eval_every=${train.steps}"], ["${train.steps}", "train.steps is not given", "train.steps=VALUE"]),
    (["run.name=a-${run.name2}"], ["run.name=a-${run.name2}", "refers to no key", "${run.name}"]),
    (["train.eval_every=${model}"], ["train.eval_every=${model}", "a section", "${model.KEY}"]),
    (["run.name=${oc.env:HOME}"], ["run.name=${oc.env:HOME}", "resolvers are not run", r"\${"]),
    (["run.name=a/b"], ["run.name='a/b'", "the name of one folder", "run.dir"]),
    # one group or pair, two answers
    (["precision=bf16", "+precision=fp32"], ["+precision=fp32", "one option at a time", "word 1 and word 2"]),
    (["recompute=[none,full]"], ["recompute=[none,full]", "one option at a time", "recompute=full"]),
    (["train.steps=9", "train.tokens=9"], ["train.steps=9 train.tokens=9", "both say how long", "leave one of them out"]),
    # between keys
    (["data.path=book.txt"], ["data.path=book.txt", "only data=text, jsonl, parquet or tokens reads it", "data=text"]),
    (["data=text"], ["data=text", "needs the file or folder", "data.path="]),
    (["recompute.keep=[matmul]"], ["recompute.keep=[matmul]", "only recompute=selective", "recompute=selective"]),
    (["train.stop_after=2000"], ["train.stop_after=2000", "the 1000 updates", "train.stop_after=1000 or train.steps=2000"]),
    (["accumulation.micro_batch_size=5"], ["micro_batch_size=5", "16 sequences", "micro_batch_size=4", "global_batch_size=15"]),
    (["accumulation.global_batch_tokens=1000"], ["tokens=1000", "divisible by data.sequence_length = 256", "768", "1024"]),
    (["model.attention.num_heads=3"], ["model.dim=128", "divisible by model.attention.num_heads = 3", "126", "num_heads=4"]),
    (
        ["model.dropout.attention=0.1", "attention=sdpa"],
        ["model.dropout.attention=0.1", "only attention=reference", "attention=reference"],
    ),
    (["model.vocab_size=100"], ["model.vocab_size=100", "258 tokens of tokenizer=byte", "model.vocab_size=258 or auto"]),
    (["data=synthetic", "tokenizer=bpe"], ["tokenizer=bpe", "turns text into tokens", "tokenizer=byte or data=stdlib"]),
    (["data=jsonl"], ["data=jsonl", "needs the file or folder", "data.path="]),
    (["tokenizer=file"], ["tokenizer=file", "needs the tokenizer.json", "tokenizer.path=FILE"]),
    (["attention.kernel=flash"], ["attention.kernel=flash", "a kernel of attention=sdpa", "attention=sdpa"]),
    (["model.attention.window_pattern=SL"], ["window_pattern=SL", "how short, is not given", "model.attention.window=128"]),
    (["model.init_from=nowhere"], ["model.init_from=nowhere", "not a run folder", "llmtrain convert"]),
    (["generate.temperature=0", "generate.top_k=5"], ["generate.top_k=5", "likeliest token", "leave out generate.top_k"]),
]


@pytest.mark.parametrize("words,fragments", MISTAKES, ids=lambda case: " ".join(case) if isinstance(case, list) else None)
def test_message_names_key_value_rule_and_cure(words: list[str], fragments: list[str], refusal: Callable[..., str]) -> None:
    report = refusal(*words)
    for fragment in fragments:
        assert fragment in report
    assert report.startswith("error: ") and report.count("error: ") == 1
    assert "\n  rule  " in report and "\n  set   " in report


def test_there_are_enough_mistakes() -> None:
    assert len(MISTAKES) >= 40


def test_all_mistakes_come_in_one_report(tmp_path: Path) -> None:
    words = [
        *("trian.steps=5", "+precision=fp61", "+foo=1", "train.log_every=0", "optimizer.lr=nan", "recompute=budget"),
        *("model.attention.num_heads=3", "data.path=x", "~loss", "launch.nproc=0", "schedule=mine"),
    ]
    write(tmp_path, "schedule/mine", "kind: cosine\nmin_lr: 0.1\nwarmup_steps: soon")
    with pytest.raises(ConfigError) as caught:
        compose_config(words, config_dirs=[tmp_path])
    assert caught.value.exit_code == ExitCode.CONFIG
    origins = [problem.origin for problem in caught.value.problems]
    assert sorted(origins) == sorted(
        [f"command line, word {number}" for number in range(1, 11)]
        + [f"{tmp_path}/schedule/mine.yaml:{line}" for line in (2, 3)]
    )


def test_a_refused_value_brings_no_further_complaints(refusal: Callable[..., str]) -> None:
    """Rules that read a refused key are left out: here stop_after is fine for the steps that were meant."""
    assert refusal("train.steps=1_0_x", "train.stop_after=5000", "train.eval_every=${train.steps}").count("error: ") == 1


FILES = [
    ("train: {steps: 5", "not readable: ", ":1"),
    ("train:\n  steps: 5\n bad: [", "not readable: ", ":3"),
    ("train:\n  steps: 5\n  steps: 6", "a key stands once", ":3"),
    ("train:\n  steps: 5\n\n  stesp: 6", "no such group, section or key", ":4"),
    ("train.steps: 5", "no such group, section or key", ":1"),
    ("- train", "a config file holds sections and keys", ":1"),
    ("just words", "a config file holds sections and keys", ":1"),
    ("model:\n  attention: sdpa", "a section with keys of its own", ":2"),
    ("<<: {train: {steps: 5}}", "no such group, section or key", ":1"),
    ("run: {name: !!python/object:os.system x}\ntrain: {steps: [1]}", "could not determine a constructor", ":1"),
    ("data: &d {path: *d}", "an alias inside what it names", ":1"),
    ("recompute:\n  kind: selective\n  keep: &k [*k]", "an alias inside what it names", ":3"),
    ("recompute:\n  kind: selective\n  keep: [[matmul]]", "a list of attention", ":3"),
    ("defaults:\n  - train\n  - override /precision: [fp16]", "not available in this version", ":3"),
    ("defaults:\n  - train\n  - override /precision: [bf16, fp32]", "one option at a time", ":3"),
    ("defaults:\n  - train\n  - other", "no such file in the config folders", ":3"),
    ("defaults:\n  - train\n  - override /data: ['${oc.env:HOME}']", "references are for values", ":3"),
    ("defaults:\n  - train\n  - override /data: ${oc.env:HOME}", "references are for values", ":3"),
    ("defaults:\n  - train\n  - {a: 1, b: 2}", "", ""),
    ("defaults: 5", "", ""),
    ("_target_: os.system", "no such group, section or key", ":1"),
]


@pytest.mark.parametrize("text,rule,place", FILES)
def test_a_bad_file_is_an_error_with_its_line(
    tmp_path: Path, text: str, rule: str, place: str, refusal: Callable[..., str]
) -> None:
    write(tmp_path, "mine", text)
    report = refusal(config_name="mine", config_dirs=[tmp_path])
    assert rule in report and "Traceback" not in report
    assert not place or f"{tmp_path}/mine.yaml{place}" in report


def test_a_bad_file_among_the_defaults_is_named(tmp_path: Path, refusal: Callable[..., str]) -> None:
    write(tmp_path, "mine", "defaults: [train, other]")
    write(tmp_path, "other", "train:\n  steps: [")
    assert f"{tmp_path}/other.yaml:" in refusal(config_name="mine", config_dirs=[tmp_path])


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_bytes(b"dim: \xff\xfe\n")
    assert "not readable" in refusal("model=mine", config_dirs=[tmp_path])


def test_folders_and_files_that_are_not_there(tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert f"--config-dir={tmp_path}/gone" in refusal(config_dirs=[tmp_path / "gone"])
    report = refusal("train.steps=x", config_name="trian")
    assert "--config-name=trian" in report and "--config-name=train" in report and "train.steps=x" in report


def test_an_option_in_two_folders_is_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    """Hydra would take the first and say nothing: the file somebody edits would have no effect."""
    write(tmp_path, "precision/bf16", "kind: fp32")
    report = refusal("precision=bf16", config_dirs=[tmp_path])
    assert "configs/precision/bf16.yaml" in report and f"{tmp_path}/precision/bf16.yaml" in report


def test_two_keys_of_a_pair_in_one_file_are_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    write(tmp_path, "mine", "train:\n  steps: 5\n  tokens: 5")
    report = refusal(config_name="mine", config_dirs=[tmp_path])
    assert "both say how long" in report and f"{tmp_path}/mine.yaml:2; {tmp_path}/mine.yaml:3" in report


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
