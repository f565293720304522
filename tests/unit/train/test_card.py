"""What the card and the last lines of a run say, and what a run on plain ids offers to type."""

from __future__ import annotations

import io
import json
import math
import shlex
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.runs import SMALL, write_text
from helpers.tiny import MACHINE, config_of, plan_of

from llmtrain.config.compose import compose_config
from llmtrain.data.tokenizer import IdTokenizer
from llmtrain.metrics.console import PlainConsole, Row
from llmtrain.metrics.throughput import PeakFlops
from llmtrain.train import run_start
from llmtrain.train.build import train
from llmtrain.train.card import card_rows, done_lines, next_commands
from llmtrain.train.forward_backward import rows_told
from llmtrain.train.saved_run import evaluate_run, generate_text
from llmtrain.train.state import TrainState
from llmtrain.train.trainer import Trainer


def trained(folder: Path, *words: str, width: int = 120) -> str:
    """What the run `a` below the folder printed."""
    stream = io.StringIO()
    with closing(PlainConsole(stream, width)) as console:
        train(compose_config([*words, "train.steps=1", f"run.dir={folder}", "run.name=a"]), console)
    return stream.getvalue()


def rows(keys: dict[str, Any] | None = None) -> dict[str, Row]:
    config = config_of(keys)
    corpus: Any = SimpleNamespace(summary="text")
    found = card_rows(config, plan_of(config), MACHINE, corpus, PeakFlops(1e12, "measured"), "llmtrain run.name=a")
    return {row.label: row for row in found}


def test_attention_has_a_row_of_its_own_with_its_reason() -> None:
    named, chosen = rows(), rows({"attention.backend": "auto", "attention.kernel": "auto"})
    assert named["attention"].text == "reference"
    assert chosen["attention"].text.startswith("reference (auto: ") and chosen["attention"].cut_last
    assert "attention.backend" not in chosen.get("chosen", Row("", "")).text


def test_a_named_kernel_is_shown() -> None:
    assert rows({"attention.backend": "sdpa", "attention.kernel": "math"})["attention"].text == "sdpa · math"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, ""),
        ({"model.attention.window": 16}, "· window 16 ·"),
        ({"model.attention.window": 16, "model.attention.window_pattern": "SL"}, "· window 16 SL ·"),
        (
            {
                "model.position": "rotary",
                "model.rope.scaling.kind": "yarn",
                "model.rope.scaling.factor": 4.0,
                "model.rope.scaling.original_max_positions": 16,
            },
            "rotary, yarn × 4 from 16,",
        ),
        (
            {"model.position": "rotary", "model.rope.scaling.kind": "linear", "model.rope.scaling.factor": 2.5},
            "rotary, linear × 2.5,",
        ),
    ],
)
def test_the_model_row_tells_windows_and_scaling(keys: dict[str, Any], told: str) -> None:
    text = rows(keys)["model"].text
    assert told in text and ("window" in text) == ("window" in told) and ("×" in text.split("norm")[1]) == ("×" in told)


@pytest.mark.parametrize(("skipped", "told"), [(0, "no batch skipped"), (1, "1 batch skipped"), (2, "2 batches skipped")])
def test_what_was_skipped_are_batches(skipped: int, told: str) -> None:
    state = TrainState()
    state.skipped = skipped
    corpus: Any = None
    lines = done_lines(
        plan_of(config_of()), corpus, state, seconds=1.0, tokens_per_second=1.0, val_loss=None, measured_peak_bytes=None
    )
    assert told in lines[1].split(" · ")


@pytest.mark.parametrize(("vocab_size", "prompt"), [(64, "1 2 3"), (2, "1"), (1, "0")])
def test_runs_on_ids_are_prompted_with_numbers(vocab_size: int, prompt: str) -> None:
    config = compose_config(["data=text", "data.path=x"]).config
    tokenizer = IdTokenizer(vocab_size)
    command = next_commands(config, Path("runs/a"), tokenizer)[0]
    assert shlex.split(command)[-1] == f"generate.prompt={prompt}"
    assert tokenizer.encode(prompt).size


@pytest.fixture(scope="module")
def ids_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    np.random.default_rng(0).integers(0, 50, 4000).astype("<u2").tofile(folder / "train.bin")
    words = [word for word in SMALL if word != "data=text"]
    words += ["data=tokens", f"data.path={folder}/train.bin", "tokenizer=ids", "model.vocab_size=50"]
    trained(folder, *words)
    return folder / "a"


@pytest.mark.parametrize("prompt", ["1 2 3", "1 2 3 "])
def test_the_first_number_written_is_kept_from_the_last_of_the_prompt(ids_run: Path, prompt: str) -> None:
    config = compose_config([f"generate.prompt='{prompt}'", "generate.max_tokens=4", "generate.temperature=0"]).config
    text = prompt + "".join(generate_text(ids_run, config))
    assert text.startswith("1 2 3 ") and len(text.split()) == 7 and "  " not in text


def test_commands_of_trackers_come_last_whole_and_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "texts")
    note = "wandb sync " + str(tmp_path) + "/long" * 20
    trackers = SimpleNamespace(log=lambda record: None, finish=lambda: None, notes=lambda: [note])
    monkeypatch.setattr(run_start, "open_trackers", lambda *args, **keys: trackers)
    printed = trained(tmp_path, *SMALL, f"data.path={tmp_path}/texts", width=80)
    last = printed[printed.index("\nnext  ") :].replace("\\\n", " ").split()
    assert last[-3:] == note.split() and printed.count("sync") == 1


def test_commands_of_trackers_are_told_after_a_failure_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Trainer) -> None:
        raise RuntimeError("planted")

    write_text(tmp_path / "texts")
    trackers = SimpleNamespace(log=lambda record: None, finish=lambda: None, notes=lambda: ["wandb sync there"])
    monkeypatch.setattr(run_start, "open_trackers", lambda *args, **keys: trackers)
    monkeypatch.setattr(Trainer, "fit", fail)
    stream = io.StringIO()
    with closing(PlainConsole(stream)) as console, pytest.raises(RuntimeError, match="planted"):
        train(compose_config([*SMALL, f"data.path={tmp_path}/texts", f"run.dir={tmp_path}", "run.name=a"]), console)
    assert stream.getvalue().splitlines()[-1] == "next  wandb sync there"


def test_the_bytes_of_a_token_are_kept_for_sweeps(tmp_path: Path) -> None:
    write_text(tmp_path / "texts")
    trained(tmp_path, *SMALL, f"data.path={tmp_path}/texts")
    kept = json.loads((tmp_path / "a" / "environment.json").read_text())["bytes_per_token"]
    shown: list[str] = []
    result = evaluate_run(tmp_path / "a", compose_config(["evaluate.batch_size=1"]), shown.append)
    assert result["loss"] / math.log(2) / kept == pytest.approx(result["bits_per_byte"])
    scoring = [text for text in shown if " rows, " in text]
    assert len(scoring) > 1 and scoring[-1].split(": ")[1].startswith(f"{len(scoring)} of {len(scoring)} rows, 0:00 left")


def test_time_left_is_that_of_the_rows_to_come() -> None:
    shown: list[str] = []
    now = [10.0]
    tell = rows_told(shown.append, 4000, clock=lambda: now[0])
    now[0] = 20.0
    tell(1000)
    assert shown == ["scoring the validation text: 1,000 of 4,000 rows, 0:30 left"]
