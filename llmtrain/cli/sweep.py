"""`-m`: every combination of the swept values as a job of its own, and a table at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from llmtrain.cli import train
from llmtrain.cli.arguments import Arguments
from llmtrain.cli.sweep_jobs import run_jobs, start_process, writing
from llmtrain.cli.sweep_layout import Sweep, lay_out
from llmtrain.cli.sweep_progress import make_progress
from llmtrain.cli.sweep_share import share_machine
from llmtrain.cli.sweep_table import JobResult, table, write_csv
from llmtrain.config.errors import ExitCode
from llmtrain.metrics.sinks import finite_json
from llmtrain.train.run_lock import RunLock


def run(arguments: Arguments) -> int:
    """Run all jobs; 0 when every one ended well, 1 when any did not, 75 when the sweep was stopped.

    With `sweep.only` that job is trained here, and the exit code is that of the training.
    """
    sweep = lay_out(arguments)
    if sweep.only is not None:
        # Without the lock of the sweep: the other jobs run elsewhere at the same time, and each locks its own folder.
        return train.run(sweep.plain_training(sweep.only, arguments.positions))
    # With output=json the standard output belongs to the one document.
    screen = sys.stderr if sweep.output == "json" else sys.stdout
    at_a_time = f", {sweep.num_slots} at a time" if sweep.num_slots > 1 else ""
    print(f"llmtrain sweep · {len(sweep.jobs)} jobs{at_a_time} · {sweep.folder}", file=screen, flush=True)
    sharing = share_machine(sweep)
    with writing(sweep.folder):
        sweep.folder.mkdir(parents=True, exist_ok=True)
    with RunLock(sweep.folder):
        results, stopped = run_jobs(sweep, sharing, start_process, make_progress(screen))
    file = sweep.folder / "sweep.csv"
    with writing(file):
        write_csv(file, results)
    _show(sweep, results)
    print(f"saved  {file}", file=screen)
    if stopped:
        print(f"go on  the same command with run.name={sweep.folder.name}", file=screen)
        return ExitCode.REQUEUE
    return ExitCode.DONE if all(result.exit_code == 0 for result in results) else ExitCode.FAILED_CLAIM


def _show(sweep: Sweep, results: Sequence[JobResult]) -> None:
    if sweep.output == "json":
        document = {"folder": str(sweep.folder), "jobs": [result.to_dict() for result in results]}
        print(json.dumps(finite_json(document), indent=2, allow_nan=False))
    else:
        print("\n".join(table(results)))
