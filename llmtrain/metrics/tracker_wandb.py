"""Weights & Biases through a process of its own (see wandb_process.py), so that nothing wandb does can stop or change a training."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import string
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain.config.typed import WandbConfig
from llmtrain.metrics.trackers import TrackedRun, Tracker

FORMAT_VERSION = 1
"""Of trackers.json."""
PACKAGES = Path(__file__).parents[2]
"""Where this package lies."""
ID_LENGTH = 8
BACKLOG_BYTES = 1 << 24
"""Records that may wait here for the process; one has about 500 bytes."""
PIPE_BYTES = 1 << 20
"""What the operating system is asked to hold; that outlives this process."""
ACCOUNT = (
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_CONFIG_DIR",
    "WANDB_CREDENTIALS_FILE",
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_INSECURE_DISABLE_SSL",
)
"""Environment variables that say who is logged in where; only read online. All others of wandb's would be options behind the config."""
SETTINGS: Mapping[str, Any] = {
    "console": "off",
    "silent": True,
    "init_timeout": 30.0,
    "quiet": True,
    "symlink": False,
    "sagemaker_disable": True,
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "save_code": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,
}
"""Records only: nothing about the machine, the code or the user. A setting that the installed version lacks is left out."""


def open_wandb(config: WandbConfig, run: TrackedRun) -> WandbTracker:
    """Start the process; what goes wrong in it is raised by the next `log` or `finish`.

    Raises:
        OSError: the run folder cannot be written, or no process started.
        ValueError: trackers.json is damaged or newer.
    """
    folder = run.folder / "wandb"
    run_id = keep_run_id(run.folder / "trackers.json")
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", "llmtrain.metrics.wandb_process", str(os.getpid())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd=folder,
        env=_environment(os.environ, config.mode, folder),
        start_new_session=True,
    )
    tracker = WandbTracker(process, config.mode)
    tracker.send(_start(config, run, run_id))
    return tracker


class WandbTracker(Tracker):
    """Writes lines into the process without ever waiting for it.

    Args:
        process: wandb_process.py, with pipes to its input and from its output.
    """

    def __init__(self, process: subprocess.Popen[bytes], mode: str) -> None:
        self._process = process
        self._mode = mode
        self._opened: str | None = None
        """The folder of this start, when wandb has made it."""
        self._backlog = bytearray()
        self._answers = bytearray()
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin.fileno(), process.stdout.fileno()
        for descriptor in (self._input, self._output):
            os.set_blocking(descriptor, False)
        with suppress(OSError, AttributeError):  # a system without the call, or less allowed
            fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message.

        Raises:
            RuntimeError: the process has failed, or does not keep up.
        """
        # Python writes floats so that reading gives the same bits, and NaN and Infinity as words that its reader knows.
        self._backlog += json.dumps(message).encode() + b"\n"
        self._check_answers()
        try:
            while self._backlog:
                del self._backlog[: os.write(self._input, self._backlog)]
        except BlockingIOError:
            if len(self._backlog) > BACKLOG_BYTES:
                raise RuntimeError("it does not keep up with the training") from None
        except BrokenPipeError:
            self._wait_for_end()
            raise RuntimeError(f"its process ended with code {self._process.returncode}") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.send({"step": step, "values": values})

    def finish(self) -> None:
        os.set_blocking(self._input, True)
        self.send({"finish": True})
        self._wait_for_end()
        if self._process.returncode:
            raise RuntimeError(f"its process ended with code {self._process.returncode}")

    def abandon(self) -> None:
        self._process.kill()
        self._process.wait()

    def notes(self) -> list[str]:
        if self._mode == "online" or self._opened is None:
            return []
        return [f"wandb sync {shlex.quote(self._opened)}"]

    def _wait_for_end(self) -> None:
        """Close the input, wait for the process, and raise what it failed with."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._check_answers()

    def _check_answers(self) -> None:
        """Read what the process has said; raises RuntimeError with its reason where it failed."""
        with suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 16):
                self._answers += data
        *lines, self._answers = self._answers.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._opened = answer.get("opened", self._opened)
            if "failed" in answer:
                raise RuntimeError(answer["failed"])


def keep_run_id(path: Path) -> str:
    """The id that wandb knows this run by: drawn once, then read from trackers.json.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it is damaged or newer.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version, run_id = document["format_version"], document["wandb"]["id"]
    except FileNotFoundError:
        return _draw_run_id(path)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); without it a new run would be drawn, so restore or remove it"
        ) from error
    if version != FORMAT_VERSION or not isinstance(run_id, str):
        raise ValueError(f"{path} has format_version {version}, this version reads {FORMAT_VERSION}")
    return run_id


def _draw_run_id(path: Path) -> str:
    run_id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(ID_LENGTH))
    staged = path.with_name(f".{path.name}.tmp")
    with staged.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format_version": FORMAT_VERSION, "wandb": {"id": run_id}}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)
    return run_id


def _start(config: WandbConfig, run: TrackedRun, run_id: str) -> dict[str, Any]:
    """The first line for the process: arguments of wandb.init, and settings."""
    settings = dict(SETTINGS)
    if config.mode == "offline":
        settings |= {"x_disable_viewer": True, "settings_system": str(run.folder / "wandb" / "no-settings")}
    arguments = {
        "dir": str(run.folder.absolute()),
        "mode": config.mode,
        "project": config.project,
        "entity": config.entity,
        "group": config.group,
        "tags": list(config.tags),
        "name": run.name,
        "id": run_id,
        "resume": "allow",
        "config": run.wire,
        "force": config.mode == "online",
    }
    tracked = {"folder": arguments["dir"], "name": run.name, "wire": {}, "resumed_step": run.resumed_step}
    return {"run": arguments, "settings": settings, "tracked": tracked}


def _environment(environ: Mapping[str, str], mode: str, folder: Path) -> dict[str, str]:
    """The environment of the process: no error reports (nothing but this variable turns them off), all files below the run folder."""
    kept = ACCOUNT if mode == "online" else ()
    values = {name: value for name, value in environ.items() if not name.startswith("WANDB_") or name in kept}
    below = str((folder / "cache").absolute())
    values["WANDB_ERROR_REPORTING"] = "false"
    # The package may be found by the folder that this process was started in.
    values["PYTHONPATH"] = os.pathsep.join(filter(None, (environ.get("PYTHONPATH"), str(PACKAGES))))
    return values | {f"WANDB_{kind}_DIR": below for kind in ("CACHE", "DATA", "ARTIFACT")}
