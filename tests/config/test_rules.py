"""Every rule between keys: one config that breaks it, and the nearest ones that do not."""

from __future__ import annotations

import functools

import pytest

from llmtrain.config import rules, schema
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError
from llmtrain.config.keys import leaves
from llmtrain.config.rules import Check, check_rules

pytestmark = pytest.mark.usefixtures("remembered_files")

# Rule: words that break it and nothing else, then word lists that are fine.
YARN = "model.rope.scaling.kind=yarn model.rope.scaling.factor=4 model.rope.scaling.original_max_positions=4096"

CASES = {
    "run_name_is_a_folder_name": ("run.name=..", ["run.name=a..b", "run.name=ünï-1.2_x", "run.name=null"]),
    "path_is_not_empty": ("run.dir=", ["run.dir=.", "run.dir=/tmp/a b", "data=text data.path=.. data.cache_dir=/c"]),
    "steps_or_tokens": ("train.steps=5 train.tokens=5", ["train.tokens=5", "train.steps=null train.tokens=5"]),
    "sequences_or_tokens": (
        "accumulation.global_batch_size=1 accumulation.global_batch_tokens=256",
        ["accumulation.global_batch_tokens=256", "accumulation.global_batch_size=3"],
    ),
    "stop_after_within_steps": (
        "train.tokens=4097 train.stop_after=3",
        ["train.tokens=4097 train.stop_after=2", "train.stop_after=1000", "train.steps=2 train.stop_after=2"],
    ),
    "batch_tokens_make_whole_sequences": (
        "accumulation.global_batch_tokens=100",
        ["accumulation.global_batch_tokens=512", "data.sequence_length=50 accumulation.global_batch_tokens=100"],
    ),
    "micro_batches_fill_the_batch": (
        "accumulation.micro_batch_size=32",
        ["accumulation.micro_batch_size=16", "accumulation.micro_batch_size=2 accumulation.global_batch_tokens=512"],
    ),
    "warmup_within_steps": (
        "train.steps=10 schedule.warmup_steps=11",
        ["train.steps=10 schedule.warmup_steps=10", "schedule.warmup_steps=0", "train.steps=1"],
    ),
    "wsd_phases_within_steps": (
        "schedule=wsd train.steps=10 schedule.warmup_steps=4 schedule.decay_steps=7",
        [
            "schedule=wsd train.steps=10 schedule.warmup_steps=4 schedule.decay_steps=6",
            "schedule=wsd train.steps=1",
            "schedule=wsd train.steps=10 schedule.warmup_steps=0 schedule.decay_steps=10",
        ],
    ),
    "heads_divide_the_width": (
        "model.attention.num_heads=5",
        ["model.attention.num_heads=8", "model.attention.num_heads=5 model.attention.head_dim=32"],
    ),
    "kv_heads_divide_the_heads": (
        "model.attention.num_kv_heads=3",
        ["model.attention.num_kv_heads=1", "model.attention.num_kv_heads=4"],
    ),
    "rotary_turns_pairs_of_channels": (
        "model.attention.head_dim=33",
        ["model.attention.head_dim=34", "model.attention.head_dim=33 model.position=learned"],
    ),
    "longest_text_covers_a_sequence": (
        "model.max_positions=255",
        ["model.max_positions=256", "model.max_positions=4096", "model.position=learned data.sequence_length=1024"],
    ),
    "theta_needs_rotary_positions": (
        "model=small_gpt2 model.rope.theta=500000",
        ["model.rope.theta=500000", "model=small_gpt2 model.rope.theta=10000"],
    ),
    "scaling_needs_rotary_positions": (
        "model=tiny_gpt2 model.rope.scaling.kind=linear model.rope.scaling.factor=2",
        ["model.rope.scaling.kind=linear model.rope.scaling.factor=2", "model=tiny_gpt2"],
    ),
    "rope_scaling_is_complete": (
        "model.rope.scaling.kind=llama3 model.rope.scaling.factor=8",
        [
            "model.rope.scaling.kind=llama3 model.rope.scaling.factor=8 model.rope.scaling.original_max_positions=8192",
            "model.rope.scaling.kind=linear model.rope.scaling.factor=1",
        ],
    ),
    "rope_ramp_rises": (
        f"{YARN} model.rope.scaling.beta_slow=32",
        [f"{YARN} model.rope.scaling.beta_slow=31", f"{YARN} model.rope.scaling.beta_slow=40 model.rope.scaling.beta_fast=41"],
    ),
    "window_pattern_has_two_letters": (
        "model.attention.window=8 model.attention.window_pattern=SSX",
        ["model.attention.window=8 model.attention.window_pattern=SSL"],
    ),
    "windows_are_used": (
        "model.attention.window_pattern=SL",
        ["model.attention.window=8", "model.attention.window=8 model.attention.window_pattern=LS"],
    ),
    "kernel_belongs_to_the_backend": (
        "attention=sdpa attention.kernel=fa2",
        ["attention=sdpa attention.kernel=math", "attention=flash_attn attention.kernel=fa3"],
    ),
    "attention_dropout_needs_the_reference_backend": (
        "model.dropout.attention=0.1 attention=sdpa",
        [
            "model.dropout.attention=0.1 attention=reference",
            "model.dropout.attention=0.1",
            "model.dropout.residual=0.1 attention=sdpa",
        ],
    ),
    "vocabulary_holds_the_tokenizer": (
        "tokenizer=bpe model.vocab_size=4095",
        [
            "tokenizer=bpe model.vocab_size=4096",
            "tokenizer.kind=bpe tokenizer.vocab_size=300 model.vocab_size=300",
            "tokenizer=char model.vocab_size=100",
            "model.vocab_size=258",
        ],
    ),
    "files_need_a_path": ("data=jsonl", ["data=jsonl data.path=x", "data=tokens data.path=x", "data=synthetic"]),
    "one_way_to_hold_out": (
        "data=text data.path=x data.validation_path=y data.validation_fraction=0.1",
        ["data=text data.path=x data.validation_path=y", "data=text data.path=x data.validation_fraction=0.1"],
    ),
    "validation_is_other_text": (
        "data=text data.path=x data.validation_path=x",
        ["data=text data.path=x data.validation_path=y", "data=text data.path=x"],
    ),
    "dtype_is_for_raw_files": (
        "data=tokens data.path=x data.dtype=uint16 data.format=megatron",
        ["data=tokens data.path=x data.dtype=uint16", "data=tokens data.path=x data.dtype=uint32 data.format=raw"],
    ),
    "tokens_have_their_marks": (
        "data=synthetic data.eos=false",
        ["data.eos=false data.bos=false", "data=tokens data.path=x data.eos=true"],
    ),
    "tokenizer_files_need_a_path": ("tokenizer=tiktoken", ["tokenizer=tiktoken tokenizer.path=x", "tokenizer=byte"]),
    "learnt_tokenizers_need_text": (
        "data=tokens data.path=x tokenizer=bpe",
        ["data=tokens data.path=x", "data=tokens data.path=x tokenizer=file tokenizer.path=x"],
    ),
    "plain_ids_come_from_token_files": (
        "tokenizer=ids model.vocab_size=300",
        ["data=tokens data.path=x tokenizer=ids model.vocab_size=300", "data=synthetic tokenizer=ids model.vocab_size=300"],
    ),
    "plain_ids_need_a_vocabulary": (
        "data=synthetic tokenizer=ids",
        ["data=synthetic tokenizer=ids model.vocab_size=300"],
    ),
    "end_of_text_is_in_the_vocabulary": (
        "data=tokens data.path=x tokenizer=ids model.vocab_size=300 tokenizer.eos_id=300",
        ["data=tokens data.path=x tokenizer=ids model.vocab_size=300 tokenizer.eos_id=299"],
    ),
    "synthetic_data_has_no_text": (
        "data=synthetic tokenizer=char",
        ["data=synthetic model.vocab_size=32000", "data=synthetic tokenizer=byte"],
    ),
    "one_data_axis_only": ("parallelism.pp=2", ["parallelism.dp_replicate=4 launch.nproc=4", "parallelism.tp=1"]),
    "ddp_keeps_whole_copies": ("parallelism.dp_shard=auto", ["parallelism.dp_shard=1"]),
    "first_bucket_is_no_larger": (
        "parallelism.first_bucket_mib=30",
        [
            "parallelism.first_bucket_mib=25",
            "parallelism.first_bucket_mib=30 parallelism.bucket_mib=30",
            "parallelism.bucket_mib=0.5",
        ],
    ),
    "environment_is_plain": (
        "launch.env.MASTER_PORT=1",
        ["launch.env.NCCL_DEBUG=INFO", "launch.env={A:b,_c1:d}", "launch.env.TOKENIZERS_PARALLELISM=false"],
    ),
    "trackers_are_on": ("tracker.wandb.project=mine", ["tracker=wandb tracker.wandb.project=mine", "tracker=tensorboard"]),
    "greedy_sampling_has_no_candidates": (
        "generate.temperature=0 generate.top_p=0.5",
        ["generate.temperature=0", "generate.temperature=0.1 generate.top_p=0.5 generate.top_k=3"],
    ),
}


def name_of(check: Check) -> str:
    return check.func.__name__ if isinstance(check, functools.partial) else check.__name__


@pytest.mark.parametrize("name", CASES)
def test_a_rule_refuses_exactly_its_combination(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking, fine = CASES[name]
    for words in fine:
        compose_config(_words(words))
    with pytest.raises(ConfigError) as among_all:
        compose_config(_words(breaking))
    (problem,) = among_all.value.problems
    assert problem.rule and problem.cure and problem.origin
    only = tuple(rule for rule in rules.all_rules() if name_of(rule.check) == name)
    monkeypatch.setattr(rules, "all_rules", lambda: only)
    with pytest.raises(ConfigError) as alone:
        compose_config(_words(breaking))
    assert alone.value.problems == (problem,)


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        *(
            (f"launch.env.{name}=1", "sets this one itself")
            for name in ("RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
        ),
        *((f"launch.env.{name}=1", "sets this one itself") for name in ("SLURM_PROCID", "TORCHELASTIC_RUN_ID", "LLMTRAIN_X")),
        *(
            (f"launch.env.{name}=hidden", "no secret belongs")
            for name in ("WANDB_API_KEY", "HF_TOKEN", "aws_secret_access_key")
        ),
        *((f"launch.env.{name}=hidden", "no secret belongs") for name in ("MYAPIKEY", "DB_PASSWORD", "GOOGLE_CREDENTIALS")),
        ("launch.env={A-B:1}", "a name of letters"),
        ("launch.env={1A:1}", "a name of letters"),
    ],
)
def test_variables_that_may_not_be_kept_in_a_config(word: str, rule: str) -> None:
    """The value of a secret is not repeated: the message may end in a log that others read."""
    with pytest.raises(ConfigError) as caught:
        compose_config([word])
    (problem,) = caught.value.problems
    assert rule in problem.rule and problem.what.startswith("launch.env.")
    assert "hidden" not in f"{problem.what}{problem.rule}{problem.cure}"


def test_every_rule_has_a_case() -> None:
    assert {name_of(rule.check) for rule in rules.all_rules()} == set(CASES)


def test_rules_name_keys_of_the_schema() -> None:
    for rule in rules.all_rules():
        assert set(rule.keys) <= set(leaves()), name_of(rule.check)


def test_the_cure_of_a_rule_composes() -> None:
    """`try` lines are meant to be pasted: every `key=value` alternative is legal in place of what was typed."""
    for breaking, cures in (
        (
            "model.attention.num_heads=5",
            ["model.dim=125", "model.dim=130", "model.attention.num_heads=4", "model.attention.num_heads=8"],
        ),
        ("accumulation.micro_batch_size=5", ["accumulation.micro_batch_size=4", "accumulation.global_batch_size=20"]),
        (
            "accumulation.global_batch_tokens=1000",
            ["accumulation.global_batch_tokens=768", "accumulation.global_batch_tokens=1024"],
        ),
        ("train.stop_after=2000", ["train.stop_after=1000", "train.steps=2000"]),
    ):
        with pytest.raises(ConfigError) as caught:
            compose_config([breaking])
        for cure in cures:
            assert cure in caught.value.problems[0].cure
            if cure not in ("model.dim=125",):  # five heads of 25 channels cannot be rotated
                compose_config([breaking, cure])


def test_origins_of_a_rule_are_those_of_its_keys() -> None:
    wire = schema.Config()
    wire.train.stop_after = 5000
    (problem,) = check_rules(wire, origins={"train.stop_after": "command line, word 2", "train.steps": "configs/x.yaml:3"})
    assert problem.origin == "command line, word 2; configs/x.yaml:3"
    assert check_rules(wire, without={"train.steps"}) == []


def _words(text: str) -> list[str]:
    """`a=1 b=two words` cut before each `key=`."""
    words: list[str] = []
    for piece in text.split(" "):
        if "=" in piece:
            words.append(piece)
        else:
            words[-1] += f" {piece}"
    return words
