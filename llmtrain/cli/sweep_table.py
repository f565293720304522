"""What the jobs of a sweep came to: read from their run folders, shown best first, kept as CSV."""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.cli.text import align
from llmtrain.metrics.sinks import read_metrics

MIB = 2**20
METRICS_FILE = "metrics.jsonl"


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
    damaged_records: int = 0
    """Lines of `metrics.jsonl` that could not be read and are in no figure."""

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-able; the changed keys under their dotted names."""
        return {
            "folder": str(self.folder),
            **self.changed,
            "val_loss": self.val_loss,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": self.peak_memory_bytes,
            "steps": self.steps,
            "damaged_records": self.damaged_records,
            "seconds": round(self.seconds, 1),
            "exit_code": self.exit_code,
            "reason": self.reason,
        }

    def cells(self) -> tuple[str, ...]:
        """What the table shows after the changed keys."""
        return (
            "–" if self.val_loss is None else f"{self.val_loss:.4f}",
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
        val_loss, rate, peak, seconds, ended = self.cells()
        damaged = f" · {self.damaged_records} damaged lines of metrics.jsonl left out" if self.damaged_records else ""
        return f"{ended} · val loss {val_loss} · {rate} tok/s · {peak} MiB · {seconds} s{damaged}"


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
        reason="" if exit_code == 0 else _reason(folder, log),
        seconds=seconds,
        steps=records[-1]["step"] if records else None,
        val_loss=losses[-1] if losses else None,
        tokens_per_second=statistics.median(rates) if rates else None,
        peak_memory_bytes=max(peaks, default=None),
        damaged_records=metrics.num_damaged,
    )


def _reason(folder: Path, log: Path) -> str:
    """The reason the job wrote into `status.json`, else the last error it printed with its rule, else its last line."""
    reason = _told_reason(folder / "status.json")
    if reason:
        return reason
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    for line, following in reversed(list(itertools.zip_longest(lines, lines[1:], fillvalue=""))):
        if line.startswith("error: "):
            rule = following.removeprefix("  rule  ") if following.startswith("  rule  ") else ""
            return ": ".join(filter(None, (line.removeprefix("error: "), rule)))
    return lines[-1] if lines else "no output"


def _told_reason(status: Path) -> str:
    """First line of the reason in a status file; empty where there is none to be read."""
    try:
        document = json.loads(status.read_bytes())
    except (OSError, ValueError):
        return ""
    reason = document.get("reason") if isinstance(document, dict) else None
    return str(reason or "").partition("\n")[0]


def table(results: Sequence[JobResult]) -> list[str]:
    """Lines of the final table: changed keys, then the figures; the lowest validation loss on top, jobs without one last."""
    ordered = sorted(
        results, key=lambda result: math.inf if result.val_loss is None or math.isnan(result.val_loss) else result.val_loss
    )
    keys = _changed_keys(results)
    rows = [(*keys, "val loss", "tok/s", "peak MiB", "seconds", "ended")]
    rows += [(*(result.changed.get(key, "") for key in keys), *result.cells()) for result in ordered]
    return align(rows, left={*range(len(keys)), len(rows[0]) - 1})


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
