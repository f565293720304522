"""Sweeps: how jobs are laid out, run, stopped and summed up. Jobs are played by stubs, except where processes are what is tested."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import ROOT

from llmtrain.cli import sweep as sweep_module
from llmtrain.cli.arguments import parse_arguments
from llmtrain.cli.dispatch import dispatch
from llmtrain.cli.sweep import job_suffix, lay_out, quoted, run_jobs, run_process
from llmtrain.cli.sweep_table import table
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ConfigError
from llmtrain.metrics.sinks import TAIL_BYTES
from llmtrain.train.run_lock import RunLock

GRID = ["-m", "+precision=fp32,bf16", "optimizer.lr=0.001,0.01", "run.name=grid"]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def played(codes: Sequence[int], losses: Sequence[float | None], calls: list[Sequence[str]]) -> Callable[..., int]:
    """A runner that writes what a job would leave behind."""

    def runner(command: Sequence[str], log: Path, noted: Sequence[int], tick: Callable[[str], None]) -> int:
        number = len(calls)
        calls.append(command)
        config = compose_config(
            command[4:] if not command[4].startswith("--") else [w for w in command[4:] if not w.startswith("--")]
        )
        folder = Path(config.config.run.dir) / str(config.config.run.name)
        folder.mkdir(parents=True)
        tick("")
        log.write_text("loading\nerror: out of luck\n  rule  none\n")
        if losses[number] is not None:
            records = [
                {"step": 1, "loss": 3.0, "tokens_per_second": 100.0, "peak_memory_bytes": 5 * 2**20, "val_loss": 9.0},
                {
                    "step": 2,
                    "loss": 2.0,
                    "tokens_per_second": 300.0,
                    "peak_memory_bytes": 4 * 2**20,
                    "val_loss": losses[number],
                },
                {"step": 3, "loss": 2.0, "tokens_per_second": 200.0, "peak_memory_bytes": 4 * 2**20},
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return codes[number]

    return runner


def test_jobs_are_every_combination_in_folders_of_their_own() -> None:
    sweep = lay_out(parse_arguments(GRID))
    assert sweep.folder == Path("runs/grid")
    assert sweep.names == (
        "0-precision-fp32-optimizer.lr-0.001",
        "1-precision-fp32-optimizer.lr-0.01",
        "2-precision-bf16-optimizer.lr-0.001",
        "3-precision-bf16-optimizer.lr-0.01",
    )
    for name, command in zip(sweep.names, sweep.commands, strict=True):
        assert command[:4] == (sys.executable, "-m", "llmtrain", "train")
        parsed = parse_arguments(command[3:])
        assert parsed.config_name == "train" and not parsed.multirun
        run = compose_config(parsed.words).config.run
        assert (Path(run.dir), run.name) == (sweep.folder, name)
        assert [word for word in parsed.words if word.startswith("run.name")] == [f"run.name={name}"]
    assert compose_config(parse_arguments(sweep.commands[3][3:]).words).config.optimizer.lr == 0.01


def test_own_config_folders_reach_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    (tmp_path / "mine" / "optimizer" / "slow.yaml").write_text("# saves nothing\nlr: 1e-5\n")
    sweep = lay_out(parse_arguments(["-m", "--config-dir", "mine", "optimizer=slow", "run.seed=1,2"]))
    parsed = parse_arguments(sweep.commands[0][3:])
    assert compose_config(parsed.words, config_dirs=parsed.config_dirs).config.optimizer.lr == 1e-5
    assert sweep.folder.parent == Path("runs") and "-sweep-" in sweep.folder.name


def test_folder_names_can_be_typed_and_stay_short() -> None:
    assert "=" not in job_suffix({"a.b": "x=y z/..", "c": "[1,2]"}) and "/" not in job_suffix({"a": "x/y"})
    assert len(job_suffix({"key": "v" * 500})) <= 80
    for text in ("a,b", "it's", "x=y", "runs/täglich"):
        assert compose_config([f"run.dir={quoted(text)}"]).config.run.dir == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run.name=a,b"], "run.name swept"),
        (["run.dir=a,b"], "run.dir swept"),
        (["output=table,json"], "output swept"),
        (["train.stesp=1,2"], "train.steps"),
        (["optimizer.lr=-1,-2"], "optimizer.lr=-1"),
    ],
)
def test_a_mistake_in_every_job_stops_the_sweep_before_the_first(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        lay_out(parse_arguments(["-m", *words]))
    assert not Path("runs").exists()


def test_one_illegal_combination_is_left_to_its_job() -> None:
    assert len(lay_out(parse_arguments(["-m", "optimizer.lr=-1,0.1"])).jobs) == 2


def test_a_sweep_inside_a_multi_process_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
        lay_out(parse_arguments(GRID))


def test_a_failing_job_is_a_row_and_not_the_end() -> None:
    calls: list[Sequence[str]] = []
    progress = io.StringIO()
    sweep = lay_out(parse_arguments(GRID))
    results, stopped = run_jobs(sweep, played([0, 2, 0, 78], [1.5, None, 1.25, None], calls), progress)
    assert len(calls) == 4 and not stopped
    assert [result.exit_code for result in results] == [0, 2, 0, 78]
    assert results[1].reason == "out of luck: none" and results[0].reason == ""
    assert (results[0].tokens_per_second, results[0].peak_memory_bytes, results[0].steps) == (200.0, 5 * 2**20, 3)
    lines = table(results)
    assert lines[0].split() == ["precision", "optimizer.lr", "val", "loss", "tok/s", "peak", "MiB", "seconds", "ended"]
    assert lines[1].split()[:5] == ["bf16", "0.001", "1.2500", "200", "5"]
    assert lines[2].split()[:3] == ["fp32", "0.001", "1.5000"]
    assert lines[3].split()[:3] == ["fp32", "0.01", "–"] and lines[3].endswith("exit 2: out of luck: none")
    assert all(f"{number}/4  precision=" in progress.getvalue() for number in (1, 2, 3, 4))


@pytest.mark.parametrize(("codes", "code"), [([0, 0, 0, 0], 0), ([0, 1, 0, 0], 1)])
def test_exit_code_csv_and_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], codes: list[int], code: int
) -> None:
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(sweep_module, "run_process", played(codes, [1.0, 2.0, 3.0, 4.0], calls))
    assert dispatch([*GRID, "output=json"]) == code
    out, err = capsys.readouterr()
    jobs = json.loads(out)["jobs"]
    assert [job["val_loss"] for job in jobs] == [1.0, 2.0, 3.0, 4.0] and jobs[3]["precision"] == "bf16"
    assert "1/4" in err and "saved  runs/grid/sweep.csv" in err
    rows = list(csv.DictReader(Path("runs/grid/sweep.csv").open()))
    assert [row["optimizer.lr"] for row in rows] == ["0.001", "0.01", "0.001", "0.01"]
    assert [row["exit_code"] for row in rows] == [str(number) for number in codes]
    assert not any(word.startswith("output=") for command in calls for word in command)


def test_a_job_that_was_told_to_stop_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Sequence[str]] = []
    monkeypatch.setattr(sweep_module, "run_process", played([0, 75], [1.0, 2.0], calls))
    assert dispatch(GRID) == 75
    assert len(calls) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "go on  the same command with run.name=grid"


def test_a_folder_that_cannot_be_made_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").write_text("in the way")
    assert dispatch(GRID) == 74
    assert "error: cannot write runs/grid" in capsys.readouterr().err


def test_a_second_sweep_in_the_folder_of_a_running_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/grid")
    folder.mkdir(parents=True)
    with RunLock(folder):
        assert dispatch(GRID) == 74
    assert "is in use" in capsys.readouterr().err and not (folder / "logs").exists()


def test_the_document_is_json_whatever_the_losses_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_module, "run_process", played([0] * 4, [math.nan, math.inf, -math.inf, 1.0], []))
    assert dispatch([*GRID, "output=json"]) == 0

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    jobs = json.loads(capsys.readouterr().out, parse_constant=refuse)["jobs"]
    assert [job["val_loss"] for job in jobs] == ["NaN", "Infinity", "-Infinity", 1.0]


def test_a_home_folder_in_run_dir_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sweep = lay_out(parse_arguments([*GRID, "run.dir=~/rr"]))
    assert sweep.folder == tmp_path / "home" / "rr" / "grid"
    with pytest.raises(ConfigError, match="run.dir=~nosuchuser/rr"):
        lay_out(parse_arguments([*GRID, "run.dir=~nosuchuser/rr"]))


def test_a_sweep_waits_without_torch() -> None:
    code = "import sys, llmtrain.cli.sweep; sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_process_writes_its_log_and_returns_its_code(tmp_path: Path) -> None:
    ticks: list[str] = []
    # A process group of its own: Ctrl-C on the terminal must reach the job once, by way of the sweep.
    script = (
        "import os, sys, time; print(os.getpgid(0) == os.getpid()); print('err', file=sys.stderr); time.sleep(1.2); sys.exit(7)"
    )
    assert run_process([sys.executable, "-c", script], tmp_path / "log", [], ticks.append) == 7
    assert set((tmp_path / "log").read_text().split()) == {"True", "err"}
    assert ticks and not any(ticks)


SAVING_JOB = """
import signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
print("ready", flush=True)
while not got:
    time.sleep(0.02)
print("saving", flush=True)
time.sleep(2)
print("saved", *got, flush=True)
sys.exit(75)
"""


def strike(log: Path, blows: Sequence[tuple[str, signal.Signals]]) -> threading.Thread:
    """A thread that signals this process each time the log holds the word."""

    def work() -> None:
        for word, number in blows:
            while not log.exists() or word not in log.read_text():
                time.sleep(0.02)
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # two signals of a kind at once are one

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture
def handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.usefixtures("handlers_restored")
@pytest.mark.parametrize(
    ("blows", "passed_on"),
    [
        (["SIGINT"], ["SIGINT"]),
        (["SIGTERM"], ["SIGTERM"]),
        (["SIGUSR1"], ["SIGUSR1"]),
        (["SIGINT", "SIGINT", "SIGINT"], ["SIGINT"]),
        (["SIGINT", "SIGTERM", "SIGINT", "SIGTERM"], ["SIGINT", "SIGTERM"]),
    ],
)
def test_signals_stop_the_sweep_after_the_running_job_and_reach_it_once_a_kind(
    monkeypatch: pytest.MonkeyPatch, blows: list[str], passed_on: list[str]
) -> None:
    """A second Ctrl-C would tell the job not to save."""
    sweep = lay_out(parse_arguments(GRID))
    command = (sys.executable, "-c", SAVING_JOB)
    log = sweep.folder / "logs" / f"{sweep.names[0]}.log"
    first, *others = (signal.Signals[name] for name in blows)
    thread = strike(log, [("ready", first), *(("saving", number) for number in others)])
    screen = io.StringIO()
    results, stopped = run_jobs(replace(sweep, commands=(command,) * 4), run_process, screen)
    thread.join()
    assert stopped and [result.exit_code for result in results] == [75]
    assert log.read_text().split() == ["ready", "saving", "saved", *passed_on]
    assert screen.getvalue().count("told to stop, saving first (kill -KILL ") >= 1


@pytest.mark.usefixtures("handlers_restored")
def test_a_signal_between_two_jobs_stops_the_sweep() -> None:
    calls: list[Sequence[str]] = []
    runner = played([0, 0, 0, 0], [1.0, 2.0, 3.0, 4.0], calls)

    def struck(*arguments: Any) -> int:
        code = runner(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return code

    results, stopped = run_jobs(lay_out(parse_arguments(GRID)), struck, io.StringIO())
    assert stopped and len(results) == len(calls) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_a_job_that_is_rewritten() -> None:
    calls: list[Sequence[str]] = []
    screen = Terminal()
    run_jobs(lay_out(parse_arguments(GRID)), played([0, 0, 0, 0], [1.0, 2.0, 3.0, 4.0], calls), screen)
    assert screen.getvalue().count("\n") == 4 and "\r\x1b[K1/4" in screen.getvalue()


def test_plain_progress_comes_after_three_seconds_and_then_more_rarely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]
    monkeypatch.setattr(sweep_module.time, "monotonic", lambda: clock[0])
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "loss": "NaN"}\n')
    stream = io.StringIO()
    progress = sweep_module._JobProgress("1/1", tmp_path, stream)
    said = []
    for second in range(1, 601):
        clock[0] = float(second)
        before = len(stream.getvalue())
        progress.tick("")
        if len(stream.getvalue()) > before:
            said.append(second)
    assert said[:3] == [3, 6, 9] and len(said) < 60
    assert "step 5 · loss nan" in stream.getvalue()


class CountedFile(io.FileIO):
    """Sums what is read from any of them."""

    num_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        CountedFile.num_bytes += len(data or b"")
        return data or b""

    def readall(self) -> bytes:
        data = super().readall()
        CountedFile.num_bytes += len(data or b"")
        return data or b""


def test_progress_reads_the_end_of_a_long_file_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {step}, "loss": 2.5}}\n' for step in range(1, 100_001)))
    monkeypatch.setattr(Path, "open", lambda self, mode: CountedFile(self, mode))
    stream = io.StringIO()
    sweep_module._JobProgress("1/1", tmp_path, stream).tick("new")
    assert "step 100000 · loss 2.5000" in stream.getvalue()
    assert 0 < CountedFile.num_bytes <= TAIL_BYTES < file.stat().st_size / 10


def test_metrics_that_cannot_be_read_do_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    stream = io.StringIO()
    sweep_module._JobProgress("1/1", tmp_path, stream).tick("new")
    assert "cannot read" in stream.getvalue()
