"""Every call of a save made to fail in turn, full disks and folders that cannot be written: told, survived, and gone with the cause."""

import errno
import os
import resource
import signal

import pytest
import torch
from helpers.faulty_files import FailingFiles, FullDisk

from llmtrain.checkpoint.files import Files, write_atomic
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.errors import ExitCode, StorageError


def tensors(value):
    return {"a": torch.full((30,), float(value)), "b": torch.full((2, 3), value, dtype=torch.int64)}


def save(folder, step, files=Files(), keep=1):
    return CheckpointStore(folder, keep, files).save(step, tensors(step), {"value": step})


def loaded_value(folder):
    loaded = CheckpointStore(folder, 1).load()
    values = {*loaded.tensors["a"].tolist(), *loaded.tensors["b"].flatten().tolist(), loaded.state["value"]}
    assert values == {loaded.step} and loaded.skipped == ()
    return loaded.step


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "from_then_on"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=["ENOSPC", "EIO", "EROFS"])
def test_b37_the_nth_call_of_a_save_fails(number, for_ever, tmp_path, caplog):
    """For n = 1, 2, … until the save no longer reaches the n-th call."""
    failed = passed = 0
    for n in range(1, 200):
        folder = tmp_path / f"{n}"
        save(folder, 1)
        files = FailingFiles(number, n, for_ever=for_ever)
        caplog.clear()
        try:
            save(folder, 2, files)
        except StorageError as error:
            failed += 1
            told = str(error)
            assert error.exit_code == ExitCode.STORAGE
            assert str(folder) in told and os.strerror(number) in told and "bytes" in told and "free" in told
            assert loaded_value(folder) in (1, 2)
        else:
            passed += 1
            assert loaded_value(folder) == 2
            # What went wrong after the checkpoint was safe is not silent either.
            assert files.count < n or os.strerror(number) in caplog.text
        save(folder, 3)
        assert loaded_value(folder) == 3
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
        if files.count < n:
            break
    assert failed >= 15 and passed >= 5 and files.count < n


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_the_nth_call_of_a_small_write_fails(number, tmp_path):
    path = tmp_path / "status.json"
    for n in range(1, 50):
        write_atomic(Files(), path, b"old")
        files = FailingFiles(number, n)
        try:
            write_atomic(files, path, b"new")
        except StorageError as error:
            assert str(path) in str(error) and os.strerror(number) in str(error)
            assert path.read_bytes() in (b"old", b"new")
        else:
            assert path.read_bytes() == b"new"
        if files.count < n:
            break
    assert n > 5 and [child.name for child in tmp_path.iterdir()] == ["status.json"]


def test_b37_file_size_limit_of_the_real_system(tmp_path):
    """A refusal by the kernel in the middle of a write, without any stand-in."""
    save(tmp_path / "c", 1)
    big = {"a": torch.zeros(300_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
        with pytest.raises(StorageError, match=os.strerror(errno.EFBIG)) as caught:
            CheckpointStore(tmp_path / "c", 1).save(2, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "needs 1,2" in str(caught.value)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000001"]
    assert loaded_value(tmp_path / "c") == 1


def test_a_save_that_cannot_fit_is_refused_before_it_writes(tmp_path):
    folder = tmp_path / "c"
    save(folder, 1)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(StorageError) as caught:
        save(folder, 2, FullDisk(5000))
    told = str(caught.value)
    assert "5,000 are free" in told and "bytes" in told and "checkpoint.keep" in told
    assert sorted(path.name for path in folder.iterdir()) == before
    save(folder, 3, FullDisk(None))
    assert loaded_value(folder) == 3


def test_parent_missing_and_path_is_a_file(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        save(tmp_path / "gone" / "checkpoints", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="exists"):
        save(tmp_path / "file", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission(tmp_path):
    save(tmp_path / "c", 1)
    (tmp_path / "c").chmod(0o500)
    try:
        with pytest.raises(StorageError, match="Permission denied"):
            save(tmp_path / "c", 2)
    finally:
        (tmp_path / "c").chmod(0o700)
    assert loaded_value(tmp_path / "c") == 1


def test_reading_that_fails_for_now_does_not_pass_for_damage(tmp_path):
    """No permission, too many open files: the newest checkpoint may be fine, so an older one must not quietly take its place."""

    class Unreadable(Files):
        def read(self, path):
            if path.parent.name == "step-00000002":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return super().read(path)

    save(tmp_path / "c", 1, keep=2)
    save(tmp_path / "c", 2, keep=2)
    with pytest.raises(StorageError, match="Permission denied"):
        CheckpointStore(tmp_path / "c", 2, Unreadable()).load()


def test_a_bad_sector_is_damage(tmp_path):
    class BadSector(Files):
        def read(self, path):
            if path.parent.name == "step-00000002" and path.suffix == ".safetensors":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return super().read(path)

    save(tmp_path / "c", 1, keep=2)
    save(tmp_path / "c", 2, keep=2)
    loaded = CheckpointStore(tmp_path / "c", 2, BadSector()).load()
    assert loaded.step == 1 and os.strerror(errno.EIO) in loaded.skipped[0]
