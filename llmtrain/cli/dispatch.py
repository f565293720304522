"""From a command line to an exit code: finds who carries it out, and turns what goes wrong into a message."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from llmtrain import __version__
from llmtrain.cli.arguments import Arguments, parse_arguments
from llmtrain.cli.verbs import VERBS
from llmtrain.config.errors import ExitCode, LlmtrainError, PeerError


def dispatch(argv: Sequence[str]) -> int:
    """Carry out a command line (without the program's name); never raises an `Exception`."""
    try:
        code = _carry_out(parse_arguments(argv))
        sys.stdout.flush()
        return code
    except PeerError as error:
        # Told by the rank it happened on.
        return int(error.exit_code)
    except LlmtrainError as error:
        _say_once(error, str(error))
        return int(error.exit_code)
    except KeyboardInterrupt as error:
        _say_once(error, "interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.READER_GONE
    except Exception as error:
        from llmtrain.dist.failure import FAULT_LINE

        _say_once(error, f"{traceback.format_exc()}{FAULT_LINE} (version {__version__})")
        return ExitCode.FAULT


def _say_once(error: BaseException, text: str) -> None:
    """Print what is to be said of an error, unless the rank it happened on has said it already."""
    from llmtrain.dist.failure import is_told

    if not is_told(error):
        print(text, file=sys.stderr)


def _carry_out(arguments: Arguments) -> int:
    """Import only what this command line needs: a help page or a message about a typing error must not wait for torch."""
    if arguments.version:
        print(f"llmtrain {__version__}")
        return ExitCode.DONE
    if arguments.help:
        module = "llmtrain.cli.help"
    elif arguments.completion or arguments.complete is not None:
        module = "llmtrain.cli.completion"
    elif arguments.cfg:
        module = "llmtrain.cli.show_config"
    elif arguments.multirun:
        module = "llmtrain.cli.sweep"
    else:
        module = VERBS[arguments.verb].module
    return int(import_module(module).run(arguments))
