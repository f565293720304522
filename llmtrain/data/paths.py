"""From what was typed as a path to the files it stands for, always in the same order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config.errors import DataError, Problem
from llmtrain.config.paths import user_path

SHOWN_NAMES = 5


@dataclass(frozen=True)
class FoundFiles:
    """Files in order of their names."""

    root: Path
    """Folder that names are relative to."""
    paths: tuple[Path, ...]

    def name(self, path: Path) -> str:
        """A name that is the same wherever the files lie: the path below `root`."""
        return path.relative_to(self.root).as_posix()


def find_files(path: str, setting: str, suffixes: Sequence[str]) -> FoundFiles:
    """The files that `path` stands for, sorted by their path below the folder that was named.

    A file is taken whatever it is called. Of a folder all files with one of the suffixes are, below it too; hidden ones and links to
    folders are left out. A pattern (`*`, `?`, `[ ]`, `**` for any folders) stands for what it matches; if it ends in `*`, only for
    what has one of the suffixes. A leading `~` is a home folder.

    Args:
        setting: where the path was typed, for messages, e.g. `data.path=shards/*.jsonl`.
        suffixes: endings of file names, with the dot.

    Raises:
        ConfigError: the path names a home folder that is not there.
        DataError: nothing found, or a folder that cannot be read.
    """
    given = user_path(path, setting)
    cure = f"{setting.partition('=')[0]}=FILE, FOLDER or PATTERN"
    try:
        if given.is_dir():
            found = FoundFiles(given, _sorted(given, _walk(given, suffixes)))
        elif given.exists():
            if not given.is_file():
                raise DataError(Problem(setting, f"{given} is neither a regular file nor a folder", cure))
            return FoundFiles(given.parent, (given,))
        else:
            found = _match(given, suffixes)
    except OSError as error:
        raise unreadable(Path(error.filename or given), error) from error
    if not found.paths:
        raise DataError(Problem(setting, _nothing(given, found.root, suffixes), cure))
    return found


def unreadable(path: Path, error: OSError) -> DataError:
    """The message for a file or folder that the system does not let us read."""
    return DataError(Problem(str(path), f"it cannot be read: {error.strerror or error}", "make it readable, or move it away"))


def _match(pattern: Path, suffixes: Sequence[str]) -> FoundFiles:
    if not glob.has_magic(str(pattern)):
        return FoundFiles(_nearest_folder(pattern), ())
    wild = next(number for number, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:wild])
    matches = (Path(name) for name in glob.iglob(str(pattern), recursive=True))
    taken = [path for path in matches if path.is_file()]
    if pattern.name.endswith("*"):
        taken = [path for path in taken if path.name.endswith(tuple(suffixes))]
    return FoundFiles(root if taken else _nearest_folder(root), _sorted(root, taken))


def _sorted(root: Path, paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(set(paths), key=lambda path: path.relative_to(root).as_posix()))


def _walk(root: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and name.endswith(tuple(suffixes)) and path.is_file():
                yield path


def _nearest_folder(path: Path) -> Path:
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path())


def _nothing(given: Path, folder: Path, suffixes: Sequence[str]) -> str:
    """What was looked for, and what lies there instead."""
    if folder == given:
        looked_for = f"{given} has no file that ends in {', '.join(suffixes)}"
    elif glob.has_magic(str(given)):
        looked_for = f"nothing matches {given}"
    else:
        looked_for = f"{given} is not there"
    try:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        return f"{looked_for}; {folder} cannot be read: {error.strerror}"
    shown = ", ".join(names[:SHOWN_NAMES]) + (f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else "")
    return f"{looked_for}; {folder} has {shown or 'nothing in it'}"
