"""The processes that tokenize: light, deterministic, gone when they should be, and understandable when they die."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import ROOT

from llmtrain.config.errors import DataError
from llmtrain.config.typed_data import ByteTokenizerConfig, DataConfig, OnBad, PrepareConfig, RecordData
from llmtrain.data import workers as workers_module
from llmtrain.data.framing import Framing
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.meter import PreparationMeter
from llmtrain.data.prepare import find_preparation, prepare
from llmtrain.data.record_units import SourceStamp, Storage, Unit
from llmtrain.data.shards import ShardSettings
from llmtrain.data.sources import Document, SourceFile
from llmtrain.data.tokenizer import ByteTokenizer
from llmtrain.data.units import RecordUnit, TextUnit, find_text
from llmtrain.data.worker import Progress
from llmtrain.data.workers import choose_workers, make_shards

MakeRecords = Callable[[Sequence[str]], Path]
MakeConfig = Callable[..., DataConfig]
TEXTS = [f"document {i} " * 20 for i in range(40)]


def settings_in(folder: Path) -> ShardSettings:
    folder.mkdir(exist_ok=True)
    return ShardSettings(folder, "key", ByteTokenizer(), Framing(None, None), OnBad.ERROR)


def test_a_worker_imports_no_torch() -> None:
    code = "import sys, llmtrain.data.worker; print({'torch', 'rich', 'hydra'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_number_of_workers() -> None:
    cores = len(os.sched_getaffinity(0))
    assert choose_workers(None, 1 << 20, 100) == 1, "small text is done before a process has started"
    assert 1 <= choose_workers(None, 1 << 30, 1000) <= cores
    assert choose_workers(None, 1 << 30, 1) == 1
    assert choose_workers(7, 10, 100) == 7 and choose_workers(7, 10, 3) == 3


def test_every_unit_is_made_once_and_reported(make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path) -> None:
    units = find_text(data_config(make_records(TEXTS)).source, 500).units(True)  # type: ignore[arg-type]
    assert len(units) > 6
    finished: list[int] = []
    total = {}

    def report(index: int, progress: Progress, is_finished: bool) -> None:
        total[index] = progress
        finished.extend([index] if is_finished else [])

    found = make_shards(settings_in(tmp_path / "many"), units, 3, report)
    assert [facts["index"] for facts in found] == list(range(len(units))) == sorted(finished)
    assert sum(progress.source_bytes for progress in total.values()) == sum(map(len, TEXTS))
    assert found == make_shards(settings_in(tmp_path / "one"), units, 1, lambda *facts: None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that a test's workers are."""
    processes: list[subprocess.Popen[bytes]] = []
    start = workers_module._start

    def note() -> Any:
        worker = start()
        processes.append(worker.process)
        return worker

    monkeypatch.setattr(workers_module, "_start", note)
    return processes


def are_gone(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Whether there were processes, and all of them have ended and are collected."""
    return bool(processes) and all(process.returncode is not None for process in processes)


def test_a_killed_worker_is_an_error_that_says_how_to_go_on(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """As the kernel does when memory runs out: workers are killed while they have units."""
    units = find_text(data_config(make_records(TEXTS)).source, 300).units(True)  # type: ignore[arg-type]

    def kill_them(index: int, progress: Progress, is_finished: bool) -> None:
        for process in started if is_finished else []:
            process.send_signal(signal.SIGKILL)

    with pytest.raises(DataError, match="a worker process ended in unit") as caught:
        make_shards(settings_in(tmp_path / "shards"), units, 2, kill_them)
    problem = caught.value.problems[0]
    assert "killed by SIGKILL (exit code 137)" in problem.rule and "memory" in problem.rule
    assert "records.jsonl" in problem.what and "the same command goes on" in problem.cure
    assert are_gone(started)
    assert list((tmp_path / "shards").glob("shard-*.json")), "what was finished is kept"
    make_shards(settings_in(tmp_path / "shards"), units, 2, lambda *facts: None)


def test_a_worker_that_cannot_start_says_why(
    make_records: MakeRecords,
    data_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[subprocess.Popen[bytes]],
) -> None:
    monkeypatch.setattr(workers_module, "_COMMAND", "raise SystemExit('no such interpreter')")
    units = find_text(data_config(make_records(TEXTS)).source, 500).units(True)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="exit code 1; no such interpreter"):
        make_shards(settings_in(tmp_path / "shards"), units, 2, lambda *facts: None)
    assert are_gone(started)


def test_what_goes_wrong_in_a_worker_arrives_as_it_would_here(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path
) -> None:
    beat = Heartbeat(lambda line: None)
    messages = []
    for workers in (1, 2):
        data = data_config(make_records([*TEXTS, "raw:[1]"]), cache_dir=str(tmp_path / str(workers)))
        with pytest.raises(DataError) as caught:
            prepare(find_preparation(data, ByteTokenizerConfig(), PrepareConfig(None, workers, 500), beat), beat)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "records.jsonl:41" in messages[0]


def test_a_disk_error_in_a_worker_is_an_os_error(make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path) -> None:
    units = find_text(data_config(make_records(TEXTS)).source, 500).units(True)  # type: ignore[arg-type]
    settings = settings_in(tmp_path / "shards")
    (tmp_path / "shards").rmdir()
    (tmp_path / "shards").write_text("no folder")
    with pytest.raises(NotADirectoryError):
        make_shards(settings, units, 2, lambda *facts: None)


def test_ctrl_c_ends_all_workers(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    units = find_text(data_config(make_records(TEXTS)).source, 300).units(True)  # type: ignore[arg-type]

    def interrupt(*facts: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shards(settings_in(tmp_path / "shards"), units, 2, interrupt)
    assert are_gone(started)


def test_stop_signals_mean_nothing_to_a_worker_itself(
    make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """A terminal or a scheduler sends them to all; were a worker to die of one, that might be told instead of the interruption."""
    units = find_text(data_config(make_records(TEXTS)).source, 300).units(True)  # type: ignore[arg-type]

    def signal_workers(index: int, progress: Progress, is_finished: bool) -> None:
        for process in started if is_finished else []:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                process.send_signal(number)

    with workers_module._started(1, settings_in(tmp_path / "shards")) as workers:
        assert len(workers_module._hand_out(workers, units, signal_workers)) == len(units)


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """The parent is killed while its workers wait for more text than they will ever get."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from llmtrain.data import workers\n"
        "from llmtrain.data.framing import Framing\n"
        "from llmtrain.data.shards import ShardSettings\n"
        "from llmtrain.data.tokenizer import ByteTokenizer\n"
        "from llmtrain.config.typed_data import OnBad\n"
        "settings = ShardSettings(Path('.'), '', ByteTokenizer(), Framing(None, None), OnBad.ERROR)\n"
        "with workers._started(2, settings) as started:\n"
        "    print(*(one.process.pid for one in started), flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    numbers = [int(word) for word in parent.stdout.readline().split()]
    assert len(numbers) == 2 and all(Path(f"/proc/{number}").exists() for number in numbers)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(is_running(number) for number in numbers):
        time.sleep(0.05)
    assert not any(is_running(number) for number in numbers)


def is_running(number: int) -> bool:
    """Whether a process is there and not only waiting to be collected by a parent."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def plain(path: Path, size: int) -> TextUnit:
    return TextUnit("train", ((Document(SourceFile(path, size, 0, ""), 0, size), True, True),))


def packed(path: Path, size: int) -> RecordUnit:
    source = RecordData("jsonl", str(path), None, 0.1, None, "text", OnBad.ERROR, 1 << 20)
    return RecordUnit((Unit((SourceStamp(path, path.name, size, 0, ""),), Storage.GZIP, 0, size, 0, size),), source, "train")


class Meter(PreparationMeter):
    """A meter whose clock a test sets."""

    def __init__(self, *units: Any) -> None:
        self.now = 0.0
        super().__init__(units, clock=lambda: self.now)


def test_meter_adds_up_what_units_report() -> None:
    meter = Meter(plain(Path("a"), 1_000_000), plain(Path("b"), 1_000_000), plain(Path("c"), 2_000_000))
    meter.update(0, Progress(0, 0), True)  # it was there already
    meter.now = 2.0
    meter.update(1, Progress(500_000, 100_000), False)
    assert meter.line() == "tokenizing: 38%, 0.25 MB/s, 50k tokens/s, 0:10 left"
    meter.update(1, Progress(1_000_000, 200_000), True)
    assert meter.line() == "tokenizing: 50%, 0.5 MB/s, 100k tokens/s, 0:04 left"
    meter.now = 4.0
    assert meter.line() == "tokenizing: 50%, 0.25 MB/s, 50k tokens/s, 0:08 left", "time goes on while nothing is said"
    meter.update(2, Progress(2_000_000, 1_200_000), True)
    assert meter.line().startswith("tokenizing: 100%") and meter.line().endswith("0:00 left")
    assert (meter.source_bytes, meter.tokens) == (3_000_000, 1_400_000)
    assert meter.speed() == "0.75 MB/s, 350k tokens/s"


def test_meter_tells_no_share_of_compressed_files_before_it_can() -> None:
    """Five bytes of text for each on disk: counted as they are, half of the text would be 250 %."""
    meter = Meter(packed(Path("a.gz"), 1_000_000), packed(Path("b.gz"), 3_000_000))
    meter.now = 10.0
    meter.update(0, Progress(2_500_000, 500_000), False)
    assert meter.line() == "tokenizing: 0.25 MB/s, 50k tokens/s"
    meter.update(0, Progress(5_000_000, 1_000_000), True)
    assert meter.line() == "tokenizing: 25%, 0.5 MB/s, 100k tokens/s, 0:30 left"
    meter.now = 20.0
    meter.update(1, Progress(5_000_000, 1_000_000), False)
    assert meter.line() == "tokenizing: 50%, 0.5 MB/s, 100k tokens/s, 0:20 left"


def test_a_worker_that_does_not_run_is_told(make_records: MakeRecords, data_config: MakeConfig, tmp_path: Path) -> None:
    """Stopped with its first unit: the preparation waits, and the line says for what."""
    units = find_text(data_config(make_records(TEXTS)).source, 300).units(True)  # type: ignore[arg-type]
    now, lines, stopped = [0.0], [], threading.Event()
    meter = PreparationMeter(units, clock=lambda: now[0])
    with workers_module._started(1, settings_in(tmp_path / "shards")) as workers:

        def watch() -> None:
            assert stopped.wait(30)
            lines.append(meter.line())
            now[0] = 95.0
            lines.append(meter.line())
            workers[0].process.send_signal(signal.SIGCONT)

        def stop_it(index: int, progress: Progress, is_finished: bool) -> None:
            meter.update(index, progress, is_finished)
            if not stopped.is_set():
                workers[0].process.send_signal(signal.SIGSTOP)
                stopped.set()

        thread = threading.Thread(target=watch)
        thread.start()
        workers_module._hand_out(workers, units, stop_it)
        thread.join()
    assert "nothing heard" not in lines[0]
    assert lines[1].endswith(f"; nothing heard for 1:35 of unit 0: {units[0].place}")
    assert "nothing heard" not in meter.line()


def test_a_heartbeat_repeats_the_status_and_keeps_what_is_said_apart() -> None:
    statuses, said, spoken = [], [], threading.Event()

    def progress(text: str) -> None:
        statuses.append(text)
        spoken.set()

    with Heartbeat(progress, 0.01, said.append) as beat:
        beat.status("working")
        assert spoken.wait(30)
        spoken.clear()
        numbers = itertools.count()
        beat.status(lambda: f"number {next(numbers)}")
        while "number 1" not in statuses:
            assert spoken.wait(30)
            spoken.clear()
        beat.say("done")
    assert "working" in statuses and "number 0" in statuses and said == ["done"]
