"""A rank by itself, in a process of its own: bound to its launcher, its standard input, its signals, its last word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import rank
from llmtrain.config.compose import compose_config
from llmtrain.config.errors import DataError, ExitCode, Problem
from llmtrain.dist.position import mapped_position
from llmtrain.dist.world import LaunchFacts, rank_environment
from llmtrain.train.launch import to_document

pytestmark = pytest.mark.timeout(60)


def place(reports: Path, number: int = 1, **changed: Any) -> LaunchFacts:
    facts = LaunchFacts(
        rank=number,
        local_rank=number,
        world_size=2,
        source="launch.nproc",
        local_world_size=2,
        master_port=29500,
        run_id="r",
        launcher_pid=os.getpid(),
        report_folder=reports,
    )
    return facts if not changed else LaunchFacts(**{**vars(facts), **changed})


def run_main(
    reports: Path, training: str, *, document: bytes | None = None, environ: Mapping[str, str] | None = None, number: int = 1
) -> subprocess.CompletedProcess[str]:
    """`main` in a child, with a function body in place of the training."""
    script = "import os, signal, sys, time\nfrom llmtrain.cli import rank\nfrom llmtrain.config import errors\ndef carry_out(composed):\n"
    script += "".join(f"    {line}\n" for line in training.splitlines()) + "rank.carry_out = carry_out\nrank.main()"
    data = to_document(compose_config(["launch.nproc=2"])) if document is None else document
    own = rank_environment(place(reports, number)) if environ is None else environ
    return subprocess.run(
        [sys.executable, "-c", script],
        input=data.decode(),
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def record(reports: Path, number: int = 1) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((reports / f"rank{number}.json").read_text())
    return values


def test_the_exit_code_is_that_of_the_training(tmp_path: Path) -> None:
    done = run_main(tmp_path, "print(composed.config.launch.nproc)\nreturn 75")
    assert (done.returncode, done.stdout, done.stderr) == (75, "2\n", "")
    assert not list(tmp_path.iterdir())


def test_standard_input_is_read_once_and_then_empty(tmp_path: Path) -> None:
    composed = compose_config(["generate.prompt=" + "x" * 2**20])
    done = run_main(
        tmp_path,
        "print(len(composed.config.generate.prompt), os.read(0, 1), os.readlink('/proc/self/fd/0'))",
        document=to_document(composed),
    )
    assert done.stdout.split() == [str(2**20), "b''", "/dev/null"]


@pytest.mark.parametrize(
    "raised, code, kind",
    [
        ("errors.DataError(errors.Problem('no text', 'there is some'))", ExitCode.DATA, "error"),
        ("errors.StoppedError('stopped by SIGTERM')", ExitCode.REQUEUE, "error"),
        ("ValueError('odd')", ExitCode.FAULT, "crash"),
        ("SystemExit(3)", ExitCode.FAULT, "crash"),
        ("KeyboardInterrupt", ExitCode.INTERRUPTED, "error"),
    ],
)
def test_a_rank_leaves_its_last_word_and_prints_nothing(tmp_path: Path, raised: str, code: ExitCode, kind: str) -> None:
    done = run_main(tmp_path, f"raise {raised}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    word = record(tmp_path)
    assert (word["code"], word["kind"], word["rank"], word["reporter"], word["phase"]) == (code, kind, 1, 1, "start")
    assert ("Traceback" in word["text"]) == (kind == "crash")


@pytest.mark.parametrize(
    "raised, code", [("errors.PeerError(0, errors.ExitCode.DATA)", 65), ("BrokenPipeError", ExitCode.READER_GONE)]
)
def test_what_others_did_is_not_told(tmp_path: Path, raised: str, code: int) -> None:
    done = run_main(tmp_path, f"raise {raised}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "") and not list(tmp_path.iterdir())


def test_a_reader_that_is_gone_when_all_is_done(tmp_path: Path) -> None:
    # Python itself would notice at its very end, with another exit code and a complaint.
    broken = "reader, writer = os.pipe()\nos.dup2(writer, 1)\nos.close(writer)\nos.close(reader)\nsys.stdout = open(1, 'w')\nprint('unread')\nreturn 0"
    done = run_main(tmp_path, broken)
    assert (done.returncode, done.stderr) == (ExitCode.READER_GONE, "")


def test_the_first_word_stays(tmp_path: Path) -> None:
    (tmp_path / "rank1.json").write_text('{"text": "the cause"}')
    assert run_main(tmp_path, "raise ValueError('a consequence')").returncode == ExitCode.FAULT
    assert record(tmp_path) == {"text": "the cause"}


def test_the_last_word_says_where_the_rank_was(tmp_path: Path) -> None:
    position = mapped_position(tmp_path / "rank1.position")
    position.at_step(5)
    position.enter("save")
    rank.leave_word(place(tmp_path), DataError(Problem("no text", "there is some")))
    assert (record(tmp_path)["phase"], record(tmp_path)["step"]) == ("save", 5)


@pytest.mark.parametrize("document", [b"", b'{"words": ['])
def test_a_document_that_is_cut_short(tmp_path: Path, document: bytes) -> None:
    assert run_main(tmp_path, "print('trained')", document=document).stdout == ""
    assert record(tmp_path)["kind"] == "crash"


def test_a_rank_whose_launcher_is_gone_does_nothing(tmp_path: Path) -> None:
    # The number of a process that is not the parent.
    environ = rank_environment(place(tmp_path, launcher_pid=2**22 - 1))
    done = run_main(tmp_path, "print('trained')", environ=environ)
    assert (done.returncode, done.stdout) == (ExitCode.LOST, "")


def test_a_rank_is_not_started_by_hand() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LLMTRAIN_")}
    command = [sys.executable, "-c", "from llmtrain.cli.rank import main; main()"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == ExitCode.CONFIG and "llmtrain launch.nproc=2" in done.stderr


def test_signals_held_back_while_it_starts_arrive(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, rank.STOP_SIGNALS)
    try:
        done = run_main(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(20)")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.returncode == -signal.SIGTERM


def test_a_signal_after_the_end_changes_nothing(tmp_path: Path) -> None:
    late = "end = os._exit\ndef late(code):\n    [os.kill(os.getpid(), n) for n in (1, 2, 10, 15)]\n    end(code)\nos._exit = late\nreturn 75"
    assert run_main(tmp_path, late).returncode == 75


STUCK = "import threading\nthreading.Thread(target=lambda: time.sleep(600)).start()\nprint('said')\n"


@pytest.mark.parametrize(
    "end, code", [("raise ValueError", ExitCode.FAULT), ("return 0", ExitCode.DONE), ("return 75", ExitCode.REQUEUE)]
)
def test_a_thread_that_does_not_end_cannot_keep_a_rank_alive(tmp_path: Path, end: str, code: ExitCode) -> None:
    done = run_main(tmp_path, STUCK + end)
    assert done.returncode == code and done.stdout == "said\n"


def test_a_crash_of_native_code_leaves_a_stack(tmp_path: Path) -> None:
    done = run_main(tmp_path, "import ctypes\nctypes.string_at(0)")
    assert done.returncode == -signal.SIGSEGV and "in carry_out" in done.stderr
