"""No silent option: every key of the schema has another value whose effect somebody other than the config itself can see.

Each row names a key, words that set it to something else, and an observer: what was built, what an update computed, which operations
ran, what stands in the run folder, what a command printed. A key whose part does not exist yet is refused, and the refusal is its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from helpers.material import write_material
from helpers.observers import (
    Observer,
    Place,
    built,
    cached_files,
    changed_resume,
    checkpoints,
    computed,
    evaluated,
    exported,
    first_loss,
    generated,
    memory,
    operations,
    prepared,
    printed_steps,
    process_in_update,
    records,
    refused,
    run_folders,
    scored_batches,
    survives_bad_batches,
    tokens,
    tokens_or_refusal,
    tracked,
    tracked_by,
    worker_processes,
)
from helpers.rank_observers import RankPlace, buckets, degrees, launched, outlives_a_pause, swept
from helpers.ranks import RankPool
from helpers.runs import SMALL, write_text

from llmtrain.config.compose import compose_config
from llmtrain.config.keys import leaves
from llmtrain.train.machine import detect_machine

LINEAR = ("model.rope.scaling.kind=linear",)
LLAMA3 = ("model.rope.scaling.kind=llama3", "model.rope.scaling.factor=8", "model.rope.scaling.original_max_positions=16")
YARN = ("model.rope.scaling.kind=yarn", "model.rope.scaling.factor=8", "model.rope.scaling.original_max_positions=1024")
JSONL = ("data.kind=jsonl", "data.path={place}/good.jsonl", "data.validation_fraction=0.3")
IDS = ("data.kind=tokens", "data.path={place}/ids.bin", "data.cache_dir=null", "tokenizer.kind=ids", "model.vocab_size=300")
TOKENIZER_FILE = ("tokenizer.kind=file", "tokenizer.path={place}/tokenizer.json", "tokenizer.eos_token=<end>")
NOT_YET = "not available in this version"
LONG = "generate.max_tokens=40"
SMALL_BUCKETS = ("parallelism.bucket_mib=0.04",)


@dataclass(frozen=True)
class Row:
    """A key, words that give it another value, who sees it, and words of both runs that make it matter."""

    key: str
    words: tuple[str, ...]
    observe: Observer
    around: tuple[str, ...] = ()


def row(key: str, value: str, observe: Observer, *around: str) -> Row:
    return Row(key, (f"{key}={value}",), observe, around)


def missing_device(place: Place, *words: str) -> str:
    """Why the device of a launch cannot be used; empty when it can. On a Mac that has it, it is used and named."""
    why = refused(place, *words)
    return why or detect_machine(compose_config(place.words(*words)).config.launch).device


ROWS = (
    Row("run.name", ("run.name=other",), run_folders),
    Row("run.dir", (), run_folders),
    row("run.seed", "7", built),
    row("run.on_change", "continue", changed_resume),
    row("train.steps", "3", records),
    Row("train.tokens", ("train.tokens=97",), records),
    row("train.stop_after", "2", records),
    row("train.eval_every", "2", records),
    row("train.eval_tokens", "24", records, "train.eval_every=1"),
    row("train.log_every", "1", printed_steps),
    row("train.deterministic", "true", process_in_update),
    row("train.gc_every", "2", process_in_update),
    row("train.max_consecutive_skips", "1", survives_bad_batches),
    row("model.init_from", "{place}/runs/trained", first_loss),
    row("model.dim", "48", built),
    row("model.num_layers", "3", built),
    row("model.vocab_size", "300", built),
    row("model.max_positions", "64", built, "model.position=learned"),
    row("model.position", "learned", built),
    row("model.norm", "layer", built),
    row("model.norm_eps", "0.1", computed),
    row("model.tie_embeddings", "true", built),
    row("model.init_std", "0.1", built),
    row("model.depth_scaled_init", "false", built),
    row("model.attention.num_heads", "2", computed),
    row("model.attention.num_kv_heads", "2", built),
    row("model.attention.head_dim", "12", built),
    row("model.attention.qk_norm", "true", built),
    row("model.attention.bias", "true", built),
    row("model.attention.output_bias", "true", built),
    row("model.attention.window", "4", computed),
    row("model.attention.window_pattern", "SL", computed, "model.attention.window=4"),
    row("model.feed_forward.kind", "gelu", built),
    row("model.feed_forward.hidden_dim", "40", built),
    row("model.feed_forward.bias", "true", built),
    row("model.rope.theta", "100", computed),
    Row("model.rope.scaling.kind", (*LINEAR, "model.rope.scaling.factor=4"), computed),
    row("model.rope.scaling.factor", "8", computed, *LINEAR, "model.rope.scaling.factor=4"),
    row("model.rope.scaling.original_max_positions", "32", computed, *LLAMA3),
    row("model.rope.scaling.low_freq_factor", "2", computed, *LLAMA3),
    row("model.rope.scaling.high_freq_factor", "2", computed, *LLAMA3),
    row("model.rope.scaling.beta_fast", "2", computed, *YARN),
    row("model.rope.scaling.beta_slow", "0.1", computed, *YARN),
    row("model.rope.scaling.attention_factor", "1.5", computed, *YARN),
    row("model.dropout.embedding", "0.5", computed),
    row("model.dropout.attention", "0.5", computed),
    row("model.dropout.residual", "0.5", computed),
    row("model.dropout.feed_forward", "0.5", computed),
    Row("data.kind", ("data.kind=synthetic", "data.path=null", "data.cache_dir=null"), tokens),
    Row("data.path", (), tokens),
    row("data.validation_path", "{place}/text/01.txt", records, "train.eval_every=2"),
    row("data.text_field", "body", tokens, *JSONL),
    row("data.on_bad", "skip", tokens_or_refusal, "data.kind=jsonl", "data.path={place}/bad.jsonl"),
    row("data.max_document_bytes", "20", tokens_or_refusal, *JSONL),
    row("data.format", "llm_c", tokens_or_refusal, *IDS),
    row("data.dtype", "uint32", tokens_or_refusal, *IDS),
    row("data.sequence_length", "32", tokens),
    row("data.packing", "document", tokens),
    row("data.bos", "false", tokens),
    row("data.eos", "false", tokens),
    row("data.validation_fraction", "0.4", tokens),
    Row("data.cache_dir", (), cached_files),
    row("tokenizer.kind", "char", tokens),
    row("tokenizer.vocab_size", "280", tokens, "tokenizer.kind=bpe"),
    row("tokenizer.path", "{place}/other.json", tokens, *TOKENIZER_FILE),
    row("tokenizer.bos_token", "<begin>", tokens, *TOKENIZER_FILE),
    row("tokenizer.eos_token", "<begin>", tokens, *TOKENIZER_FILE),
    row(
        "tokenizer.pattern",
        "cl100k",
        built,
        "tokenizer.kind=tiktoken",
        "tokenizer.path={place}/ranks.tiktoken",
        "tokenizer.pattern=gpt2",
    ),
    row("tokenizer.eos_id", "11", tokens, *IDS, "data.packing=document", "tokenizer.eos_id=10"),
    row("precision.kind", "bf16", operations),
    row("recompute.kind", "full", memory),
    row("recompute.keep", "[attention]", memory, "recompute.kind=selective"),
    row("accumulation.global_batch_size", "8", computed),
    Row("accumulation.global_batch_tokens", ("accumulation.global_batch_tokens=192",), computed),
    row("accumulation.micro_batch_size", "2", operations),
    row("attention.backend", "sdpa", operations),
    row("attention.kernel", "math", operations, "attention.backend=sdpa"),
    row("loss.kind", "chunked", operations),
    row("loss.chunk_size", "16", memory, "loss.kind=chunked"),
    row("compile.kind", "blocks", refused),
    row("optimizer.kind", "adamw_8bit", refused),
    row("optimizer.lr", "0.01", computed),
    row("optimizer.weight_decay", "0.5", computed),
    row("optimizer.clip_norm", "0.01", computed),
    row("optimizer.beta1", "0.5", computed),
    row("optimizer.beta2", "0.5", computed),
    row("optimizer.eps", "0.1", computed),
    row("schedule.kind", "linear", computed, "schedule.warmup_steps=0"),
    row("schedule.warmup_steps", "3", computed),
    row("schedule.min_lr_ratio", "0.5", computed),
    row("schedule.decay_steps", "2", computed, "schedule.kind=wsd"),
    row("parallelism.kind", "fsdp", refused),
    row("parallelism.dp_replicate", "2", degrees),
    row("parallelism.dp_shard", "2", refused),
    row("parallelism.cp", "2", refused),
    row("parallelism.tp", "2", refused),
    row("parallelism.pp", "2", refused),
    row("parallelism.schedule", "gpipe", refused),
    row("parallelism.reduction", "canonical", refused),
    row("parallelism.offload", "cpu", refused),
    row("parallelism.bucket_mib", "0.02", buckets),
    row("parallelism.first_bucket_mib", "0.01", buckets, *SMALL_BUCKETS),
    row("parallelism.gradient_as_bucket_view", "false", buckets, *SMALL_BUCKETS),
    row("parallelism.static_graph", "true", buckets, *SMALL_BUCKETS),
    row("parallelism.compression", "bf16", buckets, *SMALL_BUCKETS),
    row("checkpoint.every", "2", checkpoints),
    row("checkpoint.keep", "1", checkpoints, "checkpoint.every=2"),
    row("tracker.wandb.enabled", "true", tracked),
    row("tracker.wandb.mode", "online", tracked_by, "tracker.wandb.enabled=true"),
    row("tracker.wandb.project", "mine", tracked_by, "tracker.wandb.enabled=true"),
    row("tracker.wandb.entity", "us", tracked_by, "tracker.wandb.enabled=true"),
    row("tracker.wandb.group", "pairs", tracked_by, "tracker.wandb.enabled=true"),
    row("tracker.wandb.tags", "[a,b]", tracked_by, "tracker.wandb.enabled=true"),
    row("tracker.tensorboard.enabled", "true", tracked),
    row("profile.kind", "window", refused),
    row("cluster.nodes", "2", refused),
    row("cluster.devices_per_node", "8", refused),
    row("cluster.memory_gib", "80", refused),
    row("launch.nproc", "2", launched),
    row("launch.device", "mps", missing_device),
    row("launch.threads", "2", process_in_update),
    row("launch.timeout_seconds", "2", outlives_a_pause),
    row("launch.env", "{PYTHONPROFILEIMPORTTIME:1}", launched, "launch.nproc=2"),
    row("sweep.jobs", "2", swept),
    row("sweep.only", "1", swept),
    row("evaluate.step", "2", evaluated),
    row("evaluate.batch_size", "2", scored_batches),
    row("evaluate.tokens", "24", evaluated),
    row("generate.step", "2", generated, LONG, "generate.temperature=0"),
    row("generate.prompt", "abc", generated, LONG),
    row("generate.max_tokens", "5", generated, LONG, "generate.temperature=50"),
    row("generate.temperature", "0", generated, LONG),
    row("generate.top_k", "1", generated, LONG),
    row("generate.top_p", "0.01", generated, LONG),
    row("generate.seed", "5", generated, LONG),
    Row("prepare.path", ("prepare.path={place}/tokens",), prepared),
    row("prepare.workers", "2", worker_processes),
    row("prepare.shard_bytes", "200", prepared, "prepare.path={place}/tokens"),
    row("convert.step", "2", exported),
    row("convert.dtype", "bf16", exported),
    row("convert.shard_bytes", "20000", exported),
    row("output", "json", evaluated),
)

REFUSED_KEYS = {row.key for row in ROWS if row.observe is refused}


@pytest.fixture(scope="module")
def place(tmp_path_factory, ranks: RankPool):
    root = tmp_path_factory.mktemp("every-key")
    (root / "runs").mkdir()
    write_material(root)
    return RankPlace(write_text(root / "text", bytes_per_document=60), root / "runs", ranks)


@pytest.fixture(scope="module")
def unchanged(place):
    """Observations without the key; rows that share observer and surroundings share one."""
    seen: dict[Any, Any] = {}

    def observe(observer: Observer, around: tuple[str, ...]) -> Any:
        if (observer, around) not in seen:
            seen[observer, around] = observer(place, *filled(around, place))
        return seen[observer, around]

    return observe


def filled(words: tuple[str, ...], place: Place) -> tuple[str, ...]:
    """Words with the folder of this session in them."""
    return tuple(word.replace("{place}", str(place.text.parent)) for word in words)


def special_words(item: Row, place: Place) -> tuple[str, ...]:
    """Words that need a folder of this machine."""
    if item.key == "run.dir":
        return (f"run.dir={place.runs / 'elsewhere'}",)
    if item.key == "data.path":
        return (f"data.path={write_text(place.text.parent / 'other-text', seed=3)}",)
    if item.key == "data.cache_dir":
        return (f"data.cache_dir={place.runs.parent / 'other-cache'}",)
    if item.key == "train.tokens":
        return ("train.steps=null", *item.words)
    if item.key == "accumulation.global_batch_tokens":
        return ("accumulation.global_batch_size=null", *item.words)
    return item.words


def test_every_key_of_the_schema_has_a_row():
    assert sorted(item.key for item in ROWS) == sorted(leaves())


@pytest.mark.parametrize("item", ROWS, ids=lambda item: item.key)
def test_every_key(item, place, unchanged):
    before = unchanged(item.observe, item.around)
    after = item.observe(place, *filled((*item.around, *special_words(item, place)), place))
    if item.key in REFUSED_KEYS:
        assert before == ""
        assert NOT_YET in after and item.key in after, after
    else:
        assert before != after


def test_defaults_are_what_an_absent_word_means(place):
    """Naming the default of a key changes nothing that an update computes."""
    named = [
        f"{name}={str(info.default).lower() if isinstance(info.default, bool) else info.default}"
        for name, info in leaves().items()
        if name.split(".")[0] in ("optimizer", "schedule", "loss", "recompute") and info.default is not None
    ]
    assert len(named) > 8
    assert computed(place, *named) == computed(place)


def test_the_small_words_of_these_tests_compose():
    assert compose_config((*SMALL, "data.path=x")).config.data.sequence_length == 24
