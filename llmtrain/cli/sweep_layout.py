"""A sweep before its first job: what the swept words come to, where each job goes, and the command that runs it."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.cli.arguments import Arguments
from llmtrain.cli.request import refuse_unread
from llmtrain.cli.verbs import VERBS
from llmtrain.config.compose import Composed, compose_config
from llmtrain.config.errors import ConfigError, Problem
from llmtrain.config.paths import user_path
from llmtrain.config.sweep import Job, expand_sweep, split_word
from llmtrain.dist.world import LaunchFacts, read_launch

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./-]*/[A-Za-z0-9_./-]*")
LONGEST_NAME = 80
"""Characters of a job's folder name that come from its changed keys."""
SET_HERE = ("run.name", "run.dir", "sweep")
"""Keys and sections that the sweep reads or sets itself: those typed are not passed on to the jobs."""


_START = "import sys; sys.path.insert(0, {first!r}); from llmtrain.__main__ import main; sys.exit(main())"


def own_command(*words: str) -> list[str]:
    """What runs this program again, from the same place: with `-m`, a file in the working folder could take the name of a module."""
    return [sys.executable, "-P", "-c", _START.format(first=sys.path[0]), *words]


@dataclass(frozen=True)
class Sweep:
    """A sweep as laid out: where it goes and what the training of each job is told."""

    folder: Path
    jobs: tuple[Job, ...]
    names: tuple[str, ...]
    """Folder name of each job below `folder`."""
    config_name: str
    config_dirs: tuple[Path, ...]
    options: tuple[str, ...]
    """The two above as they have to be typed."""
    num_slots: int
    """Jobs that run at the same time; no more than there are."""
    only: int | None
    """The one job that is to run, and in this process."""
    output: str

    def words(self, index: int) -> list[str]:
        """Overrides of a job that has a log; what it prints there has the usual form."""
        kept = [word for word in self.jobs[index].words if not _belongs(word, (*SET_HERE, "output"))]
        return [*kept, *self._place(index)]

    def command(self, index: int) -> list[str]:
        """What runs a job in a process of its own."""
        return own_command("train", *self.options, *self.words(index))

    def compose(self, index: int) -> Composed | None:
        """The config of a job; None where its values are illegal together, which is left to the job to tell."""
        try:
            return compose_config(self.words(index), config_name=self.config_name, config_dirs=self.config_dirs)
        except ConfigError:
            return None

    def plain_training(self, index: int, positions: Sequence[int]) -> Arguments:
        """The command line that makes a job a training like any other.

        Args:
            index: number of the job.
            positions: place of each word of the sweep on the command line, for messages.
        """
        typed = zip(self.jobs[index].words, positions, strict=True)
        kept = [(word, position) for word, position in typed if not _belongs(word, SET_HERE)]
        kept += [(word, max(positions, default=1)) for word in self._place(index)]
        return Arguments(
            words=[word for word, _ in kept],
            positions=[position for _, position in kept],
            config_dirs=list(self.config_dirs),
            config_name=self.config_name,
        )

    def _place(self, index: int) -> list[str]:
        return [f"run.dir={quoted(self.folder)}", f"run.name={self.names[index]}"]


def lay_out(arguments: Arguments) -> Sweep:
    """Expand the swept words and name folder and jobs.

    Raises:
        ConfigError: no job composes; the words sweep what all jobs share, or set what a training does not read; several ranks were
            started, each of which would run the whole sweep; `sweep.only` is no job of a sweep with a name.
    """
    refuse_unread(VERBS[arguments.verb], arguments.words, multirun=True)
    jobs = tuple(expand_sweep(arguments.words, config_dirs=arguments.config_dirs))
    for key in jobs[0].changed:
        if _belongs(key, (*SET_HERE, "output")):
            raise ConfigError(
                Problem(f"{key} swept", "one value for the whole sweep", f"sweep other keys, give {key} one value")
            )
    composed = _first_that_composes(jobs, arguments)
    run, sweep = composed.config.run, composed.config.sweep
    if sweep.only is None:
        _refuse_ranks(read_launch(os.environ, None))
    else:
        _check_only(sweep.only, sweep.jobs, len(jobs), run.name, composed.origins)
    return Sweep(
        folder=user_path(run.dir, f"run.dir={run.dir}") / (run.name or _default_name(composed)),
        jobs=jobs,
        names=tuple(f"{index}{job_suffix(job.changed)}" for index, job in enumerate(jobs)),
        config_name=arguments.config_name,
        config_dirs=tuple(arguments.config_dirs),
        options=composed.options,
        num_slots=min(sweep.jobs, len(jobs)),
        only=sweep.only,
        output=composed.config.output,
    )


def job_suffix(changed: Mapping[str, str]) -> str:
    """The changed keys as part of a folder name: `-precision-bf16-optimizer.lr-0.001`.

    No `=` in it, so that the folder can be named on a command line, where a word with `=` is an override.
    """
    text = "".join(f"-{key}-{value}" for key, value in changed.items())
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text)[:LONGEST_NAME]


def quoted(text: object) -> str:
    """Text that the override grammar reads as it stands, whatever is in it; a plain path needs no quotes."""
    if _PLAIN_PATH.fullmatch(str(text)):
        return str(text)
    return "'" + str(text).replace("'", "\\'") + "'"


def _belongs(word: str, keys: Sequence[str]) -> bool:
    """Whether a word sets one of these keys, or a key of one of these sections."""
    key = split_word(word).key
    return key in keys or key.partition(".")[0] in keys


def _first_that_composes(jobs: Sequence[Job], arguments: Arguments) -> Composed:
    """A typing error is in every job and stops the sweep here; a combination that is illegal by itself becomes a row."""
    first_error: ConfigError | None = None
    for job in jobs:
        try:
            return compose_config(
                job.words,
                config_name=arguments.config_name,
                config_dirs=arguments.config_dirs,
                positions=arguments.positions,
            )
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None, "a sweep has at least one job"
    raise first_error


def _refuse_ranks(facts: LaunchFacts) -> None:
    if facts.world_size > 1:
        rule = "a sweep starts its jobs itself, and here every rank would start them all"
        cure = "the command by itself, where launch.nproc=N gives each job N ranks; or sweep.only=K, one job on these ranks"
        raise ConfigError(Problem(f"{facts.source}={facts.world_size}", rule, cure))


def _check_only(only: int, at_a_time: int, num_jobs: int, name: str | None, origins: Mapping[str, str]) -> None:
    what, origin = f"sweep.only={only}", origins.get("sweep.only", "")
    if only >= num_jobs:
        last = num_jobs - 1
        rule = f"the jobs of this sweep are numbered 0 to {last}" if last else "this sweep has one job, number 0"
        raise ConfigError(Problem(what, rule, f"sweep.only={last}", origin))
    if name is None:
        rule = "the jobs of an array go into the folder of one sweep, which they can only find by its name"
        raise ConfigError(Problem(what, rule, "run.name=NAME, the same for every job of the array", origin))
    if at_a_time > 1:
        rule = f"sweep.only={only} runs one job, and what else runs meanwhile is decided elsewhere"
        raise ConfigError(Problem(f"sweep.jobs={at_a_time}", rule, "leave it out", origins.get("sweep.jobs", "")))


def _default_name(composed: Composed) -> str:
    what = composed.groups.get("experiment") or composed.groups.get("model") or "sweep"
    return f"{what}-sweep-{time.strftime('%m%d-%H%M', time.gmtime())}-{secrets.token_hex(2)}"
