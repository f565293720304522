"""A new folder that appears whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmtrain.checkpoint.files import Files, remove_tree, storage_error
from llmtrain.checkpoint.owner import Owner, token_is_alive
from llmtrain.config.errors import ConfigError, Problem


@contextmanager
def staged_folder(target: Path, files: Files = Files()) -> Iterator[Path]:
    """Context with an empty folder beside `target` that gets its name, durable, when the context ends well.

    Whatever else ends the context, `target` is as it was. What a kill leaves behind has a name with a leading dot and goes with the
    next folder that is made for the same target.

    Raises:
        ConfigError: `target` is there already and not an empty folder.
        StorageError: the operating system refused something.
    """
    target = target.absolute()
    refuse_existing(target)
    staging = target.parent / f".{target.name}.staging-{Owner.this_process().token}-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _reap(target, files)
        files.make_folder(staging)
        yield staging
        for folder, _, _ in os.walk(staging, topdown=False):
            files.fsync_folder(Path(folder))
        files.rename(staging, target)
        files.fsync_folder(target.parent)
    except OSError as error:
        raise storage_error(files, error, "write", target) from error
    finally:
        with suppress(OSError):
            if staging.exists():
                remove_tree(files, staging)


def refuse_existing(target: Path) -> None:
    """Raise ConfigError for a target that would be overwritten."""
    if not os.path.lexists(target) or (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        return
    raise ConfigError(Problem(f"{target} is there already", "nothing is written over", "another name, or remove it first"))


def _reap(target: Path, files: Files) -> None:
    """Remove what processes that are gone have left of the same target."""
    name = re.compile(rf"\.{re.escape(target.name)}\.staging-([0-9a-f]{{8}}-[0-9]+-[0-9]+)-[0-9a-f]{{8}}")
    for path in sorted(target.parent.iterdir()):
        match = name.fullmatch(path.name)
        if match and not token_is_alive(match[1]):
            with suppress(OSError):
                remove_tree(files, path)
