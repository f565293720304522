"""Composing: the promised spellings, precedence, origins, folders of one's own, and the way back from a saved config."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from llmtrain.config.compose import compose_config, config_from_wire, group_options, to_yaml
from llmtrain.config.errors import ConfigError
from llmtrain.config.keys import leaves
from llmtrain.config.settle import flatten
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.plan import Availability, Machine
from llmtrain.plan.shapes import num_parameters

pytestmark = pytest.mark.usefixtures("remembered_files")

OPTIONS = [(group, option) for group, options in group_options().items() for option in options]
BACKENDS = ("reference", "sdpa", "blocked", "flash_attn", "flex")
NEEDS = {
    **{("data", kind): ["data.path=some.txt"] for kind in ("text", "jsonl", "parquet", "tokens")},
    **{("tokenizer", kind): ["tokenizer.path=some.file"] for kind in ("file", "tiktoken", "sentencepiece")},
    ("tokenizer", "ids"): ["data=synthetic", "model.vocab_size=300"],
}


@pytest.mark.parametrize("group,option", OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    composed = compose_config([f"{group}={option}", *NEEDS.get((group, option), [])])
    assert composed.groups[group] == option
    plus = compose_config([f"+{group}={option}", *NEEDS.get((group, option), [])])
    assert plus.wire == composed.wire


@pytest.mark.parametrize("group,option", OPTIONS)
def test_every_option_is_planned(group: str, option: str) -> None:
    config = compose_config([f"{group}={option}", *NEEDS.get((group, option), [])]).config
    device = "cpu" if config.launch.device == "auto" else config.launch.device
    device = "cuda" if option in ("flash_attn", "flex") else device
    machine = Machine(
        device=device,
        device_reason="",
        device_name="",
        num_devices=1,
        memory_bytes=2**44,  # the largest model preset needs 6 TiB
        cores=2,
        world_size=1,
        world_source="one process",
        bf16_native=True,
        options={f"attention.backend={backend}": Availability(True) for backend in BACKENDS},
    )
    plan = make_plan(config, machine, vocab_size=None if config.tokenizer.kind in ("byte", "bpe") else 300)
    assert plan.steps == config.train.steps and plan.num_parameters > 0
    assert plan.batch.global_batch_size == config.accumulation.global_batch_size


@pytest.mark.parametrize(
    "model,parameters",
    [("tiny", 870_016), ("tiny_gpt2", 859_136), ("small", 9_640_320), ("small_gpt2", 10_844_928)],
)
def test_presets_have_the_size_their_files_state(model: str, parameters: int) -> None:
    config = compose_config([f"model={model}"]).config
    assert num_parameters(replace(config.model, vocab_size=258)) == parameters
    stated = Path(__file__).parents[2].joinpath(f"configs/model/{model}.yaml").read_text(encoding="utf-8")
    assert f"{parameters / 1e6:.1f} M parameters" in stated


@pytest.mark.parametrize(
    "words,precision,recompute",
    [
        ("", "auto", "none"),
        ("+precision=bf16 +recompute=selective", "bf16", "selective"),
        ("precision=bf16 recompute=full", "bf16", "full"),
        ("precision=[bf16]", "bf16", "none"),
        ("++precision=bf16", "bf16", "none"),
        ("precision.kind=bf16", "bf16", "none"),
        ("+experiment=demo +precision=fp32", "fp32", "none"),
        ("experiment=demo precision=bf16 +recompute=full", "bf16", "full"),
    ],
)
def test_both_spellings_work_alone_and_beside_an_experiment(words: str, precision: str, recompute: str) -> None:
    config = compose_config(words.split()).config
    assert (config.precision, config.recompute.kind) == (precision, recompute)


def test_origins_name_the_word_or_the_line() -> None:
    composed = compose_config(["+experiment=smoke", "precision=bf16", "train.steps=7", "train.steps=9"])
    origins = composed.origins
    assert origins["train.steps"] == "command line, word 4"
    assert origins["precision.kind"] == "configs/precision/bf16.yaml:3"
    assert "train.stop_after" not in origins
    line = int(origins["data.sequence_length"].removeprefix("configs/experiment/smoke.yaml:"))
    text = Path(__file__).parents[2].joinpath("configs/experiment/smoke.yaml").read_text(encoding="utf-8").splitlines()
    assert text[line - 1] == "  sequence_length: 64"


def test_groups_tell_what_was_chosen() -> None:
    groups = compose_config(["+experiment=demo", "model=small"]).groups
    assert (groups["experiment"], groups["model"], groups["data"], groups["loss"]) == ("demo", "small", "stdlib", None)


def test_precedence_command_line_experiment_group_default(tmp_path: Path) -> None:
    """A word beats an experiment even where the experiment sets the very keys of the chosen option."""
    write(
        tmp_path,
        "experiment/mine",
        "# @package _global_\ndefaults:\n  - override /schedule: [wsd]\nschedule: {min_lr_ratio: 0.5}",
    )
    write(tmp_path, "schedule/floor", "kind: linear\nmin_lr_ratio: 0.2")
    folder = {"config_dirs": [tmp_path]}
    assert compose_config([], **folder).wire["schedule"]["kind"] == "cosine"
    assert compose_config(["experiment=mine"], **folder).wire["schedule"]["min_lr_ratio"] == 0.5
    typed = compose_config(["experiment=mine", "schedule=floor"], **folder).wire["schedule"]
    assert (typed["kind"], typed["min_lr_ratio"]) == ("linear", 0.2)
    assert compose_config(["schedule.min_lr_ratio=0.3", "experiment=mine"], **folder).wire["schedule"]["min_lr_ratio"] == 0.3


def test_a_word_replaces_the_other_key_of_a_pair_from_a_file() -> None:
    composed = compose_config(["+experiment=smoke", "train.tokens=1e4", "accumulation.global_batch_tokens=512"])
    assert (composed.config.train.steps, composed.config.train.tokens) == (None, 10_000)
    assert composed.config.accumulation.global_batch_size is None
    assert "train.steps" not in composed.origins


def test_a_word_that_takes_another_kind_retires_the_keys_of_the_old_one_from_files(tmp_path: Path) -> None:
    write(tmp_path, "experiment/mine", "# @package _global_\nschedule:\n  kind: wsd\n  decay_steps: 5\n  min_lr_ratio: 0.3")
    for word in ("schedule=cosine", "schedule.kind=cosine"):
        composed = compose_config(["+experiment=mine", word], config_dirs=[tmp_path])
        assert composed.config.schedule.decay_steps is None and "schedule.decay_steps" not in composed.origins
    with pytest.raises(ConfigError, match="only schedule=wsd reads it"):
        compose_config(["+experiment=mine", "schedule=cosine", "schedule.decay_steps=7"], config_dirs=[tmp_path])


def test_the_shipped_folder_may_be_named_again() -> None:
    folder = Path(__file__).parents[2] / "configs"
    assert compose_config(["+precision=bf16"], config_dirs=[folder, folder]).config.precision == "bf16"


def test_references_follow_the_final_value() -> None:
    words = ["train.eval_every=${checkpoint.every}", "checkpoint.every=30", "run.name=s${run.seed}-\\${x}", "+experiment=smoke"]
    wire = compose_config(words).wire
    assert (wire["train"]["eval_every"], wire["run"]["name"]) == (30, "s0-${x}")
    words = ["schedule.warmup_steps=${train.steps}", "train.steps=10", "evaluate.step=${schedule.warmup_steps}"]
    wire = compose_config(words).wire
    assert (wire["schedule"]["warmup_steps"], wire["evaluate"]["step"]) == (10, 10)


def test_references_stand_in_files_too(tmp_path: Path) -> None:
    write(tmp_path, "checkpoint/follow", "every: ${train.eval_every}")
    composed = compose_config(["checkpoint=follow", "train.eval_every=4"], config_dirs=[tmp_path])
    assert composed.config.checkpoint.every == 4
    assert composed.origins["checkpoint.every"] == f"{tmp_path}/checkpoint/follow.yaml:1"


@pytest.mark.parametrize("spelling", ["relative", "absolute", "odd name, with = and 'quotes'"])
def test_config_dirs_add_options(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(spelling) if spelling != "absolute" else tmp_path / spelling
    write(folder, "model/mine", "# saves a; costs b; changes training: yes\nnum_layers: 2")
    composed = compose_config(["+model=mine"], config_dirs=[folder])
    assert composed.config.model.num_layers == 2 and composed.groups["model"] == "mine"
    assert composed.origins["model.num_layers"] == f"{folder}/model/mine.yaml:2"
    assert group_options([folder])["model"]["mine"] == "saves a; costs b; changes training: yes"


@pytest.mark.parametrize("defaults", ["", "defaults: [train, _self_]\n", "defaults:\n  - precision: [fp32]\n  - _self_\n"])
def test_config_name_picks_another_primary_file(tmp_path: Path, defaults: str) -> None:
    write(tmp_path, "mine", defaults + "train:\n  steps: 77\nprecision:\n  kind: fp32")
    primary = {"config_name": "mine", "config_dirs": [tmp_path]}
    assert compose_config([], **primary).config.train.steps == 77
    for word in ("+precision=bf16", "precision=bf16"):
        assert compose_config([word], **primary).config.precision == "bf16"


def test_an_experiment_of_the_command_line_beats_a_primary_file_that_builds_on_train(tmp_path: Path) -> None:
    write(tmp_path, "mine", "defaults: [train, _self_]\ntrain:\n  steps: 77\n  log_every: 3\nprecision:\n  kind: fp32")
    words = ["+experiment=smoke", "precision=bf16", "train.gc_every=1"]
    config = compose_config(words, config_name="mine", config_dirs=[tmp_path]).config
    assert (config.train.steps, config.train.log_every, config.precision, config.train.gc_every) == (20, 5, "bf16", 1)


def test_an_option_can_build_on_another(tmp_path: Path) -> None:
    write(tmp_path, "model/wide", "defaults: [tiny, _self_]\ndim: 256")
    composed = compose_config(["model=wide"], config_dirs=[tmp_path])
    assert (composed.config.model.dim, composed.config.model.feed_forward.hidden_dim) == (256, 352)
    assert composed.groups["model"] == "wide"


@pytest.mark.parametrize("words", [[], ["+experiment=smoke", "run.name=1e5", "data.cache_dir=null", "optimizer.lr=1e-7"]])
def test_the_saved_config_composes_to_the_same(tmp_path: Path, words: list[str]) -> None:
    composed = compose_config(words)
    text = to_yaml(composed.wire)
    assert config_from_wire(yaml.safe_load(text)) == composed.config
    assert config_from_wire(dict(flatten(composed.wire))) == composed.config
    write(tmp_path, "config", f"format_version: 1\n{text}")  # as a run folder writes it
    again = compose_config([], config_name="config", config_dirs=[tmp_path])
    assert again.wire == composed.wire and again.config == composed.config


@pytest.mark.parametrize("name", ["1e5", "true", "null", "0x10", "1_000", "~", "12:30", "ünï", "${run.seed}"])
def test_text_survives_the_saved_config(name: str) -> None:
    wire = compose_config([]).wire
    wire["generate"]["prompt"] = name
    assert config_from_wire(yaml.safe_load(to_yaml(wire))).generate.prompt == name


def test_a_saved_config_is_checked_like_any_other() -> None:
    wire = compose_config([]).wire
    wire["train"]["steps"], wire["model"]["n_layers"], wire["train"]["stop_after"], wire["new"] = 10.0, 3, 2000, {"a": 1}
    with pytest.raises(ConfigError) as caught:
        config_from_wire(wire)
    report = str(caught.value)
    assert "train.steps=10.0" in report and "model.n_layers=3" in report and "model.num_layers" in report and "new" in report
    del wire["new"], wire["model"]["n_layers"]
    wire["train"].update(steps=1000, tokens=5)
    with pytest.raises(ConfigError, match="both say how long"):
        config_from_wire(wire)


def test_a_saved_config_of_an_older_version_gets_the_new_defaults() -> None:
    wire = compose_config([]).wire
    del wire["generate"]["top_p"], wire["profile"]
    assert config_from_wire(wire) == compose_config([]).config


def test_the_wire_holds_every_key_as_plain_values() -> None:
    flat = dict(flatten(compose_config([]).wire))
    assert list(flat) == list(leaves())
    assert all(type(value) in (int, float, bool, str, list, dict, type(None)) for value in flat.values())


def test_composing_leaves_no_trace(tmp_path: Path) -> None:
    """From a folder elsewhere, in a fresh process: nothing printed, nothing written, no change of folder."""
    program = (
        "import os, sys, warnings; warnings.simplefilter('error'); before = os.getcwd(), dict(os.environ)\n"
        "from llmtrain.config.compose import compose_config\n"
        "assert compose_config(['+precision=bf16']).config.precision == 'bf16'\n"
        "assert before == (os.getcwd(), dict(os.environ)) and 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
