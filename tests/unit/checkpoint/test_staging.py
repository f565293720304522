"""A staged folder appears whole or not at all, whatever call fails and whenever the process dies."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.faulty_files import FailingFiles

from llmtrain.checkpoint.files import Files, write_file
from llmtrain.checkpoint.owner import Owner
from llmtrain.checkpoint.staging import staged_folder
from llmtrain.config.errors import ConfigError, StorageError


def fill(target: Path, files: Files) -> None:
    with staged_folder(target, files) as staging:
        (staging / "below").mkdir()
        for name in ("one", "below/two"):
            write_file(files, staging / name, b"content")


def content(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("empty_before", [False, True])
def test_a_folder_appears(empty_before: bool, tmp_path: Path) -> None:
    target = tmp_path / "new" / "target"
    if empty_before:
        target.mkdir(parents=True)
    fill(target, Files())
    assert content(tmp_path) == ["new", "new/target", "new/target/below", "new/target/below/two", "new/target/one"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "one").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = content(tmp_path)
    for name in ("file", "full", "link"):
        with pytest.raises(ConfigError, match="is there already"):
            fill(tmp_path / name, Files())
    assert content(tmp_path) == before and (tmp_path / "full" / "one").read_text() == "mine"


def test_every_call_may_fail_and_nothing_is_left(tmp_path: Path) -> None:
    counted = FailingFiles(errno.ENOSPC, fail_at=10**9)
    fill(tmp_path / "counting", counted)
    assert counted.count > 10
    # The very last sync comes after the rename: the folder is whole then.
    for number in range(1, counted.count):
        with pytest.raises(StorageError, match="No space left"):
            fill(tmp_path / "target", FailingFiles(errno.ENOSPC, fail_at=number))
        assert content(tmp_path) == content_of_counting(), number


def content_of_counting() -> list[str]:
    return ["counting", "counting/below", "counting/below/two", "counting/one"]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "target") as staging:
        (staging / "one").write_text("half")
        raise KeyboardInterrupt
    assert content(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from llmtrain.checkpoint.staging import staged_folder
with staged_folder(Path(sys.argv[1])) as staging:
    (staging / "one").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_kill_leaves_is_no_target_and_goes_with_the_next(tmp_path: Path) -> None:
    target = tmp_path / "target"
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists() and len(list(tmp_path.iterdir())) == 1
    others = [".other.staging-00000000-1-1-00000000", f".target.staging-{Owner.this_process().token}-00000000"]
    for name in others:  # of another target, and of a process that lives
        (tmp_path / name).mkdir()
    fill(target, Files())
    assert sorted(path.name for path in tmp_path.iterdir()) == [*others, "target"]
