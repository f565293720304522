"""The launcher with real ranks whose training is a stand-in: hand-over, environment, the one screen, status and document."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.example_plugin import install_page, on_the_path
from helpers.stand_in_ranks import FOLLOW, Launcher, stand_in_ranks

from llmtrain.config.compose import compose_config
from llmtrain.config.errors import ExitCode
from llmtrain.dist.failure import Failure, Kind
from llmtrain.train import build, launch
from llmtrain.train.launch import from_document, to_document
from llmtrain.train.run_folder import RunFolder

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    with stand_in_ranks(tmp_path, monkeypatch) as made:
        yield made


# What is handed over


CONFIGS = [
    (),
    ("train.steps=7", "optimizer.lr=0.1234567890123456789", "run.name=a b ü", "launch.nproc=3", "launch.env.A=1"),
    ("+model=gpt2_124m", "+precision=bf16", "accumulation.global_batch_size=8"),
    ("data=text", "data.path=x", "generate.prompt='say \"this\"'", "+schedule=wsd", "tokenizer=bpe"),
]


@pytest.mark.parametrize("words", CONFIGS)
def test_the_config_of_a_rank_is_the_launchers(words: tuple[str, ...]) -> None:
    composed = compose_config(words)
    again = from_document(to_document(composed))
    assert again == composed and type(again.wire) is dict
    assert repr(again.config) == repr(composed.config) and again.wire == composed.wire


def test_a_config_with_options_of_a_plugin_is_handed_over(tmp_path: Path) -> None:
    with on_the_path(install_page(tmp_path)):
        composed = compose_config(["optimizer.kind=signum", "optimizer.signum.momentum=0.9871234567"])
        again = from_document(to_document(composed))
        assert again == composed and again.config.plugins["optimizer.signum"].momentum == 0.9871234567  # type: ignore[attr-defined]


def test_floats_that_json_does_not_know_survive(tmp_path: Path) -> None:
    composed = compose_config([])
    composed.wire["optimizer"]["eps"] = math.inf
    assert json.loads(to_document(composed))["wire"]["optimizer"]["eps"] == math.inf


SEEN = """
facts_seen = {name: str(getattr(facts, name)) for name in facts.__dataclass_fields__}
keep(f"seen{facts.rank}", {
    "facts": facts_seen, "environ": dict(os.environ), "stdin": os.read(0, 10).decode(), "group": os.getpgid(0) == os.getpid(),
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])], "torch": "torch" in sys.modules,
    "output": os.readlink("/proc/self/fd/1"), "errors": os.readlink("/proc/self/fd/2"), "path": sys.path[0],
    "prompt": len(composed.config.generate.prompt), "words": composed.words,
})
"""


def test_each_rank_gets_its_place_and_the_whole_config(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORTED", "by the shell")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # Far more than a pipe holds; a rank that does not read must not hold up the launcher.
    words = ["launch.env={EXPORTED: by the config, OTHER: 1}"]
    prompt = "x" * 2**21
    end = launcher.run(*[SEEN] * 3, words=[*words, f"generate.prompt={prompt}"])
    assert end.verdict.code is ExitCode.DONE and [one.code for one in end.ends] == [0, 0, 0]
    seen = [launcher.kept(f"seen{rank}") for rank in range(3)]
    assert [(one["facts"]["rank"], one["facts"]["local_rank"]) for one in seen] == [("0", "0"), ("1", "1"), ("2", "2")]
    for rank, one in enumerate(seen):
        facts, environ = one["facts"], one["environ"]
        assert (facts["world_size"], facts["local_world_size"], facts["launcher_pid"]) == ("3", "3", str(os.getpid()))
        assert (environ["EXPORTED"], environ["OTHER"], environ["GLOO_SOCKET_IFNAME"]) == ("by the config", "1", "lo")
        assert (one["stdin"], one["group"], one["blocked"], one["torch"]) == ("", True, [], False)
        assert one["prompt"] == len(prompt) and one["words"][1:2] == words and one["path"] == sys.path[0]
        assert (facts["listen_fd"] == "None") == (rank > 0)
    assert len({(one["facts"]["run_id"], one["facts"]["master_port"], one["facts"]["report_folder"]) for one in seen}) == 1
    for rank in (1, 2):
        assert seen[rank]["output"] == seen[rank]["errors"] == f"{seen[0]['facts']['report_folder']}/rank{rank}.out"
    assert seen[0]["output"] == os.readlink("/proc/self/fd/1") and os.environ["EXPORTED"] == "by the shell"


def test_a_second_run_has_other_keys(launcher: Launcher) -> None:
    ids = []
    for _ in range(2):
        launcher.run(SEEN, SEEN)
        ids.append(launcher.kept("seen0")["facts"]["run_id"])
    assert ids[0] != ids[1] and len(ids[0]) >= 16


def test_the_port_is_rank_0s(launcher: Launcher) -> None:
    serve = """
import socket
listener = socket.socket(fileno=facts.listen_fd)
connection, _ = listener.accept()
connection.sendall(b"rank 0")
"""
    ask = """
import socket
with socket.create_connection((facts.master_addr, facts.master_port)) as connection:
    keep("answer", connection.recv(10).decode())
"""
    assert launcher.run(serve, ask).verdict.code is ExitCode.DONE and launcher.kept("answer") == "rank 0"
    # Nobody else holds it open: once rank 0 is gone, the others are refused instead of left to wait.
    late = """
import socket, time
while True:
    try:
        with socket.create_connection((facts.master_addr, facts.master_port), timeout=5): time.sleep(0.01)
    except ConnectionRefusedError:
        break
keep("refused", True)
"""
    assert launcher.run("pass", late).verdict.code is ExitCode.DONE and launcher.kept("refused")


def test_rank_0_can_be_told_where_to_print(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    launcher.run("print('hello')", "print('unheard')", stdout=2)
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "hello\n")


def test_composing_and_launching_need_no_torch(launcher: Launcher) -> None:
    launcher.plan("pass", "pass")
    script = "import sys; from llmtrain.cli.dispatch import dispatch\n"
    script += "code = dispatch(['launch.nproc=2']); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "False"], done.stderr


# What went wrong is told once


def test_an_error_of_one_rank_is_told_once(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    fail = "raise errors.ConfigError(errors.Problem('the moon', 'it is cheese', 'another moon'))"
    end = launcher.run("raise errors.PeerError(1, errors.ExitCode.CONFIG)", fail)
    told = capfd.readouterr()
    assert end.verdict.code is ExitCode.CONFIG and [one.code for one in end.ends] == [2, 2]
    assert told.out == "" and told.err.count("the moon") == 1 and "Traceback" not in told.err
    assert told.err.startswith("error: the moon") and "rank 1 of 2" not in told.err, "any rank of this host would say so"
    assert launch.end_reason(end) == "rank 1: failed in phase start, before step 1: the moon"


def test_b54_an_exception_of_one_rank_is_told_with_its_traceback(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    end = launcher.run("raise errors.PeerError(1, errors.ExitCode.FAULT)", "def broken(): return 1 // 0\nbroken()")
    told = capfd.readouterr().err
    assert end.verdict.code is ExitCode.FAULT and told.count("Traceback") == 1 and "rank 1 of 2" in told
    said = "ZeroDivisionError: integer division or modulo by zero"
    assert launch.end_reason(end) == f"rank 1: raised an exception in phase start, before step 1: {said}"
    assert "a fault of llmtrain" in told


def test_a_rank_that_dies_of_native_code_is_told_with_its_last_lines(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    end = launcher.run(FOLLOW, "import ctypes; print('so far', flush=True); ctypes.string_at(0)")
    told = capfd.readouterr().err
    assert end.verdict.code is ExitCode.LOST and "SIGSEGV" in told and "so far" in told
    # The stack that Python leaves on such an end.
    assert "Fatal Python error: Segmentation fault" in told and "stand_in.py" in told


def test_an_import_that_fails_in_a_rank_is_shown(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    (launcher.folder / "site" / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('RANK') == '1': sys.modules['llmtrain.train.launch'] = None\nelif 'RANK' in os.environ: import stand_in"
    )
    end = launcher.run(FOLLOW, "pass")
    told = capfd.readouterr().err
    assert end.verdict.code is ExitCode.FAULT and "rank 1 of 2" in told and "llmtrain.train.launch" in told


def test_a_reader_that_went_away_is_no_failure(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    end = launcher.run("raise BrokenPipeError", "pass", words=["output=json"])
    assert end.verdict.code is ExitCode.READER_GONE and capfd.readouterr() == ("", "")


# Status and document


RUN = "leave_run(facts, folder / 'run', code=None, step=0, reason='running')\n"


def test_the_status_that_rank_0_could_not_write(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    steps = "for step in (4, 12): (folder / 'run' / 'checkpoints' / f'step-{step:08d}').mkdir(parents=True)\n"
    wait = "import time; time.sleep(0.3) if facts.rank else None\n"
    end = launcher.run(RUN + steps + "os.kill(os.getpid(), 9)", wait + "raise errors.PeerError(0, errors.ExitCode.LOST)")
    status = RunFolder(launcher.folder / "run").read_status()
    assert end.verdict.code is ExitCode.LOST and status is not None
    assert (status.code, status.step) == (ExitCode.LOST, 12) and "rank 0" in status.reason and "SIGKILL" in status.reason
    assert "llmtrain run.name=again" in capfd.readouterr().err
    assert not (launcher.folder / "run" / "lock.json").exists()


def test_the_status_names_the_rank_that_failed(launcher: Launcher) -> None:
    told = "leave_run(facts, folder / 'run', code=70, step=3, reason='another rank failed')\n"
    launcher.run(told + "raise errors.PeerError(1, errors.ExitCode.FAULT)", "{}['name']")
    status = RunFolder(launcher.folder / "run").read_status()
    assert status is not None and (status.code, status.reason) == (
        70,
        "rank 1: raised an exception in phase start, before step 1: KeyError: 'name'",
    )


def test_the_status_says_more_than_that_rank_0_is_gone(launcher: Launcher) -> None:
    lost = "import time; time.sleep(0.5)\nleave_run(facts, folder / 'run', code=71, step=3, reason='rank 0 was lost')\n"
    launcher.run("os.kill(os.getpid(), 9)", lost + "os._exit(71)")
    status = RunFolder(launcher.folder / "run").read_status()
    assert status is not None and status.code == 71 and "SIGKILL" in status.reason


def test_a_status_of_rank_0_stays(launcher: Launcher) -> None:
    told = "leave_run(facts, folder / 'run', code=77, step=3, reason='its own words')\n"
    launcher.run(told + "raise errors.NumericsError('no number')", "raise errors.PeerError(0, errors.ExitCode.NUMERICS)")
    status = RunFolder(launcher.folder / "run").read_status()
    assert status is not None and (status.code, status.step, status.reason) == (77, 3, "its own words")


def test_the_status_of_a_run_that_somebody_else_has_taken_is_left_alone(launcher: Launcher) -> None:
    run = launcher.folder / "run"
    run.mkdir()
    RunFolder(run).write_status(None, 5, "running")
    # As soon as the ranks are gone another process may begin there.
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, pathlib; from llmtrain.train.run_folder import RunFolder\n"
         "with RunFolder(pathlib.Path(sys.argv[1])).lock(): print('held', flush=True); sys.stdin.read()", str(run)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        end = launcher.run(RUN.replace("step=0", "step=5") + "os.kill(os.getpid(), 9)", FOLLOW)
    finally:
        holder.kill()
        holder.communicate()
    status = RunFolder(run).read_status()
    assert end.verdict.code is ExitCode.LOST and status is not None and status.code is None


@pytest.mark.parametrize("kind, what", [("hang", "stands still"), ("lost", "vanished")])
def test_the_status_that_the_first_to_notice_writes(tmp_path: Path, kind: Kind, what: str) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    build._write_loss(folder, Failure(1, "host", 1, "folder", 0, 0, kind, 71, "", 0))
    status = folder.read_status()
    assert status is not None and (status.code, status.reason) == (71, f"rank 1: {what} in phase folder, before step 1")


@pytest.mark.parametrize(
    "plans, printed, code",
    [
        (("print('{\"code\": 0}')", "pass"), {"code": 0}, ExitCode.DONE),
        (("print('{\"code\": 75}'); code = 75", "code = 75"), {"code": 75}, ExitCode.REQUEUE),
        (("raise errors.DataError('no data')", "raise errors.PeerError(0, errors.ExitCode.DATA)"), None, ExitCode.DATA),
        (("raise errors.PeerError(1, errors.ExitCode.DATA)", "raise errors.DataError('no data')"), None, ExitCode.DATA),
        (("os.kill(os.getpid(), 9)", FOLLOW), None, ExitCode.LOST),
    ],
)
def test_one_document_whatever_happens(
    launcher: Launcher, capfd: pytest.CaptureFixture[str], plans: tuple[str, str], printed: Any, code: ExitCode
) -> None:
    end = launcher.run(*plans, words=["output=json"])
    document = json.loads(capfd.readouterr().out)
    assert end.verdict.code is code and document["code"] == code
    if printed is None:
        assert document == {"code": code, "reason": launch.end_reason(end), "run": None} and document["reason"]
    else:
        assert document == printed
