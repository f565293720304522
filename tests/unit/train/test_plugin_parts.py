"""What plugins make is what runs: attention, optimizer, loss and tracker of docs/plugins.md, trained through the composed config."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.example_plugin import forget_plugins, install, install_page, on_the_path
from helpers.runs import assert_same_training, records, run, saved
from helpers.scripts import ROOT
from helpers.tiny import MACHINE

import llmtrain
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError, DataError, ExitCode, PlanError
from llmtrain.config.typed import PluginLoss, ReferenceLoss
from llmtrain.data.corpus import build_corpus
from llmtrain.model.init import materialize
from llmtrain.model.transformer import Transformer
from llmtrain.ops.cross_entropy import build_loss, build_score
from llmtrain.plan.make_plan import make_plan
from llmtrain.plan.precision import PRECISION_TABLES
from llmtrain.train.convert import export_run
from llmtrain.train.machine import detect_machine
from llmtrain.train.saved_run import evaluate_run

WORDS = (
    "data=synthetic",
    "data.sequence_length=16",
    "model.dim=32",
    "model.num_layers=2",
    "precision.kind=fp32",
    "launch.device=cpu",
    "launch.threads=1",
    "accumulation.global_batch_size=4",
    "train.eval_every=0",
    "train.log_every=100",
)
TEMPERED = ("attention=tempered", "attention.tempered.temperature=2")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_page(tmp_path_factory.mktemp("site"))


@pytest.fixture(autouse=True)
def extras(site: Path) -> Iterator[None]:
    """The package of docs/plugins.md is installed."""
    threads = torch.get_num_threads()
    with on_the_path(site):
        yield
    torch.set_num_threads(threads)


def trained(runs: Path, name: str, *words: str) -> Path:
    """The folder of a run that was trained to its end."""
    code, told = run(*WORDS, f"run.dir={runs}", f"run.name={name}", *words)
    assert code is ExitCode.DONE, told
    return runs / name


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder)]


class TestAttention:
    def test_it_is_what_attends(self, tmp_path: Path) -> None:
        """Temperature 1 is plain attention, another is not."""
        plain = losses(trained(tmp_path, "plain", "train.steps=4", "attention=reference"))
        same = losses(trained(tmp_path, "same", "train.steps=4", "attention=tempered"))
        cool = losses(trained(tmp_path, "cool", "train.steps=4", *TEMPERED))
        assert same == pytest.approx(plain, rel=1e-6)
        assert cool != pytest.approx(plain, rel=1e-6)

    def test_it_is_told_every_mask(self) -> None:
        """Documents, a window, grouped heads and decoding after a cache: the same hidden states as those of `reference`."""
        words = ["model.attention.num_kv_heads=2", "model.attention.window=3", "model.attention.window_pattern=SL"]
        config = make_plan(compose_config([*WORDS, *words]).config, MACHINE).model
        tokens = torch.randint(0, 258, (2, 16), generator=torch.Generator().manual_seed(1))
        documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 4 + [-1] * 3])
        outputs = []
        for backend in ("reference", "tempered"):
            model = Transformer(config, PRECISION_TABLES["fp32"], backend)
            materialize(model, seed=0, device="cpu")
            outputs.append((model(tokens), model(tokens, document_ids=documents)))
        for ours, theirs in zip(*outputs, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_a_run_is_resumed_scored_and_sampled_from(self, tmp_path: Path) -> None:
        words = ("train.steps=6", "train.eval_every=6", *TEMPERED)
        whole = trained(tmp_path, "whole", *words)
        trained(tmp_path, "halves", *words, "train.stop_after=3")
        assert_same_training(trained(tmp_path, "halves", *words), whole)
        scored = evaluate_run(whole, compose_config(["launch.device=cpu", "launch.threads=1"]), lambda _: None)
        assert scored["loss"] == pytest.approx(records(whole)[-1]["val_loss"], rel=1e-6)
        loaded = llmtrain.load_run(whole, device="cpu", threads=1)
        assert loaded.plan.attention_backend == "tempered" and loaded.plan.attention_options.temperature == 2
        with pytest.raises(ConfigError, match="no class of the transformers library computes"):
            export_run(whole, tmp_path / "exported", compose_config([]).config.convert, lambda _: None)
        with pytest.raises(ConfigError, match="run.on_change=continue"):
            trained(tmp_path, "whole", *words, "train.steps=6", "attention.tempered.temperature=3")

    def test_the_card_and_the_environment_name_the_package(self, tmp_path: Path) -> None:
        words = ("train.steps=1", f"run.dir={tmp_path}", "run.name=told", *TEMPERED, "optimizer=signum", "tracker=losses")
        _, told = run(*WORDS, *words)
        told = " ".join(told.split())
        used = "tracker.losses, optimizer.signum, attention.tempered (llmtrain-extras 0.1)"
        assert f"plugins {used}; forecast as for adamw, reference" in told
        environment = json.loads((tmp_path / "told" / "environment.json").read_text())
        assert environment["packages"]["llmtrain-extras"] == "0.1"
        plan = json.loads((tmp_path / "told" / "plan.json").read_text())
        assert plan["attention_options"] == {"temperature": 2.0}


def test_the_optimizer_makes_the_update(tmp_path: Path) -> None:
    """The first update of signed momentum moves every weight by lr, after it shrank by lr × weight_decay where it is a matrix."""
    lr, decay = 1e-3, 0.5
    words = ("optimizer=signum", f"optimizer.lr={lr}", f"optimizer.weight_decay={decay}", "schedule=constant")
    folder = trained(tmp_path, "a", "train.steps=1", *words)
    config = compose_config([*WORDS, *words]).config
    plan = make_plan(config, MACHINE)
    start = Transformer(plan.model, plan.precision, "reference")
    materialize(start, seed=0, device="cpu")
    after = saved(folder).tensors
    assert {name for name in after if name.startswith("optimizer/")} == {
        f"optimizer/average/{name}" for name, _ in start.named_parameters()
    }
    for name, weight in start.named_parameters():
        shrunk = weight.detach() * (1 - lr * (decay if weight.ndim >= 2 else 0))
        average = after[f"optimizer/average/{name}"]
        torch.testing.assert_close(after[f"model/{name}"], shrunk - lr * average.sign())
        assert average.count_nonzero() > 0
    halves = ("train.steps=4", *words)
    whole = trained(tmp_path, "whole", *halves)
    trained(tmp_path, "halves", *halves, "train.stop_after=2")
    assert_same_training(trained(tmp_path, "halves", *halves), whole)


class TestLoss:
    def test_it_is_what_is_trained_on(self, tmp_path: Path) -> None:
        """Validation is scored as ever: with a learning rate of next to nothing both runs keep the weights they began with."""
        words = ("train.steps=2", "train.eval_every=2", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "model.init_std=0.5")
        plain = records(trained(tmp_path, "plain", *words))
        smoothed = records(trained(tmp_path, "smoothed", *words, "loss=smoothed", "loss.smoothed.smoothing=0.5"))
        none = records(trained(tmp_path, "none", *words, "loss=smoothed", "loss.smoothed.smoothing=0"))
        assert [record["loss"] for record in none] == pytest.approx([record["loss"] for record in plain], rel=1e-6)
        assert abs(smoothed[0]["loss"] - plain[0]["loss"]) > 1e-2
        assert smoothed[-1]["val_loss"] == pytest.approx(plain[-1]["val_loss"], rel=1e-6)
        scored = evaluate_run(tmp_path / "smoothed", compose_config(["launch.device=cpu", "launch.threads=1"]), lambda _: None)
        assert scored["loss"] == pytest.approx(plain[-1]["val_loss"], rel=1e-6)

    def test_it_is_the_formula(self) -> None:
        """(1 - s) × cross-entropy + s × mean of -log p over the vocabulary."""
        generator = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(11, 8, generator=generator)
        targets = torch.tensor([1, 4, -100, 10, 0, 3])
        options = compose_config(["loss=smoothed", "loss.smoothed.smoothing=0.3"]).config.plugins["loss.smoothed"]
        precision = PRECISION_TABLES["fp32"]
        minus_log = -(hidden @ weight.T).log_softmax(-1)[targets >= 0]
        plain = minus_log.gather(1, targets[targets >= 0, None]).sum()
        expected = 0.7 * plain + 0.3 * minus_log.mean(-1).sum()
        chosen = PluginLoss("smoothed", options)
        torch.testing.assert_close(build_loss(chosen, precision)(hidden, weight, targets), expected)
        torch.testing.assert_close(build_score(chosen, precision)(hidden, weight, targets), plain)
        torch.testing.assert_close(build_loss(ReferenceLoss(), precision)(hidden, weight, targets), plain)


def test_the_tracker_is_sent_every_record(tmp_path: Path) -> None:
    words = ("train.steps=4", "tracker=losses", "tracker.losses.file=curve.csv")
    trained(tmp_path, "a", *words, "train.stop_after=2")
    folder = trained(tmp_path, "a", *words)
    lines = [line.split(",") for line in (folder / "curve.csv").read_text().splitlines()]
    assert [int(step) for step, _ in lines] == [1, 2, 3, 4]
    assert [float(loss) for _, loss in lines] == losses(folder)


class TestData:
    WORDS = ("data=sums", *WORDS[1:], "data.packing=padded", "tokenizer=byte", "prepare.workers=1")

    def trained(self, runs: Path, name: str, *words: str) -> Path:
        code, told = run(*self.WORDS, f"run.dir={runs}", f"data.cache_dir={runs / 'cache'}", f"run.name={name}", *words)
        assert code is ExitCode.DONE, told
        return runs / name

    def test_its_documents_are_what_is_read(self, tmp_path: Path) -> None:
        words = ("data.sums.largest=3", "train.steps=4")
        folder = self.trained(tmp_path, "a", *words)
        (written,) = (tmp_path / "cache" / "plugins").glob("sums-*")
        train = [json.loads(line)["text"] for line in (written / "sums.jsonl").read_text().splitlines()]
        validation = [json.loads(line)["text"] for line in (written / "sums-validation.jsonl").read_text().splitlines()]
        assert validation == ["0 + 0 = 0"] and len(train) == 15 and train[0] == "0 + 1 = 1"
        config = compose_config([*self.WORDS, *words, f"data.cache_dir={tmp_path / 'cache'}"]).config
        corpus = build_corpus(config.data, config.tokenizer, seed=0, vocab_size=None, progress=lambda _: None)
        (batch,) = corpus.validation.batches(8, None)
        assert corpus.tokenizer.decode(batch.tokens[0].tolist()).startswith("0 + 0 = 0")
        assert losses(folder)[0] > 0

    def test_a_run_goes_on_when_its_documents_are_written_again(self, tmp_path: Path) -> None:
        words = ("train.steps=4",)
        whole = self.trained(tmp_path / "one", "whole", *words)
        self.trained(tmp_path / "two", "halves", *words, "train.stop_after=2")
        shutil.rmtree(tmp_path / "two" / "cache")
        assert_same_training(self.trained(tmp_path / "two", "halves", *words), whole)

    def test_other_options_are_other_documents(self, tmp_path: Path) -> None:
        for largest in (2, 3):
            self.trained(tmp_path, f"run-{largest}", f"data.sums.largest={largest}", "train.steps=1")
        assert len(list((tmp_path / "cache" / "plugins").glob("sums-*"))) == 2

    def test_other_code_is_other_documents(self, tmp_path: Path) -> None:
        for word in ("ape", "bear"):
            texts = f"[f'{word} {{number}}' for number in range(40)]"
            code = f"make('data', lambda options: lambda split: None if split == 'validation' else {texts})"
            with on_the_path(install_one(tmp_path / word, "changing_data", code)):
                sys.modules.pop("changing_data", None)
                forget_plugins()
                self.trained(tmp_path, f"run-{word}", "train.steps=1", "data.kind=mine", "data.validation_fraction=0.5")
        files = (tmp_path / "cache" / "plugins").glob("mine-*/mine.jsonl")
        assert {json.loads(file.read_text().splitlines()[0])["text"] for file in files} == {"ape 0", "bear 0"}

    @pytest.mark.parametrize(
        "code,rule",
        [
            ("lambda options: lambda split: [b'bytes']", "own-package 3 yields a bytes as document 1"),
            ("lambda options: lambda split: open('/no/such/file')", "own-package 3 cannot read its documents"),
        ],
    )
    def test_what_is_no_text_is_a_data_error(self, code: str, rule: str, tmp_path: Path) -> None:
        own = install_one(tmp_path / "own", f"bad_data_{len(rule)}", f"make('data', {code})")
        with on_the_path(own), pytest.raises(DataError, match=rule):
            self.trained(tmp_path, "a", "data.kind=mine", "train.steps=1")
        assert not list((tmp_path / "cache" / "plugins").glob("mine-*"))


HEAD = """from llmtrain.plugins import Plugin
def raising(error):
    def build(*given):
        raise error
    return build
def make(group, build, **changes):
    return Plugin(group=group, name="mine", summary="saves a; costs b; changes training: no", build=build, **changes)
"""


def install_one(folder: Path, module: str, code: str) -> Path:
    return install(folder, "own-package", "3", {"mine": f"{module}:plugin"}, {f"{module}.py": f"{HEAD}plugin = {code}\n"})


@pytest.mark.parametrize("group", ["attention", "optimizer", "loss"])
def test_a_plugin_that_needs_what_is_not_there_is_a_config_error(group: str, tmp_path: Path) -> None:
    own = install_one(tmp_path / "own", f"needy_{group}", f"make('{group}', raising(ImportError('no fastlib')))")
    with on_the_path(own), pytest.raises(ConfigError) as caught:
        trained(tmp_path, "a", "train.steps=1", f"{group}=mine")
    assert "own-package 3" in str(caught.value) and "no fastlib" in str(caught.value)


@pytest.mark.parametrize(
    "group,returned,rule",
    [
        ("attention", "7", "made a int and not a function"),
        ("loss", "7", "made a int and not a function"),
        ("optimizer", "7", "made a int without step, zero_grad, state"),
    ],
)
def test_a_plugin_that_makes_something_else_is_a_config_error(group: str, returned: str, rule: str, tmp_path: Path) -> None:
    own = install_one(tmp_path / "own", f"odd_{group}", f"make('{group}', lambda *given: {returned})")
    with on_the_path(own), pytest.raises(ConfigError, match=rule):
        trained(tmp_path, "a", "train.steps=1", f"{group}=mine")


def test_a_fault_of_a_plugin_names_it(tmp_path: Path) -> None:
    own = install_one(tmp_path / "own", "faulty_one", "make('loss', raising(ZeroDivisionError('oh')))")
    with on_the_path(own), pytest.raises(ZeroDivisionError) as caught:
        trained(tmp_path, "a", "train.steps=1", "loss=mine")
    assert (
        "raised by the plugin of own-package 3, entry point mine = faulty_one:plugin in llmtrain.plugins"
        in caught.value.__notes__
    )


def test_a_tracker_that_fails_ends_no_training(tmp_path: Path) -> None:
    own = install_one(tmp_path / "own", "failing_tracker", "make('tracker', raising(OSError('no server')))")
    with on_the_path(own):
        folder = trained(tmp_path, "a", "train.steps=2", "tracker=mine")
    assert len(records(folder)) == 2


@pytest.mark.parametrize("group", ["attention", "optimizer", "loss"])
def test_a_plugin_runs_where_it_says(group: str, tmp_path: Path) -> None:
    own = install_one(tmp_path / "own", f"cuda_only_{group}", f"make('{group}', print, devices=('cuda',))")
    with on_the_path(own):
        config = compose_config([*WORDS, f"{group}=mine"]).config
        with pytest.raises(PlanError, match="runs on cuda, not on cpu"):
            make_plan(config, detect_machine(config.launch))
        if group == "attention":
            # Another backend would give other results: it does not stand in, not even to look at a trained model.
            with pytest.raises(PlanError, match="runs on cuda, not on cpu"):
                make_plan(config, detect_machine(config.launch), training=False)


def test_attention_weights_are_not_dropped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only attention=reference drops attention weights"):
        compose_config([*WORDS, *TEMPERED, "model.dropout.attention=0.1"])


def test_the_story_from_the_command_line(site: Path, tmp_path: Path) -> None:
    """Install, train, stop, resume with nothing but the name; without the package the run is refused by name."""

    def type_in(*words: str, path: Path | None) -> subprocess.CompletedProcess[str]:
        folders = os.pathsep.join(str(folder) for folder in (path, ROOT) if folder is not None)
        environment = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "llmtrain", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    words = (*WORDS, "run.name=story", "train.steps=4", *TEMPERED)
    assert type_in(*words, "train.stop_after=2", path=site).returncode == 0
    resumed = type_in(*words, path=site)
    assert resumed.returncode == 0 and "4 of 4 steps" in resumed.stdout
    assert type_in("evaluate", "runs/story", path=site).returncode == 0
    shown = type_in("doctor", path=site)
    assert shown.returncode == 0 and "tempered" in shown.stdout
    refused = type_in("evaluate", "runs/story", path=None)
    assert refused.returncode == ExitCode.CONFIG and "no package here registers tempered for attention" in refused.stderr
    assert math.isfinite(losses(tmp_path / "runs" / "story")[-1])
