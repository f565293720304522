"""What a disk may hold after a power cut, given the calls that were made before it.

The model is stricter than a journalling file system: a name (create, make, rename, remove) is sure to be there only after a sync of
its folder, and without one any subset of the changes may be; the bytes of a file are sure only after a sync of the file, and without
one may be there, be missing, or be zeros. A rename is one change, as POSIX promises.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

Call = tuple[str, Path, Any]
Snapshot = Mapping[PurePath, bytes | None]
"""Path below the root → content, None for a folder."""

NameChange = tuple[int, dict[str, int | None]]
"""A folder's number and the names in it that change together: name → number of what it then leads to, None when it goes."""


def snapshot(root: Path) -> Snapshot:
    return {path.relative_to(root): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))}


def restore(state: Snapshot, root: Path) -> None:
    root.mkdir(parents=True)
    for path in sorted(state):
        content = state[path]
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def crash_states(before: Snapshot, calls: list[Call], root: Path) -> list[Snapshot]:
    """Every distinct state that may be found after a cut before, between or after the calls (as `RecordingFiles` notes them)."""
    disk = Disk(before)
    found: dict[tuple[Any, ...], Snapshot] = {}
    for call in [None, *calls]:
        if call is not None:
            disk.do(call, root)
        for state in disk.states():
            found.setdefault(tuple(state.items()), state)
    return list(found.values())


class Disk:
    """Files and folders by number, the names as processes see them, and the names that are sure to survive."""

    def __init__(self, state: Snapshot) -> None:
        self._content: dict[int, bytes] = {}
        self._synced: dict[int, int] = {}
        self._live: dict[int, dict[str, int]] = {0: {}}
        self._pending: list[NameChange] = []
        for path in sorted(state):
            self._live[self._folder(path.parent)][path.name] = self._new(state[path])
        for number, content in self._content.items():
            self._synced[number] = len(content)
        self._durable = {folder: dict(names) for folder, names in self._live.items()}

    def do(self, call: Call, root: Path) -> None:
        operation, path, argument = call[0], call[1].relative_to(root), call[2]
        folder = self._folder(path.parent)
        names = self._live[folder]
        if operation == "make_folder":
            self._change(folder, {path.name: self._new(None)})
        elif operation == "create":
            self._change(folder, {path.name: self._new(b"")})
        elif operation == "write":
            self._content[names[path.name]] += argument
        elif operation == "fsync":
            self._synced[names[path.name]] = len(self._content[names[path.name]])
        elif operation == "rename":
            assert argument.parent == call[1].parent, "the model knows renames within one folder"
            self._change(folder, {path.name: None, argument.name: names[path.name]})
        elif operation == "remove":
            self._change(folder, {path.name: None})
        else:
            assert operation == "fsync_folder"
            self._sync_names(self._folder(path))

    def states(self) -> Iterator[Snapshot]:
        for kept in itertools.product((False, True), repeat=len(self._pending)):
            names = {folder: dict(children) for folder, children in self._durable.items()}
            for change, keep in zip(self._pending, kept):
                if keep:
                    _apply(names, change)
            yield from self._contents(dict(_walk(names, 0, PurePath())))

    def _contents(self, paths: dict[PurePath, int]) -> Iterator[Snapshot]:
        loose = sorted({n for n in paths.values() if n in self._content and self._synced[n] < len(self._content[n])})
        for fates in itertools.product(("kept", "lost", "zeros"), repeat=len(loose)):
            fate = dict(zip(loose, fates))
            yield {path: self._surviving(number, fate.get(number, "kept")) for path, number in paths.items()}

    def _surviving(self, number: int, fate: str) -> bytes | None:
        content = self._content.get(number)
        if content is None or fate == "kept":
            return content
        synced = self._synced[number]
        return content[:synced] + (b"" if fate == "lost" else bytes(len(content) - synced))

    def _new(self, content: bytes | None) -> int:
        number = len(self._live) + len(self._content)
        if content is None:
            self._live[number] = {}
        else:
            self._content[number], self._synced[number] = content, 0
        return number

    def _folder(self, path: PurePath) -> int:
        number = 0
        for part in path.parts:
            number = self._live[number][part]
        return number

    def _change(self, folder: int, names: dict[str, int | None]) -> None:
        _apply(self._live, (folder, names))
        self._pending.append((folder, names))

    def _sync_names(self, folder: int) -> None:
        for change in self._pending:
            if change[0] == folder:
                _apply(self._durable, change)
        self._pending = [change for change in self._pending if change[0] != folder]


def _apply(names: dict[int, dict[str, int]], change: NameChange) -> None:
    folder, changes = change
    children = names.setdefault(folder, {})
    for name, number in changes.items():
        if number is None:
            children.pop(name, None)
        else:
            children[name] = number


def _walk(names: dict[int, dict[str, int]], folder: int, path: PurePath) -> Iterator[tuple[PurePath, int]]:
    for name, number in sorted(names.get(folder, {}).items()):
        yield path / name, number
        yield from _walk(names, number, path / name)
