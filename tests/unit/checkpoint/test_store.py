"""Saving, finding, loading and removing checkpoints."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from helpers.faulty_files import UnsyncedFiles

from llmtrain.checkpoint import writer
from llmtrain.checkpoint.layout import work_name
from llmtrain.checkpoint.owner import Owner
from llmtrain.checkpoint.store import CheckpointStore
from llmtrain.config.errors import StorageError

STATE = {"step": 3, "loss": 0.1 + 0.2, "tiny": 5e-324, "ids": [1, 2**63], "nested": {"text": "ü\n", "none": None, "yes": True}}


def save_steps(folder, *steps, keep=100):
    store = CheckpointStore(folder, keep, UnsyncedFiles())
    for step in steps:
        store.save(step, {"w": torch.full((4,), float(step))}, {"step": step})
    return store


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


# --- what comes back ---


def all_kinds():
    base = torch.randn(6, 4)
    return {
        "fp32": torch.tensor([1.0, -0.0, float("inf"), float("nan"), 1e-45]),
        "fp64": torch.randn(3, dtype=torch.float64),
        "bf16": torch.randn(5, 7).bfloat16(),
        "fp16": torch.randn(3).half(),
        "int64": torch.tensor([2**63 - 1, -(2**63)]),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(7.5),
        "step": torch.tensor(2**40),
        "empty": torch.empty(0, 5),
        "nothing": torch.empty(0, dtype=torch.bfloat16),
        "transposed": base.T,
        "row": base[2],
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "odd/name with ü": torch.ones(1),
    }


@pytest.mark.parametrize("file_bytes", [1, 100, 2**28])
def test_every_dtype_and_shape_comes_back_bit_for_bit(folder, file_bytes, monkeypatch):
    monkeypatch.setattr(writer, "FILE_BYTES", file_bytes)
    tensors = all_kinds()
    path = CheckpointStore(folder, 1).save(3, tensors, STATE)
    loaded = CheckpointStore(folder, 1).load()
    assert (loaded.step, loaded.state, loaded.skipped) == (3, STATE, ())
    assert list(loaded.tensors) == sorted(tensors)
    for name, tensor in tensors.items():
        found = loaded.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found), bits(tensor.detach())), name
        found.zero_()  # writable, and its own memory
    assert path == folder / "step-00000003"
    # Nothing on disk needs a pickle to be read.
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    assert len(list(path.iterdir())) == 2 + (1 if file_bytes == 2**28 else len(list(path.glob("*.safetensors"))))


def test_no_tensors_and_no_state(folder):
    CheckpointStore(folder, 1).save(0, {}, {})
    loaded = CheckpointStore(folder, 1).load()
    assert (loaded.step, loaded.tensors, loaded.state) == (0, {}, {})


@pytest.mark.parametrize(
    "value", [(1, 2), {1: "a"}, float("nan"), float("inf"), torch.tensor(1), {"a": [{"b": object()}]}, {1, 2}]
)
def test_state_that_json_would_change_is_refused_before_anything_is_written(folder, value):
    with pytest.raises(TypeError, match="state.x"):
        CheckpointStore(folder, 1).save(1, {}, {"x": value})
    assert not folder.exists()


def test_a_tensor_under_two_names_is_our_own_mistake(folder):
    weight = torch.zeros(3)
    with pytest.raises(AssertionError, match="head and embed"):
        CheckpointStore(folder, 1).save(1, {"embed": weight, "head": weight}, {})
    CheckpointStore(folder, 1).save(1, {"left": weight[:2], "right": weight[2:]}, {})


def test_later_changes_of_a_tensor_do_not_reach_the_checkpoint(folder):
    weight = torch.zeros(3)
    store = CheckpointStore(folder, 1)
    store.save(1, {"w": weight}, {})
    weight.fill_(7)
    assert store.load().tensors["w"].tolist() == [0, 0, 0]


# --- which ones there are ---


def test_no_folder_yet(folder):
    store = CheckpointStore(folder, 1)
    assert (store.published(), store.steps()) == ([], [])
    with pytest.raises(StorageError, match="none"):
        store.load()


def test_asking_for_a_missing_step_lists_what_exists(folder):
    store = save_steps(folder, 5, 9, 10)
    assert store.load(9).state == {"step": 9}
    with pytest.raises(StorageError) as caught:
        store.load(7)
    assert "step 7" in str(caught.value) and "5, 9, 10" in str(caught.value)


def test_b39_the_newest_by_number_stay(folder):
    """Steps whose order as text differs, modification times that lie, and folders of the user."""
    folder.mkdir()
    (folder / "step-final").mkdir()
    (folder / "step-final" / "weights").write_text("mine")
    (folder / "notes").write_text("mine")
    for name in ("step-8", "step-000000009", "step-00000008.bak", ".trash", ".staging-me", "step-00000001-copy"):
        (folder / name).mkdir()
    foreign = {path.name for path in folder.iterdir()}
    kept = []
    for step in (8, 9, 10, 11, 99, 100, 101, 99_999_999, 100_000_000):
        path = save_steps(folder, step, keep=2).folder / f"step-{step:08d}"
        os.utime(path, (2e9 - step, 2e9 - step))
        kept = [*kept, step][-2:]
        assert CheckpointStore(folder, 2).steps() == kept
        assert {path.name for path in folder.iterdir()} == foreign | {f"step-{step:08d}" for step in kept}
        assert CheckpointStore(folder, 2).load().step == step
    assert (folder / "step-final" / "weights").read_text() == "mine"


def test_b39_incomplete_ones_do_not_count(folder):
    save_steps(folder, 7, 8, 9, 10, 11)
    (folder / "step-00000011" / "MANIFEST.json").unlink()
    (folder / "step-00000009" / "state.json").unlink()
    truncate(folder / "step-00000007" / "tensors-00000.safetensors")
    (folder / "step-00000099").mkdir()
    store = CheckpointStore(folder, 2)
    assert store.published() == [7, 8, 9, 10, 11, 99]
    assert store.steps() == [8, 10]
    store.save(12, {}, {})
    assert store.steps() == [10, 12]
    # Broken ones older than those that are kept went too; newer ones are left to be looked at.
    assert store.published() == [10, 11, 12, 99]


@pytest.mark.parametrize("keep", [1, 2])
def test_b39_the_only_good_one_is_never_removed(folder, keep):
    """A newer folder of the right size but with rotten bytes must not push out the good ones."""
    save_steps(folder, 100, 200, 300)
    for step in (200, 300):
        flip_bit(next((folder / f"step-00000{step}").glob("*.safetensors")), -1)
    store = CheckpointStore(folder, keep)
    loaded = store.load()
    assert loaded.step == 100
    assert [text.split(":")[0] for text in loaded.skipped] == ["step-00000300", "step-00000200"]
    store.save(150, {"w": torch.full((4,), 150.0)}, {"step": 150})
    assert CheckpointStore(folder, keep).load().step == 150
    assert (folder / "step-00000100").exists() == (keep == 2)
    store.save(200, {"w": torch.full((4,), 200.0)}, {"step": 200})
    assert CheckpointStore(folder, keep).load().state == {"step": 200}


def test_one_saved_below_newer_ones_stays(folder):
    store = save_steps(folder, 300, 400)
    CheckpointStore(folder, 1).save(250, {}, {})
    assert 250 in store.steps() and 400 in store.steps()


def test_saving_a_step_again_replaces_it_as_a_whole(folder):
    store = save_steps(folder, 1, 2, keep=2)
    store.save(2, {"other": torch.ones(2)}, {"again": True})
    loaded = store.load()
    assert (loaded.step, list(loaded.tensors), loaded.state) == (2, ["other"], {"again": True})
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_an_old_folder_counts_until_its_step_is_there_again(folder):
    """What a kill between the two renames of a replacement leaves."""
    store = save_steps(folder, 1, 2)
    (folder / "step-00000002").rename(folder / "step-00000002.old")
    assert store.steps() == [1, 2]
    assert store.load().step == store.load(2).step == 2
    save_steps(folder, 3, keep=2)
    assert store.steps() == [2, 3]
    save_steps(folder, 2, keep=2)
    assert store.steps() == [2, 3] and not (folder / "step-00000002.old").exists()


def test_of_two_earlier_folders_the_good_one_is_kept_until_the_end(folder):
    store = save_steps(folder, 2)
    shutil.copytree(folder / "step-00000002", folder / "step-00000002.old")
    flip_bit(folder / "step-00000002" / "state.json", 0)
    loaded = store.load()
    assert loaded.step == 2 and len(loaded.skipped) == 1
    store.save(2, {}, {"third": True})
    assert store.load().state == {"third": True}
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


def test_a_link_to_a_checkpoint_elsewhere_is_unlinked_not_emptied(folder, tmp_path):
    save_steps(folder, 1)
    (folder / "step-00000001").rename(tmp_path / "elsewhere")
    (folder / "step-00000001").symlink_to(tmp_path / "elsewhere")
    assert CheckpointStore(folder, 1).load().step == 1
    save_steps(folder, 2, keep=1)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3


# --- left-overs ---


def test_only_left_overs_of_dead_processes_are_removed(folder):
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        me = Owner.this_process()
        start = int((open(f"/proc/{other.pid}/stat").read()).rpartition(")")[2].split()[19])
        alive = Owner(me.host, me.boot_id, other.pid, start)
        reused = Owner(me.host, me.boot_id, other.pid, start + 1)
        rebooted = Owner(me.host, "deadbeef-0000", other.pid, start)
        names = {
            owner: work_name(kind, 1, owner.token, "0123abcd")
            for kind in ("staging",)
            for owner in (alive, reused, rebooted, me)
        }
        names["trash"] = work_name("trash", 1, reused.token, "89abcdef")
        for name in names.values():
            (folder / name / "deep").mkdir(parents=True)
            (folder / name / "deep" / "file").write_text("x")
        save_steps(folder, 1)
        assert {path.name for path in folder.iterdir()} == {names[alive], "step-00000001"}
    finally:
        other.communicate()
    save_steps(folder, 2)
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "step-00000002"}


def test_interrupted_save_leaves_nothing_behind(folder, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    store = save_steps(folder, 1)
    monkeypatch.setattr(writer, "encode_manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        store.save(2, {}, {})
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


# --- damage ---


def flip_bit(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def grow(path):
    path.write_bytes(path.read_bytes() + b"\0")


def swap_for_older(path):
    shutil.copy(path.parents[1] / "step-00000001" / path.name, path)


def become_a_folder(path):
    path.unlink()
    path.mkdir()


FILES = ["MANIFEST.json", "state.json", "tensors-00000.safetensors", "tensors-00001.safetensors"]


@pytest.mark.parametrize("harm", [truncate, empty, zero, grow, os.unlink, swap_for_older, become_a_folder])
@pytest.mark.parametrize("file", FILES)
def test_b37_each_file_harmed_in_turn(folder, file, harm, monkeypatch):
    monkeypatch.setattr(writer, "FILE_BYTES", 1)
    store = CheckpointStore(folder, 5)
    for step in (1, 2):
        store.save(step, {name: torch.full((4,), float(step)) for name in "ab"}, {"step": step})
    harm(folder / "step-00000002" / file)
    loaded = store.load()
    assert loaded.step == 1 and loaded.state == {"step": 1} and {t.sum().item() for t in loaded.tensors.values()} == {4.0}
    assert len(loaded.skipped) == 1 and "step-00000002" in loaded.skipped[0]
    assert file in loaded.skipped[0] or (file == "MANIFEST.json" and "MANIFEST" in loaded.skipped[0])
    with pytest.raises(StorageError) as caught:
        store.load(2)
    assert loaded.skipped[0] in str(caught.value) and "complete checkpoints: 1" in str(caught.value)


def test_b37_a_flipped_bit_is_found_wherever_it_is(folder):
    """A bit of every byte of every file of a small checkpoint, one at a time."""
    CheckpointStore(folder, 1).save(1, {"w": torch.arange(3.0)}, {"step": 1})
    store = CheckpointStore(folder, 1)
    for path in sorted((folder / "step-00000001").iterdir()):
        sound = path.read_bytes()
        for position in range(0, len(sound)):
            flip_bit(path, position, position % 8)
            with pytest.raises(StorageError):
                store.load()
            path.write_bytes(sound)
    assert store.load().step == 1


def test_nothing_good_left_is_an_error_that_gives_every_reason(folder):
    store = save_steps(folder, 1, 2)
    os.unlink(folder / "step-00000002" / "state.json")
    zero(folder / "step-00000001" / "state.json")
    with pytest.raises(StorageError) as caught:
        store.load()
    assert "step-00000002: state.json is missing" in str(caught.value)
    assert "step-00000001: state.json fails its checksum" in str(caught.value)


def test_a_whole_folder_under_another_step_is_damage(folder):
    store = save_steps(folder, 1)
    (folder / "step-00000001").rename(folder / "step-00000007")
    with pytest.raises(StorageError, match="MANIFEST.json is that of step 1"):
        store.load()


def test_extra_files_are_not_part_of_a_checkpoint(folder):
    store = save_steps(folder, 1)
    (folder / "step-00000001" / "README").write_text("a note")
    assert store.load().skipped == ()


def test_loading_leaves_the_folder_as_it_is(folder):
    store = save_steps(folder, 1)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
    time.sleep(0.01)
    store.load()
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_manifest_is_readable_json_with_what_a_tool_needs(folder):
    path = save_steps(folder, 1).folder / "step-00000001" / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    assert manifest["format_version"] == 1 and manifest["step"] == 1
    assert manifest["files"].keys() == {"state.json", "tensors-00000.safetensors"}
    pieces = [{"file": "tensors-00000.safetensors", "offset": [0], "shape": [4]}]
    assert manifest["tensors"] == {"w": {"shape": [4], "dtype": "float32", "pieces": pieces}}
