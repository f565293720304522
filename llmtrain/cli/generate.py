"""`llmtrain generate RUN generate.prompt=…`: text from a trained model."""

from __future__ import annotations

import itertools
import sys

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose, run_folder
from llmtrain.cli.session import open_console


def run(arguments: Arguments) -> int:
    """Print the prompt and its continuation as it comes; with output=json one document when it is complete."""
    config, folder = compose(arguments).config, run_folder(arguments)
    # In both forms standard output belongs to the result alone, so remarks go where those of a document go.
    with open_console("json") as console:
        console.status("loading the checkpoint")
        from llmtrain.metrics.format import printable
        from llmtrain.train.saved_run import generate_text

        prompt, pieces = config.generate.prompt, generate_text(folder, config)
        first = next(pieces, "")
        if config.output == "json":
            console.status("generating")
            console.document({"run": str(folder), "prompt": prompt, "text": first + "".join(pieces)})
            return 0
        # The text may go to the terminal the status is shown on, and would be drawn over.
        console.status("")
        is_screen = sys.stdout.isatty()
        for piece in itertools.chain([prompt, first], pieces):
            print(printable(piece) if is_screen else piece, end="", flush=True)
        print()
    return 0
