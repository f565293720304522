"""From what was typed as a path to the files it stands for, always in the same order."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

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

    A file is taken whatever it is called. Of a folder all files with one of the suffixes are, below it too (see `walk`). A pattern (`*`, `?`, `[ ]`, `**` for any folders) stands for what it matches; if it ends in `*`, only for
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
            found = FoundFiles(given, tuple(file for file in walk(given, Counter()) if file.name.endswith(tuple(suffixes))))
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


class FileStamp(Protocol):
    """A file as it was when it was found."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    @property
    def modified_ns(self) -> int: ...


def check_unchanged(files: Iterable[FileStamp]) -> None:
    """Raise DataError if a file has not the size and time that it had when it was found."""
    for file in files:
        try:
            now = file.path.stat()
        except OSError as error:
            raise unreadable(file.path, error) from error
        if (now.st_size, now.st_mtime_ns) != (file.size, file.modified_ns):
            raise changed(file.path)


def changed(path: Path) -> DataError:
    """The message for a file that is not what it was."""
    return DataError(Problem(str(path), "it changed while it was being read", "start again when nothing writes to it"))


def leave_to_validation(train: Sequence[Path], held_out: Iterable[Path], setting: str) -> list[Path]:
    """The training files that are no validation files, by whatever name or link.

    Raises:
        DataError: none is left.
    """
    scored = {path.resolve() for path in held_out}
    kept = [path for path in train if path.resolve() not in scored]
    if not kept:
        rule = "nothing is left for training: data.validation_path names every file of it"
        raise DataError(Problem(setting, rule, f"{setting.partition('=')[0]}=PATH with other text"))
    return kept


def _match(pattern: Path, suffixes: Sequence[str]) -> FoundFiles:
    if not glob.has_magic(str(pattern)):
        return FoundFiles(_nearest_folder(pattern), ())
    wild = next(number for number, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:wild])
    if "**" in pattern.parts[wild:]:
        # Not by glob: it walks links that lead in circles to the end of what the system lets it.
        found = walk(root, Counter()) if root.is_dir() else []
        taken = [path for path in found if _fits(path.relative_to(root).parts, pattern.parts[wild:])]
    else:
        taken = [path for path in map(Path, glob.iglob(str(pattern))) if path.is_file()]
    if pattern.name.endswith("*"):
        taken = [path for path in taken if path.name.endswith(tuple(suffixes))]
    return FoundFiles(root if taken else _nearest_folder(root), _sorted(root, taken))


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path fits a pattern, both by their parts; `**` stands for any number of parts."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_fits(names[skipped:], pattern[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def _sorted(root: Path, paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(set(paths), key=lambda path: path.relative_to(root).as_posix()))


def walk(root: Path, skipped: Counter[str], skipped_folders: Collection[str] = ()) -> list[Path]:
    """Regular files below a folder in order of their paths below it; hidden ones are left out, and links to folders are followed.

    A folder that can be reached in several ways is read once, by the name that comes first: links may lead in a circle.

    Args:
        skipped: gets the number of files and folders that are left out, by reason.
        skipped_folders: names of folders that are left out.

    Raises:
        DataError: a folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    found = []
    seen = {_inode(root)}
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        skipped["hidden"] += sum(name.startswith(".") for name in folders)
        wanted = sorted(name for name in folders if name not in skipped_folders and not name.startswith("."))
        folders[:] = [name for name in wanted if _is_new(Path(folder, name), seen)]
        for name in names:
            path = Path(folder, name)
            if name.startswith("."):
                skipped["hidden"] += 1
            elif path.is_file():
                found.append(path)
            else:
                skipped["not a regular file"] += 1
    return list(_sorted(root, found))


def _is_new(folder: Path, seen: set[tuple[int, int]]) -> bool:
    inode = _inode(folder)
    is_new = inode not in seen
    seen.add(inode)
    return is_new


def _inode(folder: Path) -> tuple[int, int]:
    try:
        facts = folder.stat()
    except OSError as error:
        raise unreadable(folder, error) from error
    return facts.st_dev, facts.st_ino


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
