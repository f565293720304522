"""Ranks as real processes: passed-on signals, first failures, and that none is left whatever ends the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.stand_in_ranks import wait_for

from llmtrain.config.errors import ExitCode
from llmtrain.dist.failure import Failure, FailureBoard
from llmtrain.dist.spawn import RanksEnd, launch_ranks, noted_signals
from llmtrain.dist.verdict import output_file
from llmtrain.dist.world import LaunchFacts

pytestmark = pytest.mark.timeout(60)

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGINT, signal.SIG_DFL)
def ready():
    (folder / f"ready{rank}").touch()
def wait():
    while True: time.sleep(0.01)
def note(number, frame):
    with (folder / f"signals{rank}").open("a") as stream: print(number, file=stream)
def fail(kind, code, text, about=rank):
    values = dict(rank=about, host="here", pid=os.getpid(), phase="forward", step=3, microbatch=0, kind=kind, code=code, text=text,
                  reporter=rank, stacks={}, signal=None)
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(values))
    part.rename(folder / f"rank{rank}.json")
"""
FOREVER = "ready(); wait()"
DEAF = "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 10, 15)]; ready(); wait()"


class Crew:
    """Starts scripts as ranks and remembers their processes."""

    def __init__(self, folder: Path, *scripts: str, extra: Callable[[int], None] = lambda rank: None) -> None:
        self.folder = folder
        self.scripts = scripts
        self.extra = extra
        self.pids: list[int] = []

    def start(self, place: LaunchFacts) -> subprocess.Popen[bytes]:
        script = PRELUDE + textwrap.dedent(self.scripts[place.rank])
        with output_file(self.folder, place.rank).open("wb") as output:
            command = [sys.executable, "-S", "-c", script, str(self.folder), str(place.rank)]
            process = subprocess.Popen(command, process_group=0, stdout=output, stderr=output)
        self.pids.append(process.pid)
        self.extra(place.rank)
        return process

    def run(self, patience: float = 0.3) -> RanksEnd:
        places = [LaunchFacts(rank, rank, len(self.scripts), "launch.nproc") for rank in range(len(self.scripts))]
        return launch_ranks(
            places, self.start, reports=self.folder, stop_signals=STOP, patience_seconds=patience, poll_seconds=0.02
        )

    def wait_ready(self, *ranks: int) -> None:
        wait_for(lambda: all((self.folder / f"ready{rank}").exists() for rank in ranks or range(len(self.scripts))))

    def signals(self, rank: int) -> list[int]:
        file = self.folder / f"signals{rank}"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def codes(self, end: RanksEnd) -> list[int | None]:
        return [one.code for one in end.ends]


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    made: list[Crew] = []

    def make(*scripts: str, **options: Callable[[int], None]) -> Crew:
        made.append(Crew(tmp_path, *scripts, **options))
        return made[-1]

    yield make
    left = [pid for one in made for pid in one.pids if is_there(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    assert not left, "processes, or zombies, that outlive the launcher's call"


def is_there(pid: int) -> bool:
    """Whether a process or zombie has this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_running(pid: int) -> bool:
    """As `is_there`, without zombies, which are somebody else's to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def meanwhile() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs something beside the launcher, which needs the main thread; what goes wrong there fails the test."""
    threads, errors = [], []

    def begin(act: Callable[[], None]) -> None:
        def run() -> None:
            try:
                act()
            except BaseException as error:
                errors.append(error)
                os.kill(os.getpid(), signal.SIGALRM)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize(
    "codes, code",
    [((0, 0, 0), ExitCode.DONE), ((75, 75), ExitCode.REQUEUE), ((0, 75), ExitCode.REQUEUE), ((75, 0), ExitCode.REQUEUE)],
)
def test_ranks_that_end_well_give_their_code(crew: Callable[..., Crew], codes: Sequence[int], code: ExitCode) -> None:
    end = crew(*(f"sys.exit({code})" for code in codes)).run()
    assert (end.verdict.code, end.verdict.failure, end.verdict.message, end.is_told) == (code, None, "", True)


def test_the_others_may_go_on_after_one_that_ended_well(crew: Callable[..., Crew]) -> None:
    one = crew("time.sleep(1.0)", "sys.exit(0)")
    assert one.codes(one.run(patience=0.1)) == [0, 0]


@pytest.mark.parametrize("number", STOP)
def test_a_signal_reaches_every_rank_once(
    crew: Callable[..., Crew], meanwhile: Callable[[Callable[[], None]], None], number: signal.Signals
) -> None:
    handle = "[signal.signal(n, note) for n in (1, 2, 10, 15)]; ready()\n"
    handle += "while not (folder / f'signals{rank}').exists(): time.sleep(0.01)\ntime.sleep(0.3); sys.exit(75)"
    one = crew(handle, handle, handle)

    def act() -> None:
        one.wait_ready()
        os.kill(os.getpid(), number)

    meanwhile(act)
    end = one.run()
    assert end.verdict.code is ExitCode.REQUEUE and end.verdict.message == ""
    assert [one.signals(rank) for rank in range(3)] == [[number]] * 3


def test_a_second_ctrl_c_is_passed_on_too(crew: Callable[..., Crew], meanwhile: Callable[[Callable[[], None]], None]) -> None:
    script = """
        def twice(number, frame):
            note(number, frame)
            if len((folder / f'signals{rank}').read_text().split()) == 2: os._exit(130)
        signal.signal(signal.SIGINT, twice); ready(); wait()
    """
    one = crew(script, script)

    def act() -> None:
        one.wait_ready()
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: bool(one.signals(0) and one.signals(1)))
        os.kill(os.getpid(), signal.SIGINT)

    meanwhile(act)
    end = one.run()
    assert (end.verdict.code, end.verdict.failure, end.verdict.message) == (ExitCode.INTERRUPTED, None, "interrupted")
    assert one.signals(0) == one.signals(1) == [signal.SIGINT] * 2


def test_b55_a_signal_before_all_ranks_are_started_reaches_all(crew: Callable[..., Crew]) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: (note(15, None), sys.exit(75))); ready(); wait()"

    def extra(rank: int) -> None:
        wait_for((one.folder / f"ready{rank}").exists)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    one = crew(script, script, script, extra=extra)
    end = one.run()
    assert one.codes(end) == [75] * 3 and [one.signals(rank) for rank in range(3)] == [[15]] * 3


def test_signals_that_come_together_all_arrive(crew: Callable[..., Crew]) -> None:
    script = "[signal.signal(n, note) for n in (1, 2, 10, 15)]; ready()\n"
    script += "while (len((folder / f'signals{rank}').read_text().split()) if (folder / f'signals{rank}').exists() else 0) < 3: time.sleep(0.01)"

    def extra(rank: int) -> None:
        wait_for((one.folder / f"ready{rank}").exists)
        if rank == 1:
            for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGINT):
                os.kill(os.getpid(), number)

    one = crew(script, script, extra=extra)
    one.run()
    assert one.signals(0) == one.signals(1) == [signal.SIGUSR1, signal.SIGINT, signal.SIGINT]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, ExitCode.REQUEUE), (signal.SIGINT, ExitCode.INTERRUPTED)])
def test_ranks_that_cannot_catch_the_signal_yet_are_stopped_and_not_lost(
    crew: Callable[..., Crew], meanwhile: Callable[[Callable[[], None]], None], number: signal.Signals, code: ExitCode
) -> None:
    one = crew(FOREVER, DEAF)

    def act() -> None:
        one.wait_ready()
        os.kill(os.getpid(), number)

    meanwhile(act)
    end = one.run()
    assert one.codes(end) == [-number, -signal.SIGKILL]
    assert (end.verdict.code, end.verdict.failure, end.is_told) == (code, None, False)
    assert end.verdict.message == ("interrupted" if number == signal.SIGINT else "stopped by SIGTERM")


def test_ranks_take_as_long_as_they_need_after_a_signal(
    crew: Callable[..., Crew], meanwhile: Callable[[Callable[[], None]], None]
) -> None:
    slow = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.0), sys.exit(75))); ready(); wait()"
    one = crew(slow, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); ready(); wait()")

    def act() -> None:
        one.wait_ready()
        os.kill(os.getpid(), signal.SIGTERM)

    meanwhile(act)
    assert one.codes(one.run(patience=0.1)) == [75, 75]


def test_b54_a_killed_rank_ends_the_run_and_is_named(
    crew: Callable[..., Crew], meanwhile: Callable[[Callable[[], None]], None]
) -> None:
    one = crew(FOREVER, FOREVER, "print('\\n'.join(f'line {n}' for n in range(30)), flush=True); ready(); wait()")

    def act() -> None:
        one.wait_ready()
        os.kill(one.pids[2], signal.SIGKILL)

    meanwhile(act)
    end = one.run()
    failure = end.verdict.failure
    assert end.verdict.code is ExitCode.LOST and failure is not None and not end.is_told
    assert (failure.rank, failure.kind, failure.signal, failure.pid) == (2, "lost", signal.SIGKILL, one.pids[2])
    assert failure.text.splitlines()[1:] == [f"line {n}" for n in range(10, 30)]


def test_b54_survivors_that_ignore_everything_do_not_hold_up_the_end(crew: Callable[..., Crew]) -> None:
    one = crew(DEAF, "time.sleep(0.5); sys.exit(3)", DEAF)
    places = [LaunchFacts(rank, rank, 3, "launch.nproc") for rank in range(3)]
    began = time.monotonic()
    end = launch_ranks(places, one.start, reports=one.folder, stop_signals=STOP)
    assert time.monotonic() - began < 10 and one.codes(end) == [-signal.SIGKILL, 3, -signal.SIGKILL]
    assert end.verdict.failure is not None and end.verdict.failure.rank == 1 and end.verdict.code is ExitCode.FAULT


def test_survivors_may_end_by_themselves_within_the_patience(crew: Callable[..., Crew]) -> None:
    one = crew("time.sleep(0.5); (folder / 'tidied').touch(); sys.exit(71)", "fail('crash', 70, 'Traceback'); os._exit(70)")
    end = one.run(patience=20)
    assert one.codes(end) == [71, 70] and (one.folder / "tidied").exists() and end.seconds < 15


def test_the_others_learn_why_a_rank_is_gone(crew: Callable[..., Crew]) -> None:
    wait = "while not (folder / 'first.json').exists(): time.sleep(0.01)\n(folder / 'known').write_text((folder / 'first.json').read_text())"
    one = crew(wait + "; sys.exit(71)", "os.kill(os.getpid(), 9)")
    end = one.run(patience=20)
    failure = FailureBoard(None, one.folder).first()
    assert failure is not None and failure == end.verdict.failure and (failure.rank, failure.signal) == (1, signal.SIGKILL)


def test_a_rank_that_left_word_and_does_not_end_is_ended(crew: Callable[..., Crew]) -> None:
    end = crew(FOREVER, "fail('error', 74, 'error: disk full'); wait()").run()
    assert end.verdict.failure is not None and end.verdict.failure.text == "error: disk full"
    assert end.verdict.code is ExitCode.STORAGE


def test_what_a_dead_rank_started_ends_with_it(crew: Callable[..., Crew]) -> None:
    script = """
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        (folder / "child.part").write_text(str(child.pid)); (folder / "child.part").rename(folder / "child")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    one = crew("sys.exit(0)", script)
    one.run()
    child = int((one.folder / "child").read_text())
    wait_for(lambda: not is_running(child), 5)


@pytest.mark.parametrize("error", [OSError("no more processes"), KeyboardInterrupt()])
def test_ranks_are_ended_when_another_cannot_be_started(crew: Callable[..., Crew], error: BaseException) -> None:
    def extra(rank: int) -> None:
        if rank == 1:
            raise error

    one = crew(DEAF, DEAF, DEAF, extra=extra)
    with pytest.raises(type(error)):
        one.run()
    assert len(one.pids) == 2 and not is_there(one.pids[0])
    # The other was never handed over.
    os.killpg(one.pids[1], signal.SIGKILL)
    os.waitpid(one.pids[1], 0)


def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    rank = "import os, signal, sys, time, pathlib; from llmtrain.dist.spawn import end_with_launcher\n"
    rank += "assert end_with_launcher(int(sys.argv[2])); me = pathlib.Path(sys.argv[1])\n"
    rank += "def save(*_): time.sleep(0.2); me.with_suffix('.saved').touch(); sys.exit(75)\n"
    rank += "signal.signal(signal.SIGTERM, save); me.with_suffix('.part').write_text(str(os.getpid()))\n"
    rank += "me.with_suffix('.part').rename(me); time.sleep(600)"
    launcher = f"""
import os, pathlib, signal, subprocess, sys
from llmtrain.dist.spawn import launch_ranks
from llmtrain.dist.world import LaunchFacts
folder = pathlib.Path(sys.argv[1])
def start(place):
    return subprocess.Popen([sys.executable, "-c", {rank!r}, str(folder / f"rank{{place.rank}}"), str(os.getpid())], process_group=0)
launch_ranks([LaunchFacts(0, 0, 2, ""), LaunchFacts(1, 1, 2, "")], start, reports=folder, stop_signals=(signal.SIGTERM,))
"""
    process = subprocess.Popen([sys.executable, "-c", launcher, str(tmp_path)])
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    try:
        wait_for(lambda: all(file.exists() for file in files))
        pids = [int(file.read_text()) for file in files]
        process.kill()
        process.wait()
        wait_for(lambda: not any(is_running(pid) for pid in pids), 10)
        assert all(file.with_suffix(".saved").exists() for file in files)
    finally:
        process.kill()
        process.wait()
        for file in files:
            with suppress(FileNotFoundError, ProcessLookupError):
                os.killpg(int(file.read_text()), signal.SIGKILL)


def test_a_launcher_that_died_first_is_noticed() -> None:
    # In a process of its own: what is arranged would hold for this one until its end.
    script = "import os, sys; from llmtrain.dist.spawn import end_with_launcher as end\n"
    script += "print(end(os.getppid()), end(os.getppid() + 1))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_handlers_come_back_and_an_ignored_hangup_stays_so() -> None:
    before = [signal.getsignal(number) for number in STOP]
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with noted_signals(STOP) as noted:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
        assert noted == [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert [signal.getsignal(number) for number in STOP] == before


def test_how_a_rank_ended_is_known_although_sigchld_was_ignored(crew: Callable[..., Crew]) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert crew("sys.exit(65)", "sys.exit(0)").run().verdict.code is ExitCode.DATA
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_nothing_here_needs_torch() -> None:
    script = "import sys, llmtrain.dist.spawn, llmtrain.train.launch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_failure_records_of_the_scripts_here_are_those_of_the_ranks(tmp_path: Path) -> None:
    script = PRELUDE + "fail('hang', 71, 'stands')"
    subprocess.run([sys.executable, "-S", "-c", script, str(tmp_path), "1"], check=True)
    values = json.loads((tmp_path / "rank1.json").read_text())
    assert Failure.from_dict(values).to_dict() == values
