"""A power cut at any instant of a save leaves the old checkpoint or the new one, never nothing and never a mixture."""

import pytest
import torch
from helpers.faulty_files import RecordingFiles
from helpers.power_cut import crash_states, restore, snapshot

from llmtrain.checkpoint.files import write_atomic
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.errors import StorageError


def tensors(value):
    return {"a": torch.full((30,), float(value)), "b": torch.full((2, 3), value, dtype=torch.int64)}


def value_of(loaded):
    """The value a checkpoint was made with; fails for a mixture."""
    values = {*loaded.tensors["a"].tolist(), *loaded.tensors["b"].flatten().tolist(), loaded.state["value"]}
    assert len(values) == 1 and sorted(loaded.tensors) == ["a", "b"]
    return values.pop()


def save(folder, step, value, keep, files):
    CheckpointStore(folder, keep, files).save(step, tensors(value), {"value": value})


CASES = {
    # earlier saves (step, value), the recorded one, keep
    "first": ([], (1, 1), 2),
    "next": ([(1, 1)], (2, 2), 2),
    "prune_the_only_other": ([(1, 1)], (2, 2), 1),
    "prune_the_oldest": ([(1, 1), (2, 2)], (3, 3), 2),
    "same_step_again": ([(1, 1)], (1, 2), 1),
    "same_step_again_beside_an_older": ([(1, 1), (2, 2)], (2, 3), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_b37_power_cut_while_saving(case, tmp_path):
    earlier, (step, value), keep = CASES[case]
    root = tmp_path / "disk"
    root.mkdir()
    files = RecordingFiles()
    for old_step, old_value in earlier:
        save(root / "checkpoints", old_step, old_value, keep, files)
    before = snapshot(root)
    files.calls.clear()
    save(root / "checkpoints", step, value, keep, files)

    legal = {(earlier[-1][0], earlier[-1][1]), (step, value)} if earlier else {None, (step, value)}
    states = crash_states(before, files.calls, root)
    seen = set()
    for index, state in enumerate(states):
        disk = tmp_path / f"cut{index}"
        restore(state, disk)
        seen.add(judge(disk / "checkpoints"))
    assert seen == legal
    assert len(states) > 20


def judge(folder):
    """What a restart finds after the cut, having checked that the run can go on: it saves again, and that is then the newest."""
    store = CheckpointStore(folder, 2)
    found = None
    assert store.published() == store.steps(), "a folder is visible that is not complete"
    if store.published():
        loaded = store.load()
        found = (loaded.step, value_of(loaded))
    store.save(9, tensors(9), {"value": 9})
    assert value_of(store.load()) == 9
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return found


def test_power_cut_while_replacing_a_small_file(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    files = RecordingFiles()
    write_atomic(files, root / "status.json", b"old")
    before = snapshot(root)
    files.calls.clear()
    write_atomic(files, root / "status.json", b"the new one")
    found = set()
    for index, state in enumerate(crash_states(before, files.calls, root)):
        restore(state, tmp_path / f"cut{index}")
        found.add((tmp_path / f"cut{index}" / "status.json").read_bytes())
    assert found == {b"old", b"the new one"}


def test_the_model_of_the_disk_finds_a_missing_sync(tmp_path):
    """The enumeration itself is worth something: without the sync of the files it reports checkpoints that do not load."""

    class Forgetful(RecordingFiles):
        def fsync(self, descriptor):
            pass

    files = Forgetful()
    (tmp_path / "disk").mkdir()
    save(tmp_path / "disk" / "checkpoints", 1, 1, 2, files)
    unusable = 0
    for index, state in enumerate(crash_states({}, files.calls, tmp_path / "disk")):
        restore(state, tmp_path / f"cut{index}")
        store = CheckpointStore(tmp_path / f"cut{index}" / "checkpoints", 2)
        try:
            unusable += bool(store.published()) and not store.load()
        except StorageError:
            unusable += 1
    assert unusable > 0
