"""A rank's position: what counts, and what a reader finds while it changes and after its process was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from llmtrain.dist.position import Position, Snapshot, mapped_position, read_position

pytestmark = pytest.mark.timeout(60)


def test_each_change_shows_in_the_snapshot(tmp_path: Path) -> None:
    for position in (Position(), mapped_position(tmp_path / "position")):
        assert position.snapshot() == Snapshot("start", 0, 0, 0, 0)
        position.at_step(7)
        position.at_microbatch(3)
        position.enter("backward")
        position.issued()
        position.issued()
        position.tick()
        assert position.snapshot() == Snapshot("backward", 7, 3, 2, 1)
        position.at_step(8)
        assert position.snapshot() == Snapshot("backward", 8, 0, 2, 1)
    assert read_position(tmp_path / "position") == Snapshot("backward", 8, 0, 2, 1)


def test_a_snapshot_travels_as_json() -> None:
    snapshot = Snapshot("optimizer", 2**40, 3, 5, 7)
    assert Snapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))) == snapshot


def test_a_long_phase_is_cut_and_not_refused(tmp_path: Path) -> None:
    mapped_position(tmp_path / "position").enter("x" * 40 + "é")
    found = read_position(tmp_path / "position")
    assert found is not None and found.phase == "x" * 24


def test_no_file_and_damage_give_none_or_the_change_before(tmp_path: Path) -> None:
    file = tmp_path / "position"
    assert read_position(file) is None
    position = mapped_position(file)
    position.at_step(1)
    position.at_step(2)
    whole = file.read_bytes()
    # Every byte of the newest record but the padding, changed one at a time: the record before it is found.
    newest = whole.index(b"\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") - 8
    for place in range(newest, newest + 68):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = read_position(file)
        assert found is not None and found.step == 1
    for empty in (b"", whole[:50], bytes(len(whole))):
        file.write_bytes(empty)
        assert read_position(file) is None


def test_a_new_process_starts_anew_in_an_old_file(tmp_path: Path) -> None:
    mapped_position(tmp_path / "position").at_step(9)
    mapped_position(tmp_path / "position")
    assert read_position(tmp_path / "position") == Snapshot("start", 0, 0, 0, 0)


def test_readers_see_whole_positions_and_a_killed_process_leaves_its_last(tmp_path: Path) -> None:
    """The child keeps step, collectives and ticks in a fixed relation but for the change in between, which is legal too."""
    file = tmp_path / "position"
    child = os.fork()
    if child == 0:
        position = mapped_position(file)
        while True:
            position.step += 1
            position.microbatch = position.ticks = position.step
            position.collectives = 2 * position.step
            position.enter(f"phase {position.step % 10}" * 2)
    last = 0
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            found = read_position(file)
            if found is None or found.step == 0:
                continue
            assert found == Snapshot(f"phase {found.step % 10}" * 2, found.step, found.step, 2 * found.step, found.step)
            assert found.step >= last
            last = found.step
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert last > 1000
    found = read_position(file)
    assert found is not None and found.step >= last and found.collectives == 2 * found.step
