"""One rank of a training that `launch.nproc` asked for; started by `train/launch.py` and not by people.

What goes wrong here is told by the launcher, once for all ranks: it finds the cause in the folder of reports.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from llmtrain.cli.train import carry_out
from llmtrain.config.errors import ConfigError, ExitCode, PeerError, Problem, exit_code_of
from llmtrain.dist.failure import Failure, FailureBoard
from llmtrain.dist.position import Position, read_position
from llmtrain.dist.spawn import end_with_launcher
from llmtrain.dist.verdict import position_file
from llmtrain.dist.world import LaunchFacts, read_launch
from llmtrain.train.launch import from_document
from llmtrain.train.signals import STOP_SIGNALS

STANDARD_INPUT, STANDARD_ERROR = 0, 2


def main() -> NoReturn:
    """Be the rank that the environment names, with the config that stands on standard input; end the process."""
    facts = read_launch(os.environ, None)
    if facts.launcher_pid is None or facts.report_folder is None:
        error = ConfigError(Problem("llmtrain.cli.rank", "a rank is started by its launcher", "llmtrain launch.nproc=2"))
        print(error, file=sys.stderr)
        sys.exit(ExitCode.CONFIG)
    settle_process(facts.launcher_pid)
    code = run_rank(facts)
    # How this rank ends is settled: a signal that comes now must not make something else of it.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() != facts.launcher_pid:
        # It was killed, and there is nobody else to clear this away.
        shutil.rmtree(facts.report_folder, ignore_errors=True)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # All that had to be finished is; what Python would wait for may never come to rest: threads of a library, its objects that wait
    # for another rank or abort when they go. Signals are ignored by now, and nobody else would end this process.
    os._exit(code)


def settle_process(launcher_pid: int) -> None:
    """Bind this process to its launcher, take signals from here on, and leave a stack where native code crashes.

    Ends the process where the launcher is gone already.
    """
    # A Ctrl-C while modules are imported ends without a traceback, as any other stop signal does; nothing is lost.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not end_with_launcher(launcher_pid):
        os._exit(ExitCode.LOST)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    # Not the terminal's foreground group: where the terminal stops such processes when they print, this one prints all the same.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    faulthandler.enable(STANDARD_ERROR, all_threads=True)


def run_rank(facts: LaunchFacts) -> int:
    """Train, and leave word of what goes wrong; gives the exit code."""
    try:
        code = carry_out(from_document(read_document()))
        sys.stdout.flush()
        return code
    except PeerError as error:
        return error.exit_code
    except BrokenPipeError as error:
        return exit_code_of(error)
    except BaseException as error:
        leave_word(facts, error)
        return exit_code_of(error)


def read_document() -> bytes:
    """All of standard input, which is empty from then on: nothing below may wait for somebody to type."""
    with os.fdopen(os.dup(STANDARD_INPUT), "rb") as stream:
        data = stream.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, STANDARD_INPUT)
    os.close(null)
    return data


def leave_word(facts: LaunchFacts, error: BaseException) -> None:
    """Tell the launcher of an error that nobody has told it of: one from before this rank met the others."""
    assert facts.report_folder is not None
    place = read_position(position_file(facts.report_folder, facts.rank)) or Position().snapshot()
    # Where this rank has left word already, the first one stays.
    FailureBoard(None, facts.report_folder).report(Failure.of(error, facts.rank, place))
