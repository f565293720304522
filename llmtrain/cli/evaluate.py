"""`llmtrain evaluate RUN [data=…]`: the loss of a checkpoint on validation text, the run's own or other."""

from __future__ import annotations

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import compose, run_folder
from llmtrain.cli.session import open_console


def run(arguments: Arguments) -> int:
    """Score the newest checkpoint, or that of `evaluate.step`, and print what came out."""
    composed, folder = compose(arguments), run_folder(arguments)
    with open_console(composed.config.output) as console:
        console.status(f"scoring {folder}")
        from llmtrain.train.saved_run import evaluate_run

        result = evaluate_run(folder, composed, console.status)
        width = max(map(len, result))
        shown = {name: f"{value:,.4f}" if isinstance(value, float) else str(value) for name, value in result.items()}
        console.block("evaluate", [f"{name:{width}}  {text}" for name, text in shown.items()])
        console.document(result)
    return 0
