"""SIGKILL at random moments of a preparation: the same command goes on, and the folder is that of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.scripts import ROOT

NUM_DOCUMENTS = 400
START_SECONDS = 60.0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of unequal lengths, some records that are none."""
    generator = random.Random(0)
    lines = []
    for number in range(NUM_DOCUMENTS):
        words = " ".join(generator.choices(["one", "two", "three", "naïve", "日本"], k=generator.randint(1, 300)))
        lines.append(json.dumps({"text": f"{number} {words}"} if number % 50 else {"text": None}))
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def expected(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed preparation leaves: some fifty shards."""
    cache = tmp_path_factory.mktemp("calm")
    finish(text, cache)
    found = content(cache)
    assert sum(name.endswith(".tokens") for name in found) > 40
    return found


def start(text: Path, cache: Path, verb: str = "prepare", more_words: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A verb that prepares, with two processes and a vocabulary to learn, in a process group of its own."""
    words = ["data=jsonl", f"data.path={text}", f"data.cache_dir={cache}", "data.on_bad=quarantine"]
    words += ["tokenizer=bpe", "tokenizer.vocab_size=300", "prepare.workers=2", "prepare.shard_bytes=8192"]
    command = [sys.executable, "-m", "llmtrain", verb, *words, *more_words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def finish(text: Path, cache: Path) -> None:
    process = start(text, cache)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def content(cache: Path) -> dict[str, bytes]:
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def kill_when(process: subprocess.Popen[bytes], cache: Path, num_files: int, generator: random.Random) -> bool:
    """Kill a preparation soon after its staging folder has so many files; whether it was still alive then."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline and len(list(cache.glob(".staging-*/*"))) < num_files:
        time.sleep(0.002)
    time.sleep(generator.uniform(0.0, 0.05))
    if process.poll() is None:
        # All processes at once, or only the one that started the others.
        generator.choice([os.killpg, os.kill])(process.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode != 0


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_preparations_end_in_the_same_folder(text: Path, expected: dict[str, bytes], tmp_path: Path, kills: int) -> None:
    generator = random.Random(kills)
    cache = tmp_path / "killed"
    hits, left = 0, 0
    for turn in range(1, kills + 1):
        # Later and later, so that every kill meets a preparation that has something left to do.
        hits += kill_when(start(text, cache), cache, turn * len(expected) // (kills + 1), generator)
        left = max(left, len(list(cache.glob(".staging-*/shard-*.json"))))
    assert hits >= kills - 1 and left > 0, "the kills hit preparations at work, and finished shards were kept"
    finish(text, cache)
    assert content(cache) == expected


def stop(process: subprocess.Popen[bytes], cache: Path, number: signal.Signals, to_all: bool) -> str:
    """Send a signal when a few shards are finished; what is said on standard error."""
    while process.poll() is None and len(list(cache.glob(".staging-*/shard-*.json"))) < 3:
        time.sleep(0.002)
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert len(list(cache.glob(".staging-*/shard-*.json"))) >= 3
    return errors.decode()


def test_ctrl_c_keeps_what_is_finished(text: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """130, quietly; all processes of the terminal get the signal, as Ctrl-C does it."""
    cache = tmp_path / "stopped"
    process = start(text, cache)
    assert stop(process, cache, signal.SIGINT, to_all=True).strip() == "interrupted" and process.returncode == 130
    finish(text, cache)
    assert content(cache) == expected


@pytest.mark.parametrize("verb", ["prepare", "train"])
@pytest.mark.parametrize(
    ("number", "to_all"), [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGUSR1, True), (signal.SIGHUP, False)]
)
def test_b55_a_scheduler_that_ends_the_job_may_start_it_again(
    text: Path, expected: dict[str, bytes], tmp_path: Path, verb: str, number: signal.Signals, to_all: bool
) -> None:
    """75 and a message, while `prepare` or the preparation of a training is at work; the next start goes on."""
    cache = tmp_path / "stopped"
    words = [f"run.dir={tmp_path / 'runs'}", "train.steps=1"] if verb == "train" else []
    process = start(text, cache, verb, words)
    errors = stop(process, cache, number, to_all)
    assert process.returncode == 75 and "Traceback" not in errors
    when = "while text was prepared" if verb == "prepare" else "before the first update"
    assert f"stopped by {number.name} {when}" in errors and "the same command goes on" in errors
    finish(text, cache)
    assert content(cache) == expected
