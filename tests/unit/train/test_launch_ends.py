"""The launcher with real ranks whose training is a stand-in: stop signals, its own end, and how Python is told."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.stand_in_ranks import Launcher, ranks_of, stand_in_ranks, wait_for

from llmtrain.config.errors import ConfigError, ExitCode, PeerError, RankLostError, StorageError
from llmtrain.train import api, launch
from llmtrain.train.launch import launch_run

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    with stand_in_ranks(tmp_path, monkeypatch) as made:
        yield made


def send_when(ready: Callable[[], object], number: int, pid: int | None = None) -> threading.Thread:
    def run() -> None:
        wait_for(ready)
        os.kill(os.getpid() if pid is None else pid, number)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_stop_before_the_training_can_catch_it(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    plan = "keep(f'ready{facts.rank}', 1)\nimport time; time.sleep(60)"
    thread = send_when(lambda: all((launcher.folder / f"ready{rank}").exists() for rank in (0, 1)), signal.SIGTERM)
    end = launcher.run(plan, plan, words=["output=json"])
    thread.join()
    told = capfd.readouterr()
    assert end.verdict.code is ExitCode.REQUEUE and told.err == "stopped by SIGTERM\n"
    assert json.loads(told.out) == {"code": 75, "reason": "stopped by SIGTERM", "run": None}


def test_a_ctrl_c_while_ranks_import_shows_no_traceback(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    plan = "keep(f'ready{facts.rank}', 1)\nimport time; time.sleep(60)"
    thread = send_when(lambda: all((launcher.folder / f"ready{rank}").exists() for rank in (0, 1)), signal.SIGINT)
    end = launcher.run(plan, plan)
    thread.join()
    assert end.verdict.code is ExitCode.INTERRUPTED and capfd.readouterr().err == "interrupted\n"


def test_a_ctrl_c_while_python_starts_is_kept_for_the_ranks(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    # Before its first own line a rank cannot choose what the signal does: Python would print where it stood.
    slow = "import os, time\nif 'RANK' in os.environ:\n    import stand_in\n    stand_in.keep('starting' + os.environ['RANK'], 1)\n"
    (launcher.folder / "site" / "sitecustomize.py").write_text(slow + "    time.sleep(1.0)\n")
    thread = send_when(lambda: all((launcher.folder / f"starting{rank}").exists() for rank in (0, 1)), signal.SIGINT)
    end = launcher.run("import time; time.sleep(60)", "import time; time.sleep(60)")
    thread.join()
    assert end.verdict.code is ExitCode.INTERRUPTED and [one.code for one in end.ends] == [-2, -2]
    assert capfd.readouterr().err == "interrupted\n"


def test_ranks_save_and_end_when_the_launcher_is_killed(launcher: Launcher) -> None:
    plan = """
import time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
keep(f"ready{facts.rank}", os.getpid())
while not stop: time.sleep(0.01)
time.sleep(0.2)
keep(f"saved{facts.rank}", 1)
code = 75
"""
    launcher.plan(plan, plan)
    environ = os.environ | {"TMPDIR": str(launcher.folder / "tmp")}
    process = subprocess.Popen([sys.executable, "-m", "llmtrain", "launch.nproc=2"], env=environ)
    try:
        wait_for(lambda: all((launcher.folder / f"ready{rank}").exists() for rank in (0, 1)))
        process.kill()
        process.wait()
        wait_for(lambda: not ranks_of(launcher.folder), 10)
    finally:
        process.kill()
        process.wait()
    assert launcher.kept("saved0") == launcher.kept("saved1") == 1


def test_ranks_that_cannot_be_started(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.plan("import time; time.sleep(60)", "pass")
    real, started = subprocess.Popen, []

    def limited(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", limited)
    with pytest.raises(RankLostError, match="Resource temporarily unavailable"):
        launch_run(launcher.composed(2))
    assert started[0].returncode == -signal.SIGKILL


def test_a_screen_that_is_gone_is_not_taken_for_ranks_that_cannot_be_started(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.plan("import time; time.sleep(60)", "pass")

    class Gone(io.StringIO):
        def flush(self) -> None:
            if ranks_of(launcher.folder):
                raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        launch_run(launcher.composed(2))


def test_no_room_for_reports(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(launcher.folder / "nowhere"))
    with pytest.raises(StorageError, match="TMPDIR"):
        launch_run(launcher.composed(2))
    monkeypatch.setattr("tempfile.tempdir", str(launcher.folder / "tmp"))


def test_the_listening_socket_is_for_this_machine_alone() -> None:
    with launch.listen_on_loopback() as listener:
        assert listener.getsockname()[0] == "127.0.0.1" and not listener.get_inheritable()
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


# From Python


def test_python_gets_the_ranks_code(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    launcher.plan("print('hello'); code = 75", "code = 75")
    assert api.train(launcher.composed(2)) is ExitCode.REQUEUE
    assert capfd.readouterr() == ("", "hello\n")


def test_python_gets_an_error_for_a_rank_that_failed(launcher: Launcher) -> None:
    launcher.plan("raise errors.PeerError(1, errors.ExitCode.DATA)", "raise errors.DataError('no such text')")
    with pytest.raises(PeerError, match="rank 1: failed in phase start, before step 1: no such text") as caught:
        api.train(launcher.composed(2))
    assert caught.value.exit_code is ExitCode.DATA and caught.value.rank == 1


def test_a_console_cannot_follow_ranks(launcher: Launcher) -> None:
    from llmtrain.metrics.console import PlainConsole

    with pytest.raises(ConfigError, match="launch.nproc=2"):
        api.train(launcher.composed(2), PlainConsole(sys.stderr))
