"""Entry point of `llmtrain` and `python -m llmtrain`."""

from __future__ import annotations

import sys

from llmtrain.cli.dispatch import dispatch


def main() -> int:
    """Carry out the command line and return the exit code."""
    return dispatch(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
