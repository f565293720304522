"""Text becomes tokens once: prepared folders, keyed by the text and every setting that changes the ids.

Shards are made side by side in a staging folder that the same command finds again after a kill; when all are there the folder is
described and renamed, so a half-made one is never taken for tokens. What comes out is the same to the byte for any number of
processes, kills and orders. A folder of the cache that fails its checks is taken away and made again, with a message.

A folder that the user named (prepare.path) may be a mount point, a link or the working folder: it is neither renamed nor removed. The
staging folder lies in it and its files are moved up, the description last; nothing is written beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from llmtrain.config.errors import DataError, Problem, StorageError
from llmtrain.config.paths import user_path
from llmtrain.config.typed_data import (
    DataConfig,
    LearntTokenizerConfig,
    OnBad,
    PluginData,
    PrepareConfig,
    RecordData,
    TextSource,
    TokenizerConfig,
)
from llmtrain.data.formats import (
    BAD_RECORDS,
    CHECKED,
    METADATA,
    DamagedTokens,
    Prepared,
    expected_files,
    is_complete,
    mark_checked,
    open_prepared,
    write_metadata,
)
from llmtrain.data.framing import settle_framing
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.meter import PreparationMeter, count
from llmtrain.data.plugin_documents import written_documents
from llmtrain.data.record_places import PlaceTeller, told_places
from llmtrain.data.shards import (
    FORMAT_VERSION,
    BadRecords,
    FileWriter,
    ShardSettings,
    bad_file,
    describe_bad,
    read_json,
    remove_temporaries,
    write_json,
)
from llmtrain.data.sources import VALIDATION_PATH
from llmtrain.data.staging import (
    STAGING,
    begin,
    cache_folder,
    is_staging,
    locked,
    move_up,
    publish,
    remove_abandoned,
    set_aside,
)
from llmtrain.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, train_tokenizer
from llmtrain.data.units import SPLITS, Text, WorkUnit, find_text
from llmtrain.data.workers import choose_workers, make_shards

MAX_ATTEMPTS = 5
"""A second attempt opens what the first one made; more are needed only if other processes damage or move the same folder."""
LEARNT = "learnt.json"
"""The vocabulary of an unfinished preparation, so that it is learnt once."""
_OWN_LOCK = f"{STAGING}own"
"""One for all preparations into a folder that the user named."""


@dataclass(frozen=True)
class Preparation:
    """One text, one way to tokenize it and the folder that gets the tokens."""

    text: Text
    data: DataConfig
    tokenizer: Tokenizer | LearntTokenizerConfig
    settings: PrepareConfig
    folder: Path
    key: str
    """Of everything the content of the folder follows from. How it is cut into shards too: words of over a megabyte are cut with it."""
    shard_key: str
    """The same without what only decides how bad records are dealt with: their shards can be taken over."""

    @property
    def staging(self) -> Path:
        """Where the shards are made; the same for every way to deal with bad records."""
        return (self.folder if self.is_named else self.folder.parent) / f"{STAGING}{self.shard_key[:32]}"

    @property
    def is_named(self) -> bool:
        """Whether the folder is one that the user named."""
        return self.settings.path is not None

    @property
    def on_bad(self) -> OnBad:
        """What to do with a record that is no document."""
        source = self.data.source
        return source.on_bad if isinstance(source, RecordData) else OnBad.ERROR


def find_preparation(
    data: DataConfig, tokenizer: TokenizerConfig | Tokenizer, settings: PrepareConfig, beat: Heartbeat
) -> Preparation:
    """Look at the text and settle where its tokens belong.

    Raises:
        ConfigError: a path in a home folder that is not there.
        DataError: no text, a tokenizer that cannot be read or that lacks a special token.
    """
    if isinstance(data.source, PluginData):
        data = replace(data, source=written_documents(data.source, beat))
    source = cast(TextSource, data.source)
    beat.status("reading the text")
    text = find_text(source, settings.shard_bytes)
    known = tokenizer if isinstance(tokenizer, Tokenizer) else make_tokenizer(tokenizer)
    maker = known or cast(LearntTokenizerConfig, tokenizer)
    identity: dict[str, Any] = {"format_version": FORMAT_VERSION, "text": text.identity, **_tokenizing(data, maker)}
    shard_key = _hash(identity)
    key = _hash({**identity, "on_bad": source.on_bad.value if isinstance(source, RecordData) else None})
    if settings.path is None:
        folder = cache_folder(source.cache_dir) / key[:32]
    else:
        folder = Path(os.path.realpath(user_path(settings.path, f"prepare.path={settings.path}")))
    return Preparation(text, data, maker, settings, folder, key, shard_key)


def prepare(job: Preparation, beat: Heartbeat) -> Prepared:
    """The prepared tokens of a text, from its folder or made now.

    A tokenizer that is given is handed back: one of the same ids that made the folder may decode in another way.

    Raises:
        DataError: text or tokenizer at fault, or a worker that was killed.
        StorageError: the folder cannot be written, or holds something else.
    """
    try:
        prepared = _open_or_make(job, beat)
        return replace(prepared, tokenizer=job.tokenizer) if isinstance(job.tokenizer, Tokenizer) else prepared
    except OSError as error:
        cure = "prepare.path=FOLDER" if job.is_named else "data.cache_dir=FOLDER"
        where = f"prepared tokens in {job.folder if job.is_named else job.folder.parent}"
        raise StorageError(Problem(where, f"{error.strerror or error}", f"{cure} with room to write")) from error


def _tokenizing(data: DataConfig, maker: Tokenizer | LearntTokenizerConfig) -> dict[str, Any]:
    """How text becomes ids, as JSON."""
    if isinstance(maker, Tokenizer):
        return {"tokenizer": maker.fingerprint, "framing": asdict(settle_framing(data, maker))}
    # Learnt tokenizers have a begin-of-text token that is not their end-of-text token.
    return {"tokenizer": asdict(maker), "framing": [data.bos is not False, data.eos]}


def _open_or_make(job: Preparation, beat: Heartbeat) -> Prepared:
    is_new = False
    for attempt in range(MAX_ATTEMPTS):
        if _is_there(job):
            try:
                return replace(open_prepared(job.folder, job.key, beat.status), is_new=is_new)
            except DamagedTokens as damage:
                _remove_damaged(job, damage, beat)
        try:
            with locked(job.folder / _OWN_LOCK if job.is_named else job.staging, beat.status) as is_alone:
                # Another process may have finished while this one waited.
                if not _is_there(job):
                    _make(job, beat, is_alone)
                    is_new = True
        except FileNotFoundError:
            # Where there are no locks another process can finish, and rename, the folder that this one works on.
            if attempt == MAX_ATTEMPTS - 1:
                raise
    rule = f"another process moved or damaged it {MAX_ATTEMPTS} times"
    raise StorageError(Problem(str(job.folder), rule, "data.cache_dir=FOLDER"))


def _is_there(job: Preparation) -> bool:
    """Whether something lies in the folder; an empty one may be filled, and one that a process was killed in filling."""
    if job.is_named and is_complete(job.staging, job.key) and not (job.folder / METADATA).exists():
        return False
    return job.folder.exists() and any(not _is_ours(path) for path in job.folder.iterdir())


def _is_ours(path: Path) -> bool:
    """Whether something in a folder that the user named is there only while it is filled."""
    return is_staging(path) or path.name == f"{_OWN_LOCK}.lock"


def _remove_damaged(job: Preparation, damage: DamagedTokens, beat: Heartbeat) -> None:
    """Take a damaged folder of the cache away; a folder that the user named is not ours to remove."""
    found = damage.problems[0]
    if job.is_named:
        rule = f"it is there and does not hold the tokens of this text: {found.what}: {found.rule}"
        raise StorageError(Problem(f"prepare.path={job.settings.path}", rule, "prepare.path=NEW_FOLDER, or remove this one"))
    beat.say(f"prepared tokens are damaged and will be made again: {found.what}: {found.rule}")
    set_aside(job.folder)


def _make(job: Preparation, beat: Heartbeat, is_alone: bool) -> None:
    """Make the folder, or go on where an earlier process stopped."""
    staging = job.staging
    goes_on = staging.exists()
    try:
        begin(staging)
        if is_alone:
            remove_temporaries(staging)
        if not is_complete(staging, job.key):
            verb = "going on with preparing" if goes_on else "preparing"
            where = job.folder if job.is_named else job.folder.parent
            beat.say(f"{verb} tokens of {job.text.name} (once; kept in {where})")
            if not job.is_named:
                remove_abandoned(staging.parent, staging)
            _fill(job, beat)
        _finish(job)
    finally:
        # What is finished is kept for the next try, and nothing else.
        kept = (any(staging.glob("shard-*.json")), (staging / LEARNT).exists(), is_complete(staging, job.key))
        if not any(kept):
            shutil.rmtree(staging, ignore_errors=True)


def _finish(job: Preparation) -> None:
    """Give the files of a complete staging folder their place, or what a process that was killed here has left of them."""
    staging = job.staging
    for name in {path.name for path in staging.iterdir()} - expected_files(staging) - {CHECKED}:
        (staging / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        mark_checked(staging)
    if job.is_named:
        move_up(staging, job.folder, METADATA)
    else:
        publish(staging, job.folder)


def _fill(job: Preparation, beat: Heartbeat) -> None:
    tokenizer = _tokenizer(job, beat)
    framing = settle_framing(job.data, tokenizer)
    units = job.text.units(tokenizer.cuts_at_words)
    num_workers = choose_workers(job.settings.workers, job.text.source_bytes, len(units))
    meter = PreparationMeter(units)
    beat.status(meter.line)
    settings = ShardSettings(job.staging, job.shard_key, tokenizer, framing, job.on_bad)
    shards = make_shards(settings, units, num_workers, meter.update)
    job.text.check_unchanged()
    bad = BadRecords()
    for shard in shards:
        bad.merge(shard["bad"])
    bad.places = told_places(bad.places)
    _check_splits(job, shards, bad)
    facts = {"name": job.text.name, "held_out": job.text.held_out, **asdict(framing), "bad": bad.to_dict()}
    facts["bad_sha256"] = _join_copies(job, units)
    write_metadata(job.staging, job.key, tokenizer, facts, shards, beat.status)
    beat.say(_summary(shards, bad, meter))


def _tokenizer(job: Preparation, beat: Heartbeat) -> Tokenizer:
    """The tokenizer, learnt from the training split if it is of that kind and an earlier process did not do so already."""
    if isinstance(job.tokenizer, Tokenizer):
        return job.tokenizer
    path = job.staging / LEARNT
    # Absent, torn or of other text: then it is learnt, as if no earlier process had been here.
    with suppress(OSError, ValueError, KeyError):
        stored = read_json(path)
        if stored["key"] == job.shard_key:
            return load_tokenizer(stored["tokenizer"])
    beat.status("learning the vocabulary")
    tokenizer = train_tokenizer(job.tokenizer, job.text.training_text, beat.status)
    write_json(path, {"key": job.shard_key, "tokenizer": tokenizer.to_json()})
    return tokenizer


def _check_splits(job: Preparation, shards: Sequence[Mapping[str, Any]], bad: BadRecords) -> None:
    """Raise DataError for a split without documents."""
    documents = {split: sum(shard[split]["documents"] for shard in shards if split in shard) for split in SPLITS}
    for split, name, cure in zip(SPLITS, ("training", "validation"), ("lower", "raise")):
        if not documents[split]:
            facts = [f"{sum(documents.values())} documents", describe_bad(bad.to_dict()), job.text.held_out]
            rule = f"nothing is left for {name}: {', '.join(fact for fact in facts if fact)}"
            cure = f"{cure} data.validation_fraction, or data.validation_path=FILE_OR_FOLDER"
            if not any(documents.values()) and isinstance(job.data.source, RecordData):
                cure = "data.text_field=NAME of the text, if the records have another; data.on_bad=error stops at the first bad one"
            elif job.text.held_out == VALIDATION_PATH:
                cure = "a path that holds documents"
            raise DataError(Problem(job.text.name, rule, cure))


def _join_copies(job: Preparation, units: Sequence[WorkUnit]) -> str:
    """One file with the copies of all bad records, in the order of the text; its SHA-256, empty where there are none."""
    if job.on_bad is not OnBad.QUARANTINE:
        return ""
    writer, teller = FileWriter(job.staging / BAD_RECORDS), PlaceTeller()
    try:
        for index in range(len(units)):
            path = job.staging / bad_file(index)
            if path.exists():
                writer.write(teller.tell_copies(path.read_bytes()))
        return writer.finish()
    finally:
        writer.close()


def _summary(shards: Sequence[Mapping[str, Any]], bad: BadRecords, meter: PreparationMeter) -> str:
    """The line at the end: what there is now, and how fast it came."""
    splits = [shard[split] for shard in shards for split in SPLITS if split in shard]
    documents, tokens, source_bytes = (sum(split[name] for split in splits) for name in ("documents", "tokens", "source_bytes"))
    parts = [
        f"{documents:,} documents",
        f"{count(tokens)} tokens",
        f"{source_bytes / max(1, tokens):.2f} bytes/token",
        meter.speed(),
        f"{meter.seconds:.1f} s",
    ]
    described = describe_bad(bad.to_dict())
    return " · ".join([*parts, *([described] if described else [])])


def _hash(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
