"""Checkpoints of one run: named global tensors and one JSON state per step, of which some complete one can be found at every instant.

A save writes a staging folder, syncs it and renames it into place; whatever interrupts it, the earlier checkpoints stay as they were.
The store knows neither model nor optimizer. `layout` has the names on disk.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from llmtrain.checkpoint.files import Files, no_space, remove_tree, storage_error
from llmtrain.checkpoint.integrity import read_checkpoint, read_manifest, read_state
from llmtrain.checkpoint.layout import (
    OLD,
    DamagedCheckpoint,
    parse_step_name,
    parse_work_name,
    step_name,
    work_name,
)
from llmtrain.checkpoint.owner import Owner, token_is_alive
from llmtrain.checkpoint.writer import bytes_needed, encode_state, write_checkpoint
from llmtrain.config.errors import Problem, StorageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose every byte matched its checksum."""

    step: int
    tensors: dict[str, Tensor]
    """On the CPU, global shapes, each with memory of its own."""
    state: dict[str, Any]
    skipped: tuple[str, ...]
    """Newer ones that could not be used, as `folder: reason`; the caller tells the user."""


class CheckpointStore:
    """The checkpoints in one folder. One process writes at a time (the lock of the run folder sees to that); any number may read."""

    def __init__(self, folder: Path, keep: int, files: Files = Files()) -> None:
        """
        Args:
            folder: holds the `step-…` folders; its parent must exist by the first save.
            keep: complete checkpoints that stay, the newest by step.
            files: the operating system; another one in tests.
        """
        assert keep >= 1
        self.folder = folder
        self.keep = keep
        self._files = files
        self._damaged: set[Path] = set()

    def published(self) -> list[int]:
        """Steps of all published folders in numeric order, damaged ones included; none means that nothing was ever saved here."""
        return sorted({step for step, _ in self._candidates()})

    def steps(self) -> list[int]:
        """Steps that are complete (sound manifest, all files of the right length), in numeric order.

        Raises:
            StorageError: a manifest cannot be read now, or is of a newer format.
        """
        return sorted({step for step, path in self._candidates() if self._is_complete(path)})

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Publish a checkpoint, durable on return, then remove those beyond `keep`.

        A step that exists already is replaced as a whole: the old folder is moved aside, stays loadable, and goes once the new one is
        durable. So a run that resumed may save its step again, whatever is there.

        Args:
            step: optimizer updates made.
            tensors: global tensors by name, on any device, tied ones once.
            state: JSON values; comes back equal.

        Returns:
            The published folder.

        Raises:
            StorageError: nothing was published; earlier checkpoints are as they were and a later save can work. (One case excepted:
                when the very last sync fails, the new checkpoint is visible and complete but may not survive a power cut.)
            TypeError: `state` is more than JSON.
        """
        encoded = encode_state(state)
        needed = bytes_needed(tensors, encoded)
        staging = self._work_folder("staging", step)
        try:
            self._prepare(needed)
            write_checkpoint(staging, step, tensors, encoded, self._files)
            published = self._publish(step, staging)
        except OSError as error:
            raise storage_error(self._files, error, f"save step {step} into", self.folder, needed=needed) from error
        finally:
            # Still there only when the save failed or was interrupted. Should this fail as well, the next save removes it.
            with suppress(OSError):
                if staging.exists():
                    remove_tree(self._files, staging)
        try:
            self._prune(step)
        except (OSError, StorageError) as error:
            # The checkpoint is safe, and what could not be removed is tried again after the next one.
            _log.warning("old checkpoints stay in %s: %s", self.folder, error)
        return published

    def load(self, step: int | None = None, *, prefix: str = "") -> Loaded:
        """Read a checkpoint, all checksums verified before any tensor is returned.

        Args:
            step: the one to read; None takes the newest that is good and names those it skipped.
            prefix: of the names of the tensors to return; the others take no memory.

        Raises:
            StorageError: there is none, the one asked for is damaged, it is of a newer format, or it cannot be read now.
        """
        skipped: list[str] = []
        for found, path in self._candidates():
            if step not in (None, found):
                continue
            try:
                tensors, state = read_checkpoint(path, self._files, prefix)
            except DamagedCheckpoint as reason:
                self._damaged.add(path)
                skipped.append(f"{path.name}: {reason}")
            except OSError as error:
                raise storage_error(self._files, error, "read", path) from error
            else:
                return Loaded(found, tensors, state, tuple(skipped))
        raise self._nothing_to_load(step, skipped)

    def newest_state(self) -> dict[str, Any] | None:
        """The JSON state of the newest checkpoint whose state is sound, without its tensors; None where there is none.

        Raises:
            StorageError: it is of a newer format, or cannot be read now.
        """
        for _, path in self._candidates():
            try:
                return read_state(path, self._files)
            except DamagedCheckpoint:
                continue
            except OSError as error:
                raise storage_error(self._files, error, "read", path) from error
        return None

    def _candidates(self) -> list[tuple[int, Path]]:
        """Published folders, newest step first, of one step the current before the `.old` one."""
        try:
            children = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        except OSError as error:
            raise storage_error(self._files, error, "list", self.folder) from error
        parsed = [(parse_step_name(path.name), path) for path in children if path.is_dir()]
        found = [(name[0], not name[1], path) for name, path in parsed if name is not None]
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _is_complete(self, path: Path) -> bool:
        try:
            read_manifest(path, self._files)
        except DamagedCheckpoint:
            return False
        except OSError as error:
            raise storage_error(self._files, error, "read", path) from error
        return True

    def _nothing_to_load(self, step: int | None, skipped: list[str]) -> StorageError:
        what = f"cannot load {'any checkpoint' if step is None else f'step {step}'} from {self.folder}"
        steps = self.steps()
        exist = f"complete checkpoints: {', '.join(map(str, steps)) or 'none'}"
        rule = "\n        ".join([*skipped, exist] if skipped else [f"there is none; {exist}" if step is not None else exist])
        return StorageError(Problem(what, rule, f"step {steps[-1]}, the newest" if step is not None and steps else ""))

    def _is_good(self, path: Path) -> bool:
        return path not in self._damaged and self._is_complete(path)

    def _work_folder(self, kind: str, step: int) -> Path:
        return self.folder / work_name(kind, step, Owner.this_process().token, secrets.token_hex(4))

    def _prepare(self, needed: int) -> None:
        """Make the folder, remove what dead or failed saves left behind, and see that the new one fits."""
        if not self.folder.is_dir():
            self._files.make_folder(self.folder)
            self._files.fsync_folder(self.folder.parent)
        self._reap()
        free = self._files.free_bytes(self.folder)
        if free is not None and free < needed:
            raise no_space(self.folder, needed, free)

    def _reap(self) -> None:
        """Remove staging and trash folders whose process is gone or is this one."""
        mine = Owner.this_process().token
        for path in sorted(self.folder.iterdir()):
            token = parse_work_name(path.name)
            if token is None or (token != mine and token_is_alive(token)):
                continue
            try:
                remove_tree(self._files, path)
            except OSError as error:
                # Left-overs are in nobody's way (a reader may hold a file open on NFS); the next save tries again.
                _log.warning("cannot remove %s: %s", path, error)

    def _publish(self, step: int, staging: Path) -> Path:
        published = self.folder / step_name(step)
        old = self.folder / (step_name(step) + OLD)
        if published.exists():
            if old.exists():
                # A save of this step was cut short before. Of the two, a good one stays until the new one is durable.
                spare = old if self._is_good(published) else published
                self._files.rename(spare, self._work_folder("trash", step))
            if published.exists():
                self._files.rename(published, old)
        self._files.rename(staging, published)
        self._files.fsync_folder(self.folder)
        self._damaged.discard(published)
        return published

    def _prune(self, saved: int) -> None:
        """Remove what is older than the newest `keep` good checkpoints, and `.old` folders that have a good successor.

        The one just saved always stays; one that `load` found damaged does not count. Victims are renamed first: a removal that is
        cut short never leaves half a checkpoint under a published name.
        """
        candidates = self._candidates()
        good = [(step, path) for step, path in candidates if self._is_good(path)]
        newest = sorted({step for step, _ in good} | {saved})[-self.keep :]
        oldest_kept = min(newest[0], saved)
        replaced = {step_name(step) + OLD for step, path in good if path.name == step_name(step)}
        victims = [(step, path) for step, path in candidates if step < oldest_kept or path.name in replaced]
        for step, path in victims:
            self._files.rename(path, self._work_folder("trash", step))
        if victims:
            self._files.fsync_folder(self.folder)
        self._reap()


def match_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str, cure: str = "") -> None:
    """Check that two sets of tensors agree in names, shapes and dtypes; values are not looked at.

    Args:
        expected: what the run is made of.
        found: what the checkpoint holds.
        what: what they are, e.g. `parameters`.
        cure: what to do where they do not agree; empty = what a resumed run has to do.

    Raises:
        StorageError: listing every missing, extra, mis-shaped and mis-typed one.
    """
    both = [name for name in expected if name in found]
    shapes = [(name, list(found[name].shape), list(expected[name].shape)) for name in both]
    dtypes = [(name, found[name].dtype, expected[name].dtype) for name in both]
    lines = [f"missing     {name} {list(expected[name].shape)}" for name in expected if name not in found]
    lines += [f"not wanted  {name} {list(found[name].shape)}" for name in found if name not in expected]
    lines += [f"shape       {name} is {got}, the run has {wanted}" for name, got, wanted in shapes if got != wanted]
    lines += [f"dtype       {name} is {got}, the run has {wanted}" for name, got, wanted in dtypes if got != wanted]
    if lines:
        matching = len(expected) - sum(1 for name in expected if name not in found)
        what_differs = f"the checkpoint's {what} are not those of this run ({matching} of {len(expected)} names found)"
        resume = "resume with the config the checkpoint was made with (config.yaml of its run folder), or start a new run.name"
        raise StorageError(Problem(what_differs, "\n        ".join(lines), cure or resume))
