"""Jobs of a sweep played by stand-ins: what they leave behind and how they end is the test's to say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain.cli.arguments import parse_arguments
from llmtrain.config.compose import compose_config


class PlayedJob:
    """Ends with its code at the poll of that number, and leaves metrics behind then."""

    def __init__(self, stage: Stage, number: int, folder: Path, log: Path) -> None:
        self.pid = 4000 + number
        self.number = number
        self.signals: list[int] = []
        self._stage, self._folder, self._log = stage, folder, log
        self._num_polls = 0
        self.code: int | None = None

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)

    def poll(self) -> int | None:
        self._num_polls += 1
        if self.code is None and self._stage.ends(self, self._num_polls):
            self.code = self._stage.codes[self.number]
            self._leave_behind()
        return self.code

    def _leave_behind(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log.write_text("loading\nerror: out of luck\n  rule  none\n")
        loss = self._stage.losses[self.number]
        if loss is not None:
            both = {"loss": 2.0, "peak_memory_bytes": 4 * 2**20}
            records = [
                {"step": 1, "loss": 3.0, "tokens_per_second": 100.0, "peak_memory_bytes": 5 * 2**20, "val_loss": 9.0},
                {"step": 2, **both, "tokens_per_second": 300.0, "val_loss": loss},
                {"step": 3, **both, "tokens_per_second": 200.0},
            ]
            (self._folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


class Stage:
    """Starts played jobs, and keeps the story.

    Args:
        codes: exit code of each job, in the order they start.
        losses: its last validation loss.
        num_polls: at which poll each ends.
    """

    def __init__(
        self, codes: Sequence[int], losses: Sequence[float | None] | None = None, num_polls: Sequence[int] | None = None
    ) -> None:
        self.codes, self.losses = codes, losses or [None] * len(codes)
        self.num_polls = num_polls or [1] * len(codes)
        self.jobs: list[PlayedJob] = []
        self.commands: list[Sequence[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.at_once: list[tuple[int, ...]] = []
        """At each start, the jobs that run, the new one included."""

    def __call__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> PlayedJob:
        parsed = parse_arguments(command[4:])
        run = compose_config(parsed.words, config_dirs=parsed.config_dirs).config.run
        job = PlayedJob(self, len(self.jobs), Path(run.dir) / str(run.name), log)
        self.jobs.append(job)
        self.commands.append(command)
        self.environments.append(environment)
        self.at_once.append(tuple(other.number for other in self.jobs if other.code is None))
        return job

    def ends(self, job: PlayedJob, poll: int) -> bool:
        """Whether a job ends at this poll of it."""
        return poll >= self.num_polls[job.number]
