"""What the jobs of a sweep came to: read from their run folders, shown best first, kept as CSV."""

from __future__ import annotations

import csv
import json
import math
import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.cli.text import align
from llmtrain.config.errors import ExitCode
from llmtrain.config.keys import path_keys
from llmtrain.config.paths import user_path
from llmtrain.metrics.sinks import read_metrics
from llmtrain.train.run_changes import Change, find_changes
from llmtrain.train.run_folder import RunFolder

MIB = 2**20
METRICS_FILE, STATUS_FILE = "metrics.jsonl", "status.json"
ERROR, TRACEBACK = "error: ", "Traceback (most recent call last):"


@dataclass(frozen=True)
class JobResult:
    """One row: what was changed and what came out; None where a job did not get that far."""

    folder: Path
    changed: Mapping[str, str]
    exit_code: int
    reason: str
    """Why it ended as it did; empty when it ended well."""
    seconds: float
    steps: int | None
    val_loss: float | None
    """The last validation loss."""
    tokens_per_second: float | None
    """Median over the updates."""
    peak_memory_bytes: int | None
    bytes_per_token: float | None = None
    """Bytes of validation text that a scored token stands for; None where the text is not known."""
    damaged_records: int = 0
    """Lines of `metrics.jsonl` that could not be read and are in no figure."""

    @property
    def bits_per_byte(self) -> float | None:
        """The validation loss per byte of text, which jobs of different tokenizers share."""
        if self.val_loss is None or self.bytes_per_token is None:
            return None
        return self.val_loss / math.log(2) / self.bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-able; the changed keys under their dotted names."""
        return {
            "folder": str(self.folder),
            **self.changed,
            "val_loss": self.val_loss,
            "bits_per_byte": self.bits_per_byte,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": self.peak_memory_bytes,
            "steps": self.steps,
            "damaged_records": self.damaged_records,
            "seconds": round(self.seconds, 1),
            "exit_code": self.exit_code,
            "reason": self.reason,
        }

    def cells(self, *, with_bits: bool) -> tuple[str, ...]:
        """What the table shows after the changed keys."""
        losses = (self.val_loss, self.bits_per_byte) if with_bits else (self.val_loss,)
        return (
            *("–" if loss is None else f"{loss:.4f}" for loss in losses),
            "–" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            "–" if self.peak_memory_bytes is None else f"{self.peak_memory_bytes / MIB:,.0f}",
            f"{self.seconds:,.0f}",
            self.ended(),
        )

    def ended(self) -> str:
        """How it ended, with the reason if not well."""
        return "done" if self.exit_code == 0 else f"exit {self.exit_code}: {self.reason}"

    def summary(self) -> str:
        """The row as a line by itself."""
        return f"{self.ended()} · {self.figures()}"

    def figures(self) -> str:
        """What came out, as part of a line."""
        val_loss, rate, peak, seconds, _ = self.cells(with_bits=False)
        if self.steps is None:
            return f"{seconds} s"
        told = "" if self.bits_per_byte is None else f" = {self.bits_per_byte:.4f} bits/byte"
        damaged = f" · {self.damaged_records} damaged lines of metrics.jsonl left out" if self.damaged_records else ""
        return f"val loss {val_loss}{told} · {rate} tok/s · {peak} MiB · {seconds} s{damaged}"


def read_result(folder: Path, log: Path, changed: Mapping[str, str], exit_code: int, seconds: float) -> JobResult:
    """Collect a finished job's row from its run folder and, where it never made one, from its output.

    Raises:
        StorageError: the folder cannot be read.
    """
    metrics = read_metrics(folder / METRICS_FILE)
    records = metrics.records
    rates = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    losses = [record["val_loss"] for record in records if "val_loss" in record]
    peaks = [record["peak_memory_bytes"] for record in records if "peak_memory_bytes" in record]
    return JobResult(
        folder=folder,
        changed=changed,
        exit_code=exit_code,
        reason="" if exit_code == 0 else _reason(folder, log, exit_code),
        seconds=seconds,
        steps=records[-1]["step"] if records else None,
        val_loss=losses[-1] if losses else None,
        tokens_per_second=statistics.median(rates) if rates else None,
        peak_memory_bytes=max(peaks, default=None),
        bytes_per_token=_bytes_per_token(folder / "environment.json"),
        damaged_records=metrics.num_damaged,
    )


def ended_well(folder: Path) -> bool:
    """Whether the last start into a run folder made all the updates it was asked for."""
    return _document(folder / STATUS_FILE).get("code") == ExitCode.DONE


def read_finished(folder: Path, log: Path, changed: Mapping[str, str], wire: Mapping[str, Any]) -> JobResult | None:
    """The row of a job that ended well and that this config asks nothing more of; None where it is to be started.

    Only places, and how ranks are launched, may differ. Whatever else differs the start itself has to judge.

    Args:
        folder: the job's run folder.
        log: what it has printed in a sweep.
        changed: its swept keys.
        wire: its resolved config as it would be started now.

    Raises:
        StorageError: the folder cannot be read.
    """
    before = RunFolder(folder).read_config() if ended_well(folder) else None
    if before is None or not all(_is_elsewhere(change) for change in find_changes(before, wire)):
        return None
    # How long the last start took: nothing is written into these two between its beginning and its end.
    seconds = (folder / STATUS_FILE).stat().st_mtime - (folder / "config.yaml").stat().st_mtime
    return read_result(folder, log, changed, ExitCode.DONE, max(0.0, seconds))


def _is_elsewhere(change: Change) -> bool:
    """Whether a change is one of launching, or no change: a run folder keeps paths absolute."""
    if change.key in path_keys() and isinstance(change.new, str):
        return str(user_path(change.new, change.key).absolute()) == change.old
    return change.key.partition(".")[0] in ("launch", "sweep")


def _reason(folder: Path, log: Path, exit_code: int) -> str:
    """The reason the job wrote into `status.json`, that of any of its ranks, else what its output says.

    A status with another exit code is that of an earlier start. Where llmtrain is at fault the log has more, and is named.
    """
    status = _document(folder / STATUS_FILE)
    reason = str(status.get("reason") or "").partition("\n")[0] if status.get("code") == exit_code else ""
    if not reason and exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    if not reason:
        reason = _printed_reason(log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else [])
    return f"{reason} (see {log})" if exit_code == ExitCode.FAULT else reason


def _printed_reason(lines: Sequence[str]) -> str:
    """The last error with its rule, or the exception of a traceback where one came later, else the last line."""
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith(ERROR):
            rule = next(
                (line.removeprefix("  rule  ") for line in lines[number + 1 : number + 2] if line.startswith("  rule  ")), ""
            )
            return ": ".join(filter(None, (lines[number].removeprefix(ERROR), rule)))
        if lines[number] == TRACEBACK:
            # Frames and their source are indented, the exception is not.
            exception = next((line for line in lines[number + 1 :] if line and not line.startswith(" ")), "")
            if exception:
                return exception
    return lines[-1] if lines else "no output"


def _bytes_per_token(environment: Path) -> float | None:
    value = _document(environment).get("bytes_per_token")
    return value if isinstance(value, float) and value > 0 else None


def _document(file: Path) -> dict[str, Any]:
    """A JSON document of a run folder; empty where there is none to be read."""
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def table(results: Sequence[JobResult]) -> list[str]:
    """Lines of the final table: changed keys, then the figures; the lowest loss on top, jobs without one last.

    The loss is that of a token, or of a byte where a token does not stand for as much text in every job. Where that is not known a
    last line says that losses cannot be compared.
    """
    by_bytes, note = _comparison(results)
    ordered = sorted(results, key=lambda result: _rank(result.bits_per_byte if by_bytes else result.val_loss))
    keys = _changed_keys(results)
    with_bits = any(result.bits_per_byte is not None for result in results)
    rows = [(*keys, "val loss", *(["bits/byte"] if with_bits else []), "tok/s", "peak MiB", "seconds", "ended")]
    rows += [(*(result.changed.get(key, "") for key in keys), *result.cells(with_bits=with_bits)) for result in ordered]
    return [*align(rows, left={*range(len(keys)), len(rows[0]) - 1}), *note]


def _comparison(results: Sequence[JobResult]) -> tuple[bool, list[str]]:
    """Whether bits per byte decide, and what is to be said below the table."""
    scored = [result.bytes_per_token for result in results if result.val_loss is not None]
    known = {round(size, 9) for size in scored if size is not None}
    if None not in scored:
        return len(known) > 1, []
    swept = any(key == "data" or key.split(".")[0] == "tokenizer" for key in _changed_keys(results))
    words = "  val loss is per token: it cannot be compared between jobs whose tokenizers differ"
    return False, [words] if known or swept else []


def _rank(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss


def write_csv(file: Path, results: Sequence[JobResult]) -> None:
    """All columns, in the order the jobs ran."""
    rows = [result.to_dict() for result in results]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def _changed_keys(results: Sequence[JobResult]) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result.changed))
