"""Preparations that are interrupted, fail, or meet each other: nothing half-made is seen, nothing finished is lost."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.prepared import NAMES, SETTINGS, SMALL, TEXTS, content, documents, entries, ids, job_of, prepare_path

from llmtrain.config.errors import DataError, StorageError
from llmtrain.config.typed_data import BpeTokenizerConfig, DataConfig, OnBad
from llmtrain.data import prepare as prepare_module
from llmtrain.data import staging as staging_module
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.prepare import prepare
from llmtrain.data.staging import MARKER, locked

MakeFolder = Callable[[Sequence[str]], Path]
MakeRecords = Callable[[Sequence[str]], Path]
MakeConfig = Callable[..., DataConfig]


def die_in_unit(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """A preparation that is interrupted in the unit of this number; returns the units that were tokenized."""
    make, made = prepare_module.make_shards.__globals__["make_shard"], []

    def stop(settings: Any, index: int, unit: Any, report: Any) -> Any:
        if index == number:
            raise KeyboardInterrupt
        before = (settings.folder / f"shard-{index:05}.json").exists()
        description = make(settings, index, unit, report)
        made.extend([] if before else [index])
        return description

    monkeypatch.setitem(prepare_module.make_shards.__globals__, "make_shard", stop)
    return made


@pytest.mark.parametrize("unit", [0, 9])
def test_an_interrupted_preparation_goes_on_where_it_was(
    make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path, unit: int
) -> None:
    texts = make_folder(TEXTS)
    calm = prepare_path(data_config(texts, cache_dir=str(tmp_path / "calm")), BpeTokenizerConfig(280), SMALL)
    data = data_config(texts)
    with pytest.MonkeyPatch.context() as patch:
        made = die_in_unit(patch, unit)
        with pytest.raises(KeyboardInterrupt):
            prepare_path(data, BpeTokenizerConfig(280), SMALL)
        assert made == list(range(unit))
    (staging,) = entries(data)
    assert staging.name.startswith(".staging-")
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "train_tokenizer", lambda *args: pytest.fail("learnt twice"))
        made = die_in_unit(patch, -1)
        again = prepare_path(data, BpeTokenizerConfig(280), SMALL, lines)
    assert made[0] == unit and len(made) > 5
    assert lines[0].startswith("going on with preparing")
    assert content(again.folder) == content(calm.folder) and entries(data) == [again.folder]


@pytest.mark.parametrize("step", ["publish", "mark_checked", "write_metadata"])
def test_an_interruption_at_the_end_loses_nothing(
    make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path, step: str
) -> None:
    texts = make_folder(TEXTS)
    calm = prepare_path(data_config(texts, cache_dir=str(tmp_path / "calm")), settings=SMALL)
    data = data_config(texts)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_path(data, settings=SMALL)
    with pytest.MonkeyPatch.context() as patch:
        made = die_in_unit(patch, -1)
        assert content(prepare_path(data, settings=SMALL).folder) == content(calm.folder)
    assert made == []
    assert len(entries(data)) == 1


def test_a_bad_record_after_hours_costs_only_its_shard(make_records: MakeRecords, data_config: MakeConfig) -> None:
    """With data.on_bad=skip the same command takes over what is finished, and the result is that of skipping from the start."""
    path = make_records([*TEXTS, "raw:{", "last"])
    with pytest.raises(DataError, match="records.jsonl:"):
        prepare_path(data_config(path), settings=SMALL)
    with pytest.MonkeyPatch.context() as patch:
        made = die_in_unit(patch, -1)
        prepared = prepare_path(data_config(path, on_bad=OnBad.SKIP), settings=SMALL)
    assert len(made) <= 2 < len(prepared.train.parts)
    assert sum(facts["count"] for facts in prepared.bad.values()) == 1
    assert sorted(documents(prepared.train) + documents(prepared.validation)) == sorted([*TEXTS, "last"])
    assert job_of(data_config(path)).folder != prepared.folder, "an error stays an error"


def test_two_processes_may_prepare_at_once(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits, says so, and uses what the first made."""
    data = data_config(make_folder(TEXTS))
    at_work, may_finish = threading.Event(), threading.Event()
    publish, made = prepare_module.publish, []

    def publish_slowly(staging: Path, folder: Path) -> None:
        made.append(folder)
        at_work.set()
        assert may_finish.wait(30)
        publish(staging, folder)

    monkeypatch.setattr(prepare_module, "publish", publish_slowly)
    monkeypatch.setattr(staging_module, "WAIT_SECONDS", 0.01)
    results: list[list[int]] = []
    statuses: list[str] = []

    def second() -> None:
        beat = Heartbeat(lambda line: None)
        monkeypatch.setattr(
            beat, "status", lambda text: (statuses.append(text), may_finish.set() if "waiting" in text else None)
        )
        results.append(ids(prepare(job_of(data), beat).train))

    threads = [threading.Thread(target=lambda: results.append(ids(prepare_path(data).train)))]
    threads[0].start()
    assert at_work.wait(30)
    threads.append(threading.Thread(target=second))
    threads[1].start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1] and len(made) == 1
    assert any("waiting for another process" in text for text in statuses)
    assert len(entries(data)) == 1


def test_without_locks_two_processes_still_both_succeed(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_config(make_folder(TEXTS))

    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(staging_module.fcntl, "flock", no_locks)
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(ids(prepare_path(data, settings=SMALL).train))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and results[0] == results[1] == results[2]
    assert [path for path in entries(data) if not path.name.endswith(".lock")] == [job_of(data, settings=SMALL).folder]


def test_the_lock_of_a_dead_process_is_no_lock(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    """A kill leaves lock file and staging folder behind; the next process takes both over and nothing stays."""
    data = data_config(make_folder(TEXTS))
    job = job_of(data)
    job.staging.mkdir(parents=True)
    (job.staging / ".train-00000.tokens.0123").write_bytes(b"half")
    (job.staging / "train-00000.tokens").write_bytes(b"whole but without its description")
    job.staging.with_name(f"{job.staging.name}.lock").touch()
    prepare_path(data)
    assert entries(data) == [job.folder]
    assert sorted(content(job.folder)) == sorted(NAMES)


def test_locks_keep_others_out_until_they_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "WAIT_SECONDS", 0.001)
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(20):
            with locked(tmp_path / "staging", lambda text: None):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and list(tmp_path.iterdir()) == []


def make_old(path: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))


def leave_folders(parent: Path) -> set[str]:
    """Folders and files with names like ours, of which only the first two are ours and old; gives the names of the others."""
    ours, recent, of_the_user = "a" * 32, "b" * 32, "c" * 32
    for name in (ours, recent, of_the_user, "photos", f"texts-{ours}"):
        (parent / f".staging-{name}").mkdir(parents=True)
        (parent / f".staging-{name}" / "file").write_text("content")
    for name in (ours, recent, "photos", f"texts-{ours}"):
        (parent / f".staging-{name}" / MARKER).touch()
    (parent / f".staging-{ours}.lock").touch()
    (parent / f".staging-{of_the_user}.lock").write_text("content")
    (parent / "d").mkdir()
    (parent / "d" / MARKER).touch()
    (parent / f".staging-{'d' * 32}").symlink_to(parent / "d")
    found = {path.name for path in parent.iterdir()}
    for path in parent.iterdir():
        make_old(path, 13 if recent in path.name else 15)
    return found - {f".staging-{ours}", f".staging-{ours}.lock"}


def test_work_that_nobody_goes_on_with_is_removed(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    """In the cache folder, and nothing but folders that this program made and marked."""
    data = data_config(make_folder(TEXTS))
    cache = Path(data.source.cache_dir)  # type: ignore[union-attr, arg-type]
    kept = leave_folders(cache)
    made = prepare_path(data).folder
    assert {path.name for path in entries(data)} == kept | {made.name}


def test_nothing_beside_a_folder_of_the_user_is_touched(
    make_folder: MakeFolder, data_config: MakeConfig, tmp_path: Path
) -> None:
    parent = tmp_path / "home"
    leave_folders(parent)
    before = {path for path in parent.rglob("*")}
    own = replace(SETTINGS, path=str(parent / "tokens"))
    seen: list[set[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        move = prepare_module.move_up
        patch.setattr(
            prepare_module, "move_up", lambda *args: (seen.append({path.name for path in parent.iterdir()}), move(*args))
        )
        prepare_path(data_config(make_folder(TEXTS)), settings=own)
    assert {path for path in parent.rglob("*") if "tokens" not in path.parts[len(parent.parts)]} == before
    assert seen == [{path.name for path in before if path.parent == parent} | {"tokens"}], (
        "nor is anything made there for a while"
    )


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """As on a full disk, but for the number of the error: what is written beyond this many bytes of a file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_preparation_that_failed_at_once_leaves_nothing(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(TEXTS))
    with files_up_to(100), pytest.raises(StorageError, match="File too large") as caught:
        prepare_path(data)
    assert "data.cache_dir" in str(caught.value)
    assert entries(data) == []


def test_a_full_disk_is_not_filled_further_by_each_try(make_records: MakeRecords, data_config: MakeConfig) -> None:
    """What could not be written goes, buffers that cannot be flushed included; finished shards stay."""
    data = data_config(make_records([*TEXTS, "long " * 800]))
    found = []
    for _ in range(3):
        with files_up_to(4000), pytest.raises(StorageError, match="File too large"):
            prepare_path(data, settings=SMALL)
        (staging,) = entries(data)
        found.append(sorted(path.name for path in staging.iterdir()))
    assert found[0] == found[1] == found[2] and any(name.startswith("shard-") for name in found[0])
    assert [name for name in found[0] if name.startswith(".")] == [MARKER]
    assert len(prepare_path(data, settings=SMALL).train.tokens) > 0


def test_what_a_killed_writer_left_is_removed_at_the_next_start(make_folder: MakeFolder, data_config: MakeConfig) -> None:
    data = data_config(make_folder(TEXTS))
    with pytest.MonkeyPatch.context() as patch:
        die_in_unit(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            prepare_path(data, settings=SMALL)
    (staging,) = entries(data)
    left = staging / f".train-00003.tokens.{'0' * 32}"
    left.write_bytes(b"half")
    with pytest.MonkeyPatch.context() as patch:
        die_in_unit(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            prepare_path(data, settings=SMALL)
    assert staging.is_dir() and not left.exists()


def test_only_the_process_that_made_a_folder_calls_it_new(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one finishes while this one waits for the lock."""
    data = data_config(make_folder(TEXTS))
    take, others = staging_module._take, []

    def wait_for_another(path: Path, status: Any) -> Any:
        if not others:
            others.append(None)
            others[0] = prepare_path(data)
        return take(path, status)

    monkeypatch.setattr(staging_module, "_take", wait_for_another)
    assert not prepare_path(data).is_new and others[0].is_new


@pytest.mark.parametrize(("number", "is_tolerated"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_flush_folders_will_do(
    make_folder: MakeFolder, data_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, number: int, is_tolerated: bool
) -> None:
    flush = os.fsync

    def fsync(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(number, os.strerror(number))
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    data = data_config(make_folder(TEXTS))
    if is_tolerated:
        assert len(prepare_path(data).train.tokens) > 0
    else:
        with pytest.raises(StorageError, match="Input/output error"):
            prepare_path(data)
