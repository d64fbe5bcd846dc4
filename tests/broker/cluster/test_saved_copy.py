"""The copies of schedules and groups on a broker's disk, which `portalmq adopt` reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.domain import HandClock

from portalmq.broker.cluster import saved_copy
from portalmq.broker.cluster.saved_copy import SCHEDULES, CopySaver, Saved, SavedCopy
from portalmq.broker.partition.native import NativeThreads
from portalmq.broker.storage.errors import CorruptFile
from portalmq.control_plane.plane import PlaneUnavailable
from portalmq.control_plane.schedules import ScheduleSpec, ScheduleState
from portalmq.control_plane.state import encode

BEAT = ScheduleState("beat", 1 << 52, ScheduleSpec("t", None, 1_000, "UTC", b"\x00\xff", "text/plain"), "id", 0, 1, 2)
NOON = msgspec.structs.replace(BEAT, name="noon", schedule_id=BEAT.schedule_id + 1)


class Saving:
    """A saver, and what it is told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = HandClock(5_000)
        self.schedules = [BEAT, NOON]
        self.is_whole = True
        self.saver = CopySaver(
            SCHEDULES,
            directory,
            lambda: list(self.schedules),
            lambda: self.is_whole,
            self.clock,
            NativeThreads(1),  # type: ignore[arg-type]
        )

    def saved(self) -> Saved[ScheduleState] | None:
        self.saver.save()
        return SCHEDULES.read(self.directory)


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    return Saving(tmp_path)


def test_what_is_saved_is_read_with_its_time(saving: Saving) -> None:
    assert SCHEDULES.read(saving.directory) is None
    assert saving.saved() == Saved(5_000, [BEAT, NOON])
    saving.clock.advance(1_000)
    saving.schedules = []
    assert saving.saved() == Saved(6_000, [])


def test_it_is_written_only_when_a_definition_has_changed(saving: Saving) -> None:
    saving.saver.save()
    saving.clock.advance(1_000)
    assert saving.saved() == Saved(5_000, [BEAT, NOON])


def test_a_control_plane_that_lost_its_content_does_not_empty_the_file(saving: Saving) -> None:
    saving.saver.save()
    saving.schedules, saving.is_whole = [], False
    assert saving.saved() == Saved(5_000, [BEAT, NOON])


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("left", [[], [NOON, msgspec.structs.replace(NOON, name="new")]])
def test_a_control_plane_that_is_being_emptied_does_not_empty_the_file(
    saving: Saving, monkeypatch: pytest.MonkeyPatch, left: list[ScheduleState], restarts: bool
) -> None:
    """Tools that remove a tree begin at its leaves, and the id of the cluster may go last."""
    saving.saver.save()
    if restarts:
        saving = Saving(saving.directory)
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        saving.is_whole = False
        saving.clock.advance(1_000)
        if len(pauses) == 2:
            raise InterruptedError

    monkeypatch.setattr(saved_copy, "gevent", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(saved_copy, "time", SimpleNamespace(monotonic=lambda: sum(pauses)))
    saving.schedules = left
    saving.saver.note()
    with pytest.raises(InterruptedError):
        saving.saver._run()
    assert SCHEDULES.read(saving.directory) == Saved(5_000, [BEAT, NOON])
    assert pauses == [saved_copy.FEWER_FOR_S, saved_copy.PAUSE_S_MIN], "the wait is no work to pause for"


def test_what_could_not_be_written_is_written_later(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[Exception] = [OSError("full"), PlaneUnavailable("away")]

    real = SavedCopy.write

    def write(*arguments: Any) -> None:
        if faults:
            raise faults.pop()
        real(*arguments)

    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            raise InterruptedError

    monkeypatch.setattr(SavedCopy, "write", write)
    monkeypatch.setattr(saved_copy, "gevent", SimpleNamespace(sleep=sleep))
    saving.saver.note()
    with pytest.raises(InterruptedError):
        saving.saver._run()
    assert SCHEDULES.read(saving.directory) == Saved(5_000, [BEAT, NOON])
    assert min(pauses) >= 1


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    SCHEDULES.write(tmp_path, 5_000, [encode(BEAT)])
    file = tmp_path / SCHEDULES.file
    content = file.read_bytes()
    for bit in range(8 * len(content)):
        file.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
        with pytest.raises(CorruptFile, match="is damaged"):
            SCHEDULES.read(tmp_path)


@pytest.mark.parametrize("part", [0, 1, 64, 65, 80, -1])
def test_a_part_of_the_file_is_damaged(tmp_path: Path, part: int) -> None:
    SCHEDULES.write(tmp_path, 5_000, [encode(BEAT)])
    file = tmp_path / SCHEDULES.file
    file.write_bytes(file.read_bytes()[:part])
    with pytest.raises(CorruptFile, match="is damaged"):
        SCHEDULES.read(tmp_path)
