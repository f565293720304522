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
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.READER_GONE
    except Exception:
        traceback.print_exc()
        print(f"this is a fault of llmtrain {__version__}, not of your config: please report the lines above", file=sys.stderr)
        return ExitCode.FAULT


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
