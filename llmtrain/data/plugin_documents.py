"""Documents of an installed plugin: written out once as JSON lines, and from then on read like any others.

They are written again when the plugin's options, the version of its package or its code change, or the folder is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmtrain.config.defaults import DEFAULT_MAX_DOCUMENT_BYTES
from llmtrain.config.errors import DataError, Problem, StorageError
from llmtrain.config.plugins import Installed, blame, build, find
from llmtrain.config.typed_data import OnBad, PluginData, RecordData
from llmtrain.data.heartbeat import Heartbeat
from llmtrain.data.staging import STAGING, cache_folder, locked, publish

FOLDER = "plugins"
"""Where they lie below the cache folder."""
Documents = Callable[[str], Iterable[str] | None]
"""Of a split, `train` or `validation`; None for validation = some of the training documents are held out."""


def written_documents(source: PluginData, beat: Heartbeat) -> RecordData:
    """The files that hold the documents of a plugin, written now if they are not there.

    Raises:
        ConfigError: a package that the plugin needs is missing.
        DataError: it yields something that is no text.
        StorageError: the cache folder cannot be written.
    """
    plugin = find("data", source.kind)
    assert plugin is not None, "the config was frozen with this plugin installed"
    parent = cache_folder(source.cache_dir) / FOLDER
    folder = parent / f"{source.kind}-{_key(plugin, source.options)}"
    try:
        _write(plugin, source, folder, beat)
    except OSError as error:
        where = f"documents of {plugin.package} in {parent}"
        raise StorageError(Problem(where, error.strerror or str(error), "data.cache_dir=FOLDER with room to write")) from error
    validation = folder / _file_name(source.kind, "validation")
    return RecordData(
        kind="jsonl",
        path=str(folder / _file_name(source.kind, "train")),
        validation_path=str(validation) if validation.exists() else None,
        validation_fraction=source.validation_fraction,
        cache_dir=source.cache_dir,
        text_field="text",
        on_bad=OnBad.ERROR,
        max_document_bytes=DEFAULT_MAX_DOCUMENT_BYTES,
    )


def _write(plugin: Installed, source: PluginData, folder: Path, beat: Heartbeat) -> None:
    staging = folder.with_name(f"{STAGING}{folder.name}")
    if folder.is_dir():
        return
    with locked(staging, beat.status):
        if folder.is_dir():
            return
        staging.mkdir(parents=True, exist_ok=True)
        documents = build(plugin, source.options)
        for split in ("train", "validation"):
            with _reading(plugin):
                found = documents(split)
            if found is not None:
                _write_split(_texts(plugin, found), staging / _file_name(source.kind, split), beat)
        publish(staging, folder)


def _write_split(texts: Iterator[str], path: Path, beat: Heartbeat) -> None:
    with path.open("w", encoding="ascii") as file:
        for number, text in enumerate(texts, start=1):
            file.write(json.dumps({"text": text}) + "\n")
            beat.status(f"writing the documents of a plugin: {number} to {path.name}")
        file.flush()
        os.fsync(file.fileno())


def _texts(plugin: Installed, documents: Iterable[str]) -> Iterator[str]:
    with _reading(plugin):
        for number, text in enumerate(documents, start=1):
            if not isinstance(text, str):
                rule = f"{plugin.package} yields a {type(text).__name__} as document {number}"
                raise DataError(Problem(f"data.kind={plugin.plugin.name}", rule, "text, as docs/plugins.md describes it"))
            yield text


@contextmanager
def _reading(plugin: Installed) -> Iterator[None]:
    """A file that the plugin cannot read is not one that llmtrain cannot write."""
    try:
        with blame(plugin):
            yield
    except OSError as error:
        what = f"data.kind={plugin.plugin.name}"
        raise DataError(Problem(what, f"{plugin.package} cannot read its documents: {error}")) from error


def _file_name(kind: str, split: str) -> str:
    return f"{kind}.jsonl" if split == "train" else f"{kind}-{split}.jsonl"


def _key(plugin: Installed, options: Any) -> str:
    """Changes with the options, the package's version and the code of its modules."""
    top = plugin.plugin.build.__module__.partition(".")[0]
    home = getattr(sys.modules.get(top), "__file__", None)
    files = [] if home is None else [Path(home)]
    if files and files[0].name == "__init__.py":
        files = sorted(files[0].parent.rglob("*.py"))
    code = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    parts = json.dumps([plugin.package, asdict(options), code], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:32]
