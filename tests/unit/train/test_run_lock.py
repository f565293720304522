"""One writer per run folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.faulty_files import NoSystemLocks

from llmtrain.checkpoint.owner import Owner
from llmtrain.config.errors import ExitCode, StorageError
from llmtrain.train import run_lock
from llmtrain.train.run_lock import RunLock

ROOT = Path(__file__).parents[3]

HOLDER = """
import sys
from pathlib import Path
from llmtrain.train.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path):
    """Another process that holds the lock until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "held\n"
    return process


def record(path):
    return json.loads((path / run_lock.RECORD).read_text())


def test_a_second_writer_is_refused_with_the_name_of_the_first(tmp_path, monkeypatch):
    process = hold(tmp_path)
    try:
        for _ in range(2):
            with pytest.raises(StorageError, match=f"process {process.pid} on {Owner.this_process().host}") as caught:
                RunLock(tmp_path).__enter__()
            assert caught.value.exit_code == ExitCode.STORAGE
        # The record alone is enough, and so is the system lock alone.
        with monkeypatch.context() as patch:
            patch.setattr(run_lock.fcntl, "lockf", NoSystemLocks())
            with pytest.raises(StorageError, match=f"process {process.pid}"):
                RunLock(tmp_path).__enter__()
        (tmp_path / run_lock.RECORD).unlink()
        with pytest.raises(StorageError, match="another process"):
            RunLock(tmp_path).__enter__()
    finally:
        process.communicate()
    with RunLock(tmp_path):
        assert record(tmp_path)["pid"] == os.getpid()
    assert not (tmp_path / run_lock.RECORD).exists()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    process = hold(tmp_path)
    process.send_signal(signal.SIGKILL)
    # Not yet waited for: its remains still have the process number.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with RunLock(tmp_path):
        assert record(tmp_path)["pid"] == os.getpid()
    process.communicate()


def test_the_same_process_cannot_hold_it_twice(tmp_path):
    with RunLock(tmp_path):
        with pytest.raises(StorageError, match=f"process {os.getpid()}"):
            RunLock(tmp_path).__enter__()
        # The refused attempt must not have dropped the lock.
        assert hold_fails(tmp_path)
    with RunLock(tmp_path):
        pass


def hold_fails(path):
    (path / run_lock.RECORD).rename(path / "aside")
    command = [sys.executable, "-c", HOLDER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, input="", env={**os.environ, "PYTHONPATH": str(ROOT)})
    (path / "aside").rename(path / run_lock.RECORD)
    return "is in use" in done.stderr


def leave_record(path, **fields):
    me = Owner.this_process().to_dict()
    (path / run_lock.RECORD).write_text(json.dumps({"format_version": 1, **me, **fields}))


@pytest.mark.parametrize(
    "fields",
    [{"start_ticks": 1}, {"boot_id": "an earlier boot"}, {"pid": 2**22 + 7}, {"host": "elsewhere"}],
    ids=["number_used_again", "rebooted", "gone", "other_host_whose_lock_is_free"],
)
def test_stale_records_are_taken_over(tmp_path, fields):
    leave_record(tmp_path, **fields)
    with RunLock(tmp_path):
        assert record(tmp_path)["host"] == Owner.this_process().host


def test_without_system_locks_another_host_is_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock.fcntl, "lockf", NoSystemLocks())
    leave_record(tmp_path, host="elsewhere")
    with pytest.raises(StorageError, match="elsewhere") as caught:
        RunLock(tmp_path).__enter__()
    assert str(tmp_path / run_lock.RECORD) in str(caught.value)
    leave_record(tmp_path, start_ticks=1)
    with RunLock(tmp_path):
        pass


def test_a_spoilt_record_does_not_wedge_the_run(tmp_path):
    (tmp_path / run_lock.RECORD).write_text("{")
    with RunLock(tmp_path):
        assert record(tmp_path)["pid"] == os.getpid()


def test_the_lock_goes_when_the_run_fails(tmp_path):
    with pytest.raises(RuntimeError), RunLock(tmp_path):
        raise RuntimeError
    with RunLock(tmp_path):
        pass
