"""Preparing text ahead of training: the folder of tokens, a card that says what is in it, and the command that trains on it."""

from __future__ import annotations

import shlex
from typing import Any

from llmtrain.config.compose import Composed
from llmtrain.config.errors import ConfigError, ExitCode, Problem
from llmtrain.config.typed_data import DataSource, SyntheticData, TokenData
from llmtrain.data.formats import BAD_RECORDS, Prepared
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.prepare import Preparation, find_preparation, prepare
from llmtrain.data.shards import describe_bad, first_places
from llmtrain.data.sources import describe_skipped
from llmtrain.metrics.console import Console, Row
from llmtrain.metrics.format import format_count
from llmtrain.plan.report import format_bytes
from llmtrain.train.signals import stop_signals_raise

NOT_FOR_TRAINING = ("prepare.workers=", "prepare.path=", "output=")
"""Words that training would not read, or that change nothing in it."""


def prepare_text(composed: Composed, console: Console) -> ExitCode:
    """Prepare the text that a config names, or say that it is prepared.

    Raises:
        ConfigError: the data is no text.
        DataError: text or tokenizer at fault.
        StorageError: the folder cannot be written, or holds something else.
        StoppedError: SIGTERM, SIGUSR1 or SIGHUP came.
    """
    config = composed.config
    _refuse_what_is_no_text(config.data.source)
    with stop_signals_raise(), Heartbeat(console.status, say=console.line) as beat:
        job = find_preparation(config.data, config.tokenizer, config.prepare, beat)
        prepared = prepare(job, beat)
    if not prepared.is_new:
        console.line("prepared already, nothing to do")
    command = _training_command(composed, prepared)
    console.card(f"llmtrain prepare · {prepared.folder}", _rows(job, prepared))
    console.next([command])
    console.document(_document(job, prepared, command))
    return ExitCode.DONE


def _refuse_what_is_no_text(source: DataSource) -> None:
    if isinstance(source, SyntheticData | TokenData):
        kind = "synthetic" if isinstance(source, SyntheticData) else "tokens"
        rule = f"prepare turns text into tokens, and data={kind} has tokens already"
        raise ConfigError(Problem(f"data={kind}", rule, "data=text, data=jsonl or data=parquet with data.path=FILE_OR_FOLDER"))


def _training_command(composed: Composed, prepared: Prepared) -> str:
    """The folder where it was given a place; else the same words, which find it in the cache."""
    if composed.config.prepare.path is not None:
        return shlex.join(["llmtrain", "data=tokens", f"data.path={prepared.folder}"])
    words = [word for word in composed.words if not word.lstrip("+").startswith(NOT_FOR_TRAINING)]
    return shlex.join(["llmtrain", *composed.options, *words])


def _rows(job: Preparation, prepared: Prepared) -> list[Row]:
    train, validation = prepared.train, prepared.validation
    documents = train.documents + validation.documents
    tokens, source_bytes = len(train.tokens) + len(validation.tokens), train.source_bytes + validation.source_bytes
    rows = [
        Row("source", f"{prepared.name} · {format_bytes(source_bytes)} of text"),
        Row(
            "documents", f"{documents:,}: {train.documents:,} train, {validation.documents:,} validation ({prepared.held_out})"
        ),
        Row("tokens", f"{format_count(len(train.tokens))} train, {format_count(len(validation.tokens))} validation"),
        Row(
            "tokenizer", f"{_kind(prepared)} · {prepared.tokenizer.vocab_size:,} ids · {source_bytes / tokens:.2f} bytes/token"
        ),
        Row("files", f"{prepared.dtype} · {format_bytes(tokens * (2 if prepared.dtype == 'uint16' else 4))}"),
    ]
    if job.text.skipped.total():
        rows.append(Row("skipped", describe_skipped(job.text.skipped)))
    if prepared.bad:
        copies = prepared.folder / BAD_RECORDS
        kept = f"; copies in {copies}" if copies.exists() else ""
        rows.append(Row("bad", f"{describe_bad(prepared.bad)}, for example {first_places(prepared.bad)}{kept}"))
    return rows


def _kind(prepared: Prepared) -> str:
    return str(prepared.tokenizer.to_json()["kind"])


def _document(job: Preparation, prepared: Prepared, command: str) -> dict[str, Any]:
    splits = {"train": prepared.train, "validation": prepared.validation}
    return {
        "folder": str(prepared.folder),
        "code": int(ExitCode.DONE),
        "new": prepared.is_new,
        "source": prepared.name,
        "held_out": prepared.held_out,
        "splits": {
            name: {
                "documents": split.documents,
                "tokens": len(split.tokens),
                "source_bytes": split.source_bytes,
                "sha256": split.sha256,
            }
            for name, split in splits.items()
        },
        "dtype": prepared.dtype,
        "tokenizer": _kind(prepared),
        "vocab_size": prepared.tokenizer.vocab_size,
        "skipped_files": dict(job.text.skipped),
        "bad": {reason: dict(facts) for reason, facts in prepared.bad.items()},
        "command": command,
    }
