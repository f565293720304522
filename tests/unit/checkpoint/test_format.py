"""The manifest as a format: versions, pieces, paths that lead out, and names of work folders."""

import json

import pytest
import safetensors.torch
import torch

from llmtrain.checkpoint.layout import (
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    checksum,
    decode_manifest,
    encode_manifest,
    parse_step_name,
    parse_work_name,
    step_name,
    work_name,
)
from llmtrain.checkpoint.store import CheckpointStore, match_tensors
from llmtrain.config.errors import StorageError


def write(folder, tensor_files, tensors, step=1, state=b"{}"):
    """A checkpoint made by hand: file name → tensors in it, and the manifest's tensor entries."""
    blobs = {name: safetensors.torch.save(content) for name, content in tensor_files.items()} | {"state.json": state}
    path = folder / step_name(step)
    path.mkdir(parents=True)
    entries = {name: FileEntry(len(blob), checksum(blob)) for name, blob in blobs.items()}
    for name, blob in blobs.items():
        (path / name).write_bytes(blob)
    (path / "MANIFEST.json").write_bytes(encode_manifest(Manifest(step, entries, tensors)))
    return CheckpointStore(folder, 1)


def seal(document):
    body = json.dumps(document, sort_keys=True, indent=1).encode()
    return json.dumps({**document, "crc32": checksum(body)}, sort_keys=True, indent=1).encode()


def test_pieces_written_by_several_ranks_make_the_global_tensor(tmp_path):
    whole = torch.arange(35.0).reshape(5, 7)
    boxes = {"rank0.safetensors": (0, 0, 3, 7), "rank1.safetensors": (3, 0, 2, 4), "rank2.safetensors": (3, 4, 2, 3)}
    files = {name: {"w": whole[i : i + h, j : j + w].contiguous()} for name, (i, j, h, w) in boxes.items()}
    files["rank3.safetensors"] = {"w": torch.empty(0, 7)}
    boxes["rank3.safetensors"] = (5, 0, 0, 7)
    pieces = tuple(Piece(name, (i, j), (h, w)) for name, (i, j, h, w) in boxes.items())
    store = write(tmp_path, files, {"w": TensorEntry((5, 7), "float32", pieces)})
    assert torch.equal(store.load().tensors["w"], whole)


@pytest.mark.parametrize(
    "boxes, reason",
    [
        ([(0, 2), (3, 1)], "do not cover"),
        ([(0, 3), (2, 2)], "overlap"),
        ([(0, 2), (2, 3)], "outside"),
        ([], "do not cover"),
        ([(0, 4), (0, 4)], "overlap"),
    ],
)
def test_pieces_that_do_not_tile_the_tensor(tmp_path, boxes, reason):
    files = {f"r{n}": {"w": torch.zeros(size)} for n, (_, size) in enumerate(boxes)}
    pieces = tuple(Piece(f"r{n}", (start,), (size,)) for n, (start, size) in enumerate(boxes))
    store = write(tmp_path, files, {"w": TensorEntry((4,), "float32", pieces)})
    with pytest.raises(StorageError, match=reason):
        store.load()


@pytest.mark.parametrize(
    "entry, reason",
    [
        (TensorEntry((2, 2), "float32", (Piece("t", (0,), (4,)),)), "dimensions"),
        (TensorEntry((4,), "float32", (Piece("u", (0,), (4,)),)), "does not list"),
        (TensorEntry((4,), "bfloat16", (Piece("t", (0,), (4,)),)), "dtype"),
        (TensorEntry((2, 2), "float32", (Piece("t", (0, 0), (2, 2)),)), "shape"),
    ],
)
def test_entries_that_contradict_the_file(tmp_path, entry, reason):
    store = write(tmp_path, {"t": {"w": torch.zeros(4)}}, {"w": entry})
    with pytest.raises(StorageError, match=reason):
        store.load()


def test_tensors_that_the_manifest_does_not_list(tmp_path):
    entry = TensorEntry((4,), "float32", (Piece("t", (0,), (4,)),))
    store = write(tmp_path, {"t": {"w": torch.zeros(4), "extra": torch.zeros(1)}}, {"w": entry})
    with pytest.raises(StorageError, match="other tensors"):
        store.load()


def test_a_file_that_is_no_safetensors(tmp_path):
    entry = TensorEntry((4,), "float32", (Piece("state2.json", (0,), (4,)),))
    path = tmp_path / "step-00000001"
    path.mkdir()
    files = {"state.json": b"{}", "state2.json": b"\xff" * 40}
    for name, data in files.items():
        (path / name).write_bytes(data)
    entries = {name: FileEntry(len(data), checksum(data)) for name, data in files.items()}
    (path / "MANIFEST.json").write_bytes(encode_manifest(Manifest(1, entries, {"w": entry})))
    with pytest.raises(StorageError, match="no safetensors"):
        CheckpointStore(tmp_path, 1).load()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "a\\b", "~", ".hidden"])
def test_paths_that_lead_out_of_the_folder_are_refused(tmp_path, name):
    (tmp_path / "secret").write_bytes(b"{}")
    entry = FileEntry(2, checksum(b"{}"))
    data = encode_manifest(Manifest(1, {"state.json": entry, name: entry}, {}))
    with pytest.raises(DamagedCheckpoint, match="file name"):
        decode_manifest(data, tmp_path)
    tensor = TensorEntry((1,), "float32", (Piece(name, (0,), (1,)),))
    with pytest.raises(DamagedCheckpoint):
        decode_manifest(encode_manifest(Manifest(1, {"state.json": entry}, {"w": tensor})), tmp_path)


def test_a_newer_format_is_refused_naming_both(tmp_path):
    """Also when no step is asked for: an older checkpoint must not quietly take the place of the newest."""
    store = CheckpointStore(tmp_path, 5)
    store.save(1, {}, {})
    path = store.save(2, {}, {}) / "MANIFEST.json"
    path.write_bytes(seal({"format_version": 7, "step": 2, "something": "new"}))
    for step in (None, 2):
        with pytest.raises(StorageError, match=r"format_version 7.*up to 1"):
            store.load(step)
    with pytest.raises(StorageError, match="format_version 7"):
        store.steps()
    assert store.published() == [1, 2]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000, seal({"format_version": 1})]
)
def test_manifests_that_are_none(tmp_path, data):
    with pytest.raises(DamagedCheckpoint):
        decode_manifest(data, tmp_path)


def test_manifest_survives_the_round_trip(tmp_path):
    manifest = Manifest(
        12,
        {"state.json": FileEntry(2, "00000000"), "t": FileEntry(9, "ffffffff")},
        {"w": TensorEntry((), "int64", (Piece("t", (), ()),))},
    )
    assert decode_manifest(encode_manifest(manifest), tmp_path) == manifest


@pytest.mark.parametrize(
    "name, found",
    [
        ("step-00000012", (12, False)),
        ("step-00000012.old", (12, True)),
        ("step-123456789", (123456789, False)),
        ("step-000000012", None),
        ("step-12", None),
        ("step-final", None),
        ("step-00000012.older", None),
        ("Step-00000012", None),
        ("step-0000001２", None),
        ("step-00000012\n", None),
    ],
)
def test_names_of_steps(name, found):
    assert parse_step_name(name) == found


def test_names_of_work_folders():
    name = work_name("staging", 12, "0123abcd-45-678", "89abcdef")
    assert parse_work_name(name) == "0123abcd-45-678"
    assert [parse_work_name(other) for other in (".staging", ".staging-12-x", name[1:], name + "x")] == [None] * 4


def test_b42_b43_match_lists_everything_that_differs():
    run = {"same": torch.zeros(2), "gone": torch.zeros(3), "wide": torch.zeros(2, 3), "long": torch.zeros(1, dtype=torch.int64)}
    checkpoint = {"same": torch.ones(2), "_orig_mod.gone": torch.zeros(3), "wide": torch.zeros(3, 2), "long": torch.zeros(1)}
    with pytest.raises(StorageError) as caught:
        match_tensors(run, checkpoint, "parameters")
    told = str(caught.value)
    assert "parameters" in told and "3 of 4 names found" in told
    assert "missing     gone [3]" in told
    assert "not wanted  _orig_mod.gone [3]" in told
    assert "shape       wide is [3, 2], the run has [2, 3]" in told
    assert "dtype       long is torch.float32, the run has torch.int64" in told
    assert "same" not in told.replace("the same", "")
    match_tensors(run, {name: tensor.clone() for name, tensor in reversed(run.items())}, "parameters")


@pytest.mark.parametrize("change", ["drop", "add", "reshape", "cast"])
def test_b42_b43_one_difference_is_enough(change):
    run = {"a.moment1": torch.zeros(2, 3), "a.moment2": torch.zeros(2, 3)}
    found = dict(run)
    if change == "drop":
        del found["a.moment2"]
    elif change == "add":
        found["b.moment1"] = torch.zeros(1)
    else:
        found["a.moment2"] = torch.zeros(6) if change == "reshape" else torch.zeros(2, 3).bfloat16()
    with pytest.raises(StorageError, match="optimizer state"):
        match_tensors(run, found, "optimizer state")
