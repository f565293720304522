"""The folder of one run: its name, its small files, and what a start into it means.

    config.yaml       the resolved config           overrides.yaml    the words of every start
    plan.json         what was settled              environment.json  versions, platform, device
    status.json       {code, step, reason}          metrics.jsonl, checkpoints/
    imported.json     only where weights came from elsewhere and nothing was trained
    origin/           that file and what belongs to it, in a run that began with such weights

Every small file carries `format_version` and is replaced as a whole. Only the holder of `lock()` writes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import StrEnum
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import yaml

from llmtrain.checkpoint.files import Files, storage_error, write_atomic, write_file
from llmtrain.checkpoint.layout import check_format_version, list_steps
from llmtrain.config.compose import to_yaml
from llmtrain.config.errors import ConfigError, ExitCode, Problem, StorageError
from llmtrain.config.plugins import installed
from llmtrain.config.typed import ScheduleKind
from llmtrain.plan.plan import Plan, SchedulePlan
from llmtrain.plan.report import plan_to_dict
from llmtrain.train.run_changes import Change, Effect, check_horizon, find_changes, refuse_changes, with_settled_precision
from llmtrain.train.run_lock import RunLock

FORMAT_VERSION = 1
"""Of config.yaml, overrides.yaml, environment.json, status.json and imported.json."""
IMPORTED = "imported.json"

_PACKAGES = ("llmtrain", "torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tokenizers", "rich")


class Start(StrEnum):
    """What starting into a run folder means."""

    FRESH = "fresh"
    """Nothing was ever saved here."""
    RESUME = "resume"
    FINISHED = "finished"
    """All updates asked for are made: say so and leave with exit code 0."""


@dataclass(frozen=True)
class Opening:
    """The decision, and what differs from the config of the start before."""

    start: Start
    changes: tuple[Change, ...]
    message: str
    """One line for the user; empty for a fresh start."""


@dataclass(frozen=True)
class Status:
    """How the last start ended."""

    code: int | None
    """Exit code; None while the run is going on, or when it was killed."""
    step: int
    """Updates made."""
    reason: str


def resolve_run_folder(parent: Path, name: str | None, label: str, *, job_id: str | None = None) -> RunFolder:
    """The folder a run belongs into; nothing is made yet.

    Args:
        parent: `run.dir`.
        name: `run.name`; an existing folder of that name is resumed.
        label: experiment or model, the first part of a drawn name.
        job_id: of a batch job; a requeued one has the same number and so finds its folder again.

    Raises:
        ConfigError: the name would leave `parent`.
    """
    if name is not None:
        parts = PurePath(name).parts
        if not parts or PurePath(name).is_absolute() or ".." in parts or not name.isprintable():
            rule = "a folder name inside run.dir: printable, relative, without `..`"
            raise ConfigError(Problem(f"run.name={name}", rule, "run.name=demo; run.dir sets the parent folder"))
        return RunFolder(parent / name)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "run"
    if job_id is not None:
        return RunFolder(parent / f"{stem}-{job_id}")
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    while (path := parent / f"{stem}-{now}-{secrets.token_hex(2)}").exists():
        continue
    return RunFolder(path)


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path
    files: Files = field(default=Files(), repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def create(self) -> None:
        """Make the folder where it is missing and see that files can be written and removed in it.

        Raises:
            StorageError: they cannot.
        """
        probe = self.path / f".probe-{secrets.token_hex(4)}"
        try:
            for folder in (self.path, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.path.parent, self.path):
                self.files.fsync_folder(folder)
            write_file(self.files, probe, b"can this be written?")
            self.files.remove_file(probe)
        except OSError as error:
            raise storage_error(self.files, error, "use the run folder", self.path) from error

    def lock(self) -> RunLock:
        """Context in which this process is the only writer."""
        return RunLock(self.path, self.files)

    def decide(self, config: Mapping[str, Any], plan: Plan, *, origins: Mapping[str, str]) -> Opening:
        """What a start with this config means here. Writes nothing.

        Args:
            config: the plain resolved config of this start.
            plan: what it settles to.
            origins: dotted key → where it was set, for messages.

        Raises:
            ConfigError: keys changed that may not; all of them are listed, old -> new. Or the folder was imported.
            StorageError: the folder holds something else, or cannot be read.
        """
        if (self.path / IMPORTED).is_file():
            rule = "imported weights: there is no optimizer state and no place in any data to go on from"
            raise ConfigError(
                Problem(
                    f"run.name={self.path.name}",
                    rule,
                    f"model.init_from={self.path} run.name=OTHER",
                    origins.get("run.name", ""),
                )
            )
        steps = self._saved_steps()
        status = self.read_status()
        before = self.read_config()
        if before is None and steps:
            rule = f"it has checkpoints ({', '.join(map(str, steps))}) but no config.yaml, so nobody knows what made them"
            raise StorageError(Problem(f"{self.path} is no run folder", rule, "another run.name"))
        target = plan.steps if config["train"]["stop_after"] is None else min(plan.steps, config["train"]["stop_after"])
        is_done = status is not None and status.code == ExitCode.DONE and status.step >= target
        if before is None or not (steps or is_done):
            return Opening(Start.FRESH, (), "")
        reached = max([*steps, status.step if status else 0])
        changes = self._accept_changes(before, config, plan, reached, origins)
        if is_done:
            told = (
                f"all {plan.steps} updates"
                if target == plan.steps
                else f"update {target}, where train.stop_after={target} stops"
            )
            return Opening(Start.FINISHED, changes, f"{self.path} is finished: it has made {told}")
        return Opening(Start.RESUME, changes, f"resuming {self.path} (saved at {', '.join(map(str, steps))})")

    def record_start(
        self, config: Mapping[str, Any], words: Sequence[str], plan: Plan, environment: Mapping[str, Any], opening: Opening
    ) -> None:
        """Write the files that describe a start, and a status that says the run is going on."""
        starts = self._read_starts() if opening.start is Start.RESUME else []
        changed = {change.key: [change.old, change.new] for change in opening.changes}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        starts.append({"time": now, "words": list(words), "changed": changed})
        status = self.read_status() if opening.start is Start.RESUME else None
        overrides = yaml.safe_dump({"format_version": FORMAT_VERSION, "starts": starts}, sort_keys=False, allow_unicode=True)
        self._write("config.yaml", f"format_version: {FORMAT_VERSION}\n{to_yaml(config)}")
        self._write("overrides.yaml", overrides)
        self._write_json("plan.json", plan_to_dict(plan))
        self._write_json("environment.json", {"format_version": FORMAT_VERSION, **environment})
        self.write_status(None, status.step if status else 0, "running")

    def write_status(self, code: int | None, step: int, reason: str) -> None:
        """Tell scripts how the run stands.

        Args:
            code: the exit code about to be used; None while running.
            step: updates made.
            reason: one line.
        """
        self._write_json("status.json", {"format_version": FORMAT_VERSION, "code": code, "step": step, "reason": reason})

    def read_status(self) -> Status | None:
        """The last status; None when there is none.

        Raises:
            StorageError: it cannot be read, is damaged or newer.
        """
        document = self._read("status.json", "code", "step", "reason")
        return None if document is None else Status(document["code"], document["step"], document["reason"])

    def write_imported(self, document: Mapping[str, Any]) -> None:
        """Mark the folder as one whose weights were imported, and keep what an export needs to give back."""
        self._write_json(IMPORTED, {"format_version": FORMAT_VERSION, **document})

    def read_imported(self) -> dict[str, Any] | None:
        """What `write_imported` kept; None for a folder that was trained.

        Raises:
            StorageError: it cannot be read, is damaged or newer.
        """
        return self._read(IMPORTED, "model_type", "config", "generation_config", "tokenizer_fingerprint", "tokenizer_files")

    def read_config(self) -> dict[str, Any] | None:
        """The plain resolved config of the last start; None when there is none.

        Raises:
            StorageError: it cannot be read, is damaged or newer.
        """
        document = self._read("config.yaml")
        return None if document is None else {key: value for key, value in document.items() if key != "format_version"}

    def read_precision(self) -> str:
        """The precision the last start settled on (the config may say `auto`).

        Raises:
            StorageError: plan.json is missing, damaged or newer.
        """
        return str(self._read_plan("precision_name"))

    def _saved_steps(self) -> list[int]:
        try:
            return list_steps(self.checkpoints)
        except OSError as error:
            raise storage_error(self.files, error, "read", self.checkpoints) from error

    def _accept_changes(
        self, before: Mapping[str, Any], config: Mapping[str, Any], plan: Plan, reached: int, origins: Mapping[str, str]
    ) -> tuple[Change, ...]:
        changes = with_settled_precision(find_changes(before, config), self.read_precision(), plan.precision_name)
        keep_going = config["run"]["on_change"] == "continue"
        horizon = None
        if any(change.effect is Effect.HORIZON for change in changes):
            horizon = check_horizon(self._old_schedule(), plan.schedule, reached=reached, keep_going=keep_going)
        problems = refuse_changes(changes, keep_going=keep_going, horizon=horizon, where=str(self.path), origins=origins)
        if problems:
            raise ConfigError(*problems)
        return changes

    def _old_schedule(self) -> SchedulePlan:
        schedule = self._read_plan("schedule")
        try:
            return SchedulePlan(**{**schedule, "kind": ScheduleKind(schedule["kind"])})
        except (TypeError, KeyError, ValueError) as error:
            raise _spoilt(self.path / "plan.json", f"its schedule is malformed ({error})") from error

    def _read_plan(self, name: str) -> Any:
        """One entry of plan.json, which says what the last start settled on."""
        document = self._read("plan.json", name)
        if document is None:
            raise _spoilt(self.path / "plan.json", "it is missing")
        return document[name]

    def _read_starts(self) -> list[Any]:
        document = self._read("overrides.yaml", "starts")
        return [] if document is None else list(document["starts"])

    def _read(self, name: str, *required: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            text = self.files.read(path).decode()
            document = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(self.files, error, "read", path) from error
        except (ValueError, yaml.YAMLError) as error:
            raise _spoilt(path, str(error)) from error
        if not isinstance(document, dict):
            raise _spoilt(path, "it holds no keys")
        check_format_version(document, FORMAT_VERSION, path)
        if missing := [key for key in required if key not in document]:
            raise _spoilt(path, f"it lacks {', '.join(missing)}")
        return document

    def _write_json(self, name: str, document: Mapping[str, Any]) -> None:
        self._write(name, json.dumps(document, indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        write_atomic(self.files, self.path / name, text.encode())


def _spoilt(path: Path, reason: str) -> StorageError:
    return StorageError(Problem(f"cannot read {path}", reason, "restore the file, or use another run.name"))


def existing_run_folder(path: Path) -> RunFolder:
    """A run folder that a user named.

    Raises:
        StorageError: there is no run in it.
    """
    if not (path / "config.yaml").is_file():
        raise StorageError(
            Problem(f"{path} is no run folder", "a run folder holds config.yaml", "the folder printed by `llmtrain`")
        )
    return RunFolder(path)


def describe_environment(plan: Plan, device_name: str, ranks: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Content of environment.json: what a number in this run may depend on. Holds no environment variables.

    Args:
        ranks: host and threads of each, by rank.
    """
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions |= dict(one.package.rsplit(" ", 1) for one in installed())
    return {
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "device": plan.device,
        "device_name": device_name,
        "threads": plan.threads,
        "ranks": len(ranks),
        "hosts": list(dict.fromkeys(host for host, _ in ranks)),
        "threads_by_rank": [threads for _, threads in ranks],
    }
