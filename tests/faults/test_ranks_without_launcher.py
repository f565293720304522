"""Ranks that a script, torchrun or srun has started: nobody of llmtrain looks on, and still the job ends soon and says why, once."""

import itertools
import json
import re
import signal
import socket
import time
from dataclasses import dataclass

import pytest
from helpers.rank_faults import Fault, SignalAt
from helpers.rank_jobs import assert_same_run, run_command
from helpers.ranks import RanksFailedError
from helpers.runs import run_words
from torch.distributed import TCPStore

from llmtrain.config.errors import ExitCode

TIMEOUT_SECONDS = 4
SLACK_SECONDS = 20
"""For the start of the ranks and the end of the others, on a machine that does other things as well."""
KNOWN_SECONDS = 1.2
"""Longer than beats are apart: the others know where a rank is that dies without a word."""
WORDS = (
    "train.steps=5",
    "accumulation.global_batch_size=6",
    "accumulation.micro_batch_size=1",
    "model.dropout.residual=0.1",
    "train.eval_every=1",
    "train.eval_tokens=96",
    "checkpoint.every=1",
    f"launch.timeout_seconds={TIMEOUT_SECONDS}",
)
PLACES = ("start-up", "batch", "forward", "backward", "evaluate", "save")
PHASES = {"start-up": "data"}
"""What llmtrain calls a place, where it has another word for it."""
KINDS = ("raise", "refuse", "hang", "stop", "kill")
QUICK = [
    ("raise", 1, "start-up", "own"),
    ("raise", 0, "forward", "own"),
    ("raise", 1, "save", "served"),
    ("refuse", 1, "backward", "own"),
    ("refuse", 0, "batch", "served"),
    ("hang", 0, "forward", "own"),
    ("hang", 1, "evaluate", "served"),
    ("stop", 1, "batch", "own"),
    ("stop", 0, "backward", "own"),
    ("kill", 1, "forward", "own"),
    ("kill", 0, "backward", "own"),
    ("kill", 0, "evaluate", "served"),
]
OTHERS = [drill for drill in itertools.product(KINDS, (0, 1), PLACES, ("own", "served")) if drill not in QUICK]
DRILLS = [*QUICK, *(pytest.param(*drill, marks=pytest.mark.slow) for drill in OTHERS)]
SCREEN = re.compile(r"^rank \d+ of \d+ \(host ", re.MULTILINE)
"""How the screen begins that says why a run ends."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended, and what stands on their terminals."""

    codes: list[int]
    seconds: float
    terminals: list[str]

    @property
    def told(self) -> str:
        return "\n".join(self.terminals)


class Cluster:
    """Starts ranks and gives them a place to meet, and nothing more."""

    def __init__(self, ranks):
        self._ranks = ranks
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, words, size, *, store="own", plants=(), job="a job"):
        """All ranks, without waiting; with store=served rank 0 does not serve the store, and a second start of a `job` finds the old keys."""
        if store == "own":
            environ = {"MASTER_PORT": str(free_port())}
        else:
            environ = {
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": job,
            }
        options = {"environ": environ, "launched": False, "timeout": 60.0, "grace": SLACK_SECONDS}
        return self._ranks.start(run_command, size, tuple(words), tuple(plants), **options)

    def end(self, job):
        """The end of a job; each rank has to come to its own by itself."""
        try:
            ended = job.wait()
            if ended.late or ended.left:
                raise RanksFailedError(job.told())
            terminals = [(job.folder / f"rank{rank}.out").read_text() for rank in range(len(job.pids))]
            return Ended(ended.codes, max(ended.seconds), terminals)
        finally:
            self._ranks.finish(job)

    def run(self, words, size, **options):
        return self.end(self.start(words, size, **options))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def kill_when_alone(job, rank):
    """What torchrun and srun do with a rank that still stands when others have failed."""
    deadline = time.monotonic() + SLACK_SECONDS
    others = [other for other in range(len(job.pids)) if other != rank]
    while any(job.signal(f"rank{other}", 0) for other in others) and time.monotonic() < deadline:
        time.sleep(0.05)
    job.signal(f"rank{rank}", signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(ranks):
    return Cluster(ranks)


@pytest.fixture(scope="module")
def calm(cluster, text, runs):
    """The undisturbed run; also prepares the data."""
    ended = cluster.run(run_words(text, runs, "calm", *WORDS), 2)
    assert ended.codes == [ExitCode.DONE] * 2, ended.told
    return runs / "calm"


@pytest.fixture(scope="module")
def board():
    """Seconds and exit codes by drill; printed at the end."""
    rows = {}
    yield rows
    print(f"\n{sum(right for right, *_ in rows.values())} of {len(rows)} drills ended as they have to")
    for drill, (right, seconds, codes) in rows.items():
        print(f"  {'right' if right else 'WRONG'} after {seconds:5.2f} s, exit codes {codes}: {' '.join(map(str, drill))}")


def assert_told(kind, rank, size, phase, told):
    """One screen, or one message, on all terminals together."""
    count = len(SCREEN.findall(told))
    if kind == "refuse":
        assert told.count(f"error: planted on rank {rank}\n") == 1 and count <= 1, told
        assert "Traceback" not in told, told
        return
    assert count == 1, f"{count} screens\n{told}"
    assert re.search(rf"^rank {rank} of {size} \(host .*\s+in\s+phase\s+{phase}[ ,]", told, re.MULTILINE), told
    assert not re.search("^error: ", told, re.MULTILINE), f"told a second time, as a message\n{told}"
    if kind == "raise":
        assert told.count(f"RuntimeError: planted on rank {rank}\n") == told.count("Traceback") == 1, told
    else:
        assert "Traceback" not in told, told
    if kind in ("raise", "hang"):
        assert "in planted" in told, "the stack is shown"


@pytest.mark.parametrize("kind, rank, place, store", DRILLS)
def test_b54_fault_of_one_rank_ends_all_and_is_told_once(cluster, calm, text, runs, board, kind, rank, place, store):
    drill, name, phase = (kind, rank, place, store), f"{kind}-{rank}-{place}-{store}", PHASES.get(place, place)
    words = run_words(text, runs, name, *WORDS)
    after = KNOWN_SECONDS if kind in ("stop", "kill") else 0.0
    fault = Fault(rank, place, kind, step=0 if place == "start-up" else 3, after=after)
    job = cluster.start(words, 2, store=store, plants=[fault], job=name)
    if kind == "stop":
        kill_when_alone(job, rank)
    ended = cluster.end(job)
    board[drill] = (False, ended.seconds, ended.codes)
    code = {"raise": ExitCode.FAULT, "refuse": ExitCode.STORAGE}.get(kind, ExitCode.LOST)
    assert ended.codes[rank] == (-signal.SIGKILL if kind in ("stop", "kill") else code), ended.told
    assert ended.codes[1 - rank] == code, ended.told
    assert_told(kind, rank, 2, phase, ended.told)
    assert ended.seconds < SLACK_SECONDS + TIMEOUT_SECONDS
    if place != "start-up":
        status = json.loads((runs / name / "status.json").read_text())
        assert status["code"] == code, status
        assert f"rank {rank}" in status["reason"], status
        assert kind == "refuse" or f"{phase} of step 3" in ended.told.replace("\n ", ""), ended.told
        assert f"run.name={name}" in ended.told.rpartition("go on  ")[2] or kind == "refuse", (
            "the command that goes on is shown"
        )
    again = cluster.run(words, 2, store=store, job=name)
    assert again.codes == [ExitCode.DONE] * 2, again.told
    assert_same_run(runs / name, calm)
    board[drill] = (True, ended.seconds, ended.codes)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["kill", pytest.param("raise", marks=pytest.mark.slow), pytest.param("hang", marks=pytest.mark.slow)]
)
def test_b54_one_of_three_is_told_once(cluster, calm, text, runs, rank, kind):
    words = run_words(text, runs, f"three-{kind}-{rank}", *WORDS)
    ended = cluster.run(words, 3, plants=[Fault(rank, "backward", kind, after=KNOWN_SECONDS)])
    code = ExitCode.FAULT if kind == "raise" else ExitCode.LOST
    assert ended.codes == [-signal.SIGKILL if kind == "kill" and other == rank else code for other in range(3)], ended.told
    assert_told(kind, rank, 3, "backward", ended.told)
    status = json.loads((runs / f"three-{kind}-{rank}" / "status.json").read_text())
    assert status["code"] == code and f"rank {rank}" in status["reason"], status


@pytest.mark.parametrize(
    "number, rank, store",
    [
        (signal.SIGTERM, 1, "own"),
        (signal.SIGINT, 0, "own"),
        pytest.param(signal.SIGTERM, 0, "served", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 0, "own", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, "own", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, "served", marks=pytest.mark.slow),
    ],
)
def test_stop_signal_before_the_training_is_no_failure(cluster, calm, text, runs, number, rank, store):
    name = f"early-{number.name}-{rank}-{store}"
    words = run_words(text, runs, name, *WORDS)
    ended = cluster.run(words, 2, store=store, plants=[SignalAt(rank, "start-up", number, "rank", step=0)], job=name)
    assert ended.codes == [ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.REQUEUE] * 2, ended.told
    assert not SCREEN.search(ended.told) and "Traceback" not in ended.told, ended.told
    assert ended.told.count("interrupted" if number == signal.SIGINT else f"stopped by {number.name}") == 1, ended.told
    again = cluster.run(words, 2, store=store, job=name)
    assert again.codes == [ExitCode.DONE] * 2, again.told
    assert_same_run(runs / name, calm)


@pytest.mark.parametrize(
    "number, rank, place, store",
    [
        (signal.SIGTERM, 1, "backward", "own"),
        (signal.SIGUSR1, 0, "evaluate", "served"),
        pytest.param(signal.SIGINT, 1, "save", "own", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0, "batch", "own", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, "forward", "served", marks=pytest.mark.slow),
    ],
)
def test_b55_stop_signal_to_one_rank_saves_and_ends_all(cluster, calm, text, runs, number, rank, place, store):
    name = f"stop-{number.name}-{rank}-{place}-{store}"
    words = run_words(text, runs, name, *WORDS)
    ended = cluster.run(words, 2, store=store, plants=[SignalAt(rank, place, number, "rank")], job=name)
    assert ended.codes == [ExitCode.REQUEUE] * 2, ended.told
    assert not SCREEN.search(ended.told) and "Traceback" not in ended.told, ended.told
    status = json.loads((runs / name / "status.json").read_text())
    assert status["code"] == ExitCode.REQUEUE and status["reason"] == f"stopped by {number.name}" and status["step"] >= 2
    again = cluster.run(words, 2, store=store, job=name)
    assert again.codes == [ExitCode.DONE] * 2, again.told
    assert_same_run(runs / name, calm)
