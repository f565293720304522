"""A training on several ranks of this machine, from the side of the process that starts them. Needs no torch.

The config is composed here, once. Each rank gets it as a document on its standard input, and its place in its environment.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from llmtrain.checkpoint.layout import list_steps
from llmtrain.config.compose import Composed, config_from_wire
from llmtrain.config.errors import ExitCode, Problem, RankLostError, StorageError
from llmtrain.dist.failure import Failure, reason_of_run
from llmtrain.dist.failure_screen import failure_screen
from llmtrain.dist.spawn import RanksEnd, launch_ranks
from llmtrain.dist.verdict import AGREED, RunPlace, output_file, read_run
from llmtrain.dist.world import LOOPBACK, LaunchFacts, rank_environment, read_launch
from llmtrain.train.run_folder import RunFolder
from llmtrain.train.signals import STOP_SIGNALS

LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
LATER_SECONDS = 30.0
"""What ranks may take to end a hang themselves, beyond twice their time limit."""
SHOW_CURSOR, CLEAR_LINE = "\x1b[?25h", "\r\x1b[K"
# The first entry of the import path is what this process was started with; Python's own choice for `-m` would be the folder one is
# in, where a file may have the name of a module.
_RANK_SCRIPT = "import sys; sys.path.insert(0, {first!r}); from llmtrain.cli.rank import main; main()"


def launch(composed: Composed) -> ExitCode:
    """Train on `launch.nproc` ranks and see them through; what they do not say themselves is said here.

    Returns:
        DONE, REQUEUE after a signal and a save, or the code of the first failure, which has been shown.

    Raises:
        ConfigError, PlanError: what the environment says about the ranks cannot be.
        RankLostError: they cannot be started.
        StorageError: there is no room for what they report.
    """
    return launch_run(composed).verdict.code


def launch_run(composed: Composed, *, stdout: int | None = None) -> RanksEnd:
    """As `launch`, with all that is known of the end.

    Args:
        stdout: descriptor that rank 0 prints to; None = as this process.
    """
    facts = read_launch(os.environ, composed.config.launch.nproc)
    with _report_folder() as reports, closing(listen_on_loopback()) as listener:
        places = rank_places(facts, listener, reports)
        starter = _Starter(composed, listener, reports, stdout)
        # The ranks notice a hang themselves, unless all of them are held.
        still = 2 * composed.config.launch.timeout_seconds + LATER_SECONDS
        end = launch_ranks(places, starter, reports=reports, stop_signals=STOP_SIGNALS, still_seconds=still)
        _tell(end, read_run(reports), composed.config.output)
    return end


def to_document(composed: Composed) -> bytes:
    """The config with its story, to be read by `from_document` in another process."""
    document = {
        "words": composed.words,
        "options": composed.options,
        "groups": dict(composed.groups),
        "origins": dict(composed.origins),
        "wire": composed.wire,
    }
    return json.dumps(document).encode()


def from_document(data: bytes) -> Composed:
    """What `to_document` was given.

    Raises:
        ValueError: that is not what this is.
        ConfigError: the same plugins are not installed here.
    """
    document = json.loads(data)
    return Composed(
        config=config_from_wire(document["wire"]),
        wire=document["wire"],
        words=tuple(document["words"]),
        options=tuple(document["options"]),
        origins=types.MappingProxyType(document["origins"]),
        groups=types.MappingProxyType(document["groups"]),
    )


def listen_on_loopback() -> socket.socket:
    """A socket on a port that was free. Rank 0 inherits it, so nobody can take the port in between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, 0))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def rank_places(facts: LaunchFacts, listener: socket.socket, reports: Path) -> list[LaunchFacts]:
    """The place of each rank of a run that this process starts."""
    common = replace(
        facts,
        local_world_size=facts.world_size,
        master_addr=LOOPBACK,
        master_port=listener.getsockname()[1],
        run_id=secrets.token_hex(8),
        launcher_pid=os.getpid(),
        report_folder=reports,
    )
    return [
        replace(common, rank=rank, local_rank=rank, listen_fd=listener.fileno() if rank == 0 else None)
        for rank in range(facts.world_size)
    ]


@contextmanager
def _report_folder() -> Iterator[Path]:
    """A folder for what the ranks report, while they run."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="llmtrain-"))
    except OSError as error:
        raise _no_room(error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _no_room(error: OSError) -> StorageError:
    rule = error.strerror or str(error)
    return StorageError(Problem("no folder for the reports of the ranks", rule, "TMPDIR=FOLDER with some room"))


class _Starter:
    """Starts the ranks as processes of their own groups: the terminal's Ctrl-C is for the launcher, which passes it on."""

    def __init__(self, composed: Composed, listener: socket.socket, reports: Path, stdout: int | None) -> None:
        self._environ = os.environ | composed.config.launch.env
        self._environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        self._command = [sys.executable, "-P", "-c", _RANK_SCRIPT.format(first=sys.path[0])]
        self._listener = listener
        self._reports = reports
        self._stdout = stdout
        # A file and not a pipe: nobody waits for a rank to read, or to live until it has read.
        self._document = reports / "composed.json"
        try:
            self._document.write_bytes(to_document(composed))
        except OSError as error:
            raise _no_room(error) from error

    def __call__(self, place: LaunchFacts) -> subprocess.Popen[bytes]:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            return self._start_at(place)
        except OSError as error:
            cure = f"launch.nproc below {place.world_size}"
            raise RankLostError(Problem("the ranks cannot be started", error.strerror or str(error), cure)) from error

    def _start_at(self, place: LaunchFacts) -> subprocess.Popen[bytes]:
        environ = self._environ | rank_environment(place)
        with self._document.open("rb") as document:
            if place.rank > 0:
                with output_file(self._reports, place.rank).open("ab") as output:
                    return self._start(environ, stdin=document, stdout=output, stderr=output)
            rank = self._start(environ, stdin=document, stdout=self._stdout, pass_fds=(self._listener.fileno(),))
        # From here on the port is rank 0's alone: when that ends, nobody waits for an answer.
        self._listener.close()
        return rank

    def _start(self, environ: dict[str, str], **options: object) -> subprocess.Popen[bytes]:
        # A rank takes stop signals from its first own line on; one that comes earlier waits for that.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return subprocess.Popen(self._command, env=environ, process_group=0, **options)  # type: ignore[call-overload, no-any-return]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell(end: RanksEnd, run: RunPlace | None, output: str) -> None:
    """Say what rank 0 has not said: the failure's one screen, the status, and the document of output=json."""
    verdict = end.verdict
    if end.ends[0].code not in AGREED:
        _mend_terminal()
    if verdict.failure is not None:
        log = None if run is None else run.log(verdict.failure.rank)
        screen = failure_screen(
            verdict.failure,
            num_ranks=len(end.ends),
            seconds=end.failed_after,
            log=log if log is not None and log.exists() else None,
            resume=None if run is None else run.resume,
        )
        print(screen, file=sys.stderr, flush=True)
    elif verdict.message:
        print(verdict.message, file=sys.stderr, flush=True)
    reason = end_reason(end)
    if run is not None and end.ends[0].code not in AGREED:
        _keep_status(run, verdict.code, reason, verdict.failure)
    if output == "json" and not end.is_told and verdict.code is not ExitCode.READER_GONE:
        document = {"code": int(verdict.code), "reason": reason, "run": None if run is None else str(run.folder)}
        print(json.dumps(document, indent=2), flush=True)


def end_reason(end: RanksEnd) -> str:
    """Why the run ended, in one line."""
    failure = end.verdict.failure
    if failure is None:
        return end.verdict.message.partition("\n")[0].removeprefix("error: ")
    return reason_of_run(failure)


def _keep_status(run: RunPlace, code: ExitCode, reason: str, failure: Failure | None) -> None:
    """Write `status.json` where rank 0 has not written why the run ended."""
    folder = RunFolder(run.folder)
    # Where the disk is the trouble, or somebody else has begun to write there, the screen has to be enough.
    with suppress(StorageError, OSError), folder.lock():
        status = folder.read_status()
        # Of itself rank 0 knows best; where it was killed, another rank can only have written that it is gone.
        is_told = failure is None or failure.rank == failure.reporter == 0
        if status is None or status.code != code or not is_told:
            steps = list_steps(folder.checkpoints)
            folder.write_status(int(code), steps[-1] if steps else 0, reason)


def _mend_terminal() -> None:
    """A rank that ended while it drew has left the cursor hidden, behind what it drew last."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            print(f"{SHOW_CURSOR}{CLEAR_LINE}", end="", file=stream, flush=True)
