"""Adoption brings schedules back, and publishes no tick twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.domain import Fixture, HandClock, own_turns, running, schedule_turn
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.cluster.saved_copy import SCHEDULES, Saved
from portalmq.broker.server.adoption import Adoption, ReplicaFound, write_back
from portalmq.broker.server.adoption_reading import read_directories
from portalmq.broker.storage.disk import DataDirectory
from portalmq.contract.schedules import SCHEDULE_IDS_FROM
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.schedules import ScheduleSpec, ScheduleState, ScheduleStore
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import TopicState, encode

START_MS = 1_700_000_000_000
SPEC = ScheduleSpec("t", None, 1_000, "UTC", b"hi", "text/plain")
BEAT = ScheduleState("beat", SCHEDULE_IDS_FROM + 7, SPEC, "id", 0, START_MS, START_MS)


def directory(path: Path, broker_id: int, read_ms: int, *schedules: ScheduleState) -> Path:
    DataDirectory.open(path, cluster_id="c", broker_id=broker_id).close()
    SCHEDULES.write(path, read_ms, [encode(each) for each in schedules])
    return path


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    plane = Standalone(tmp_path / "plane")
    plane.start()
    yield Catalog(plane)
    plane.close()


def restored(catalog: Catalog, *directories: Path) -> tuple[list[str], dict[str, ScheduleState]]:
    messages = write_back(catalog, read_directories(directories), accept_loss=False, replace_cluster=False)
    return messages, {name: held.value for name, held in ScheduleStore(catalog.plane).all().items()}


def test_the_latest_copy_counts(tmp_path: Path, catalog: Catalog) -> None:
    noon = msgspec.structs.replace(BEAT, name="noon")
    paths = [directory(tmp_path / "1", 1, START_MS, BEAT, noon), directory(tmp_path / "2", 2, START_MS + 1_000, BEAT)]
    messages, schedules = restored(catalog, *paths)
    assert schedules == {"beat": BEAT}
    assert messages[-1] == "schedules: 1, as they were at 2023-11-14T22:13:21Z"
    assert restored(catalog, *paths) == (messages, schedules), "a repeat changes nothing"


def test_schedules_are_back_before_brokers_may_start_and_save_them(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory(tmp_path / "1", 1, START_MS, BEAT)

    def interrupted(below: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "reserve_producer_ids", interrupted)
    with pytest.raises(KeyboardInterrupt):
        restored(catalog, path)
    assert catalog.find_cluster_id() == "adopting c"
    assert ScheduleStore(catalog.plane).all()["beat"].value == BEAT


def test_a_damaged_copy_is_told_and_another_one_counts(tmp_path: Path, catalog: Catalog) -> None:
    paths = [directory(tmp_path / "1", 1, START_MS, BEAT), directory(tmp_path / "2", 2, START_MS + 1_000)]
    (paths[1] / SCHEDULES.file).write_bytes(b"x")
    messages, schedules = restored(catalog, *paths)
    assert schedules == {"beat": BEAT}
    assert f"{paths[1] / SCHEDULES.file} is damaged: its checksum differs" in messages


def test_without_a_copy_they_have_to_be_created_again(tmp_path: Path, catalog: Catalog) -> None:
    path = directory(tmp_path / "1", 1, START_MS, BEAT)
    (path / SCHEDULES.file).unlink()
    messages, schedules = restored(catalog, path)
    assert schedules == {}
    assert "create them again" in messages[-1]


def test_ids_of_schedules_in_any_copy_are_not_issued_again(tmp_path: Path) -> None:
    ahead = msgspec.structs.replace(BEAT, schedule_id=SCHEDULE_IDS_FROM + 10**15)
    paths = [directory(tmp_path / "1", 1, START_MS, ahead), directory(tmp_path / "2", 2, START_MS + 1_000)]
    assert 10**15 < read_directories(paths).next_producer_id < SCHEDULE_IDS_FROM


def test_only_ticks_of_logs_that_are_kept_are_published() -> None:
    def log(broker_id: int, end: int, tick_ms: int) -> ReplicaFound:
        return ReplicaFound(broker_id, "s", 1, end, 1, last_ticks=((BEAT.schedule_id, tick_ms),))

    adoption = Adoption(
        topics={"id": TopicState("t", "id", 2, 2, 2, wire.TopicConfig())},
        replicas={("id", 0): [log(1, 10, START_MS + 1_000), log(2, 10, START_MS + 1_000), log(3, 9, START_MS + 9_000)]},
    )
    assert adoption.schedules() == []
    adoption.saved = Saved(1, [BEAT])
    assert [each.since_ms for each in adoption.schedules()] == [START_MS + 1_000]


def test_a_schedule_that_has_moved_since_the_copy_publishes_no_tick_twice(tmp_path: Path) -> None:
    clock = HandClock(START_MS)
    with running(tmp_path, clock) as before:
        own_turns(before)
        cluster_id = before.broker.cluster_id
        before.broker.create_topic("t", wire.CreateTopic(partitions=2))
        before.broker.schedules.put("beat", SPEC)
        (now,) = before.broker.schedules.known() or [each.state for each in before.broker.schedules.list_all()]
        for _ in range(3):
            clock.advance(1_000)
            schedule_turn(before)
        assert ticks(before, now.partition) == 3
    older = msgspec.structs.replace(now, partition=1 - now.partition)
    SCHEDULES.write(tmp_path, START_MS, [encode(older)])
    (tmp_path / "identity.json").write_text(f'{{"cluster_id": "{cluster_id}", "broker_id": 1, "store_uuid": "store"}}')
    shutil.rmtree(tmp_path / "control")
    plane = Standalone(tmp_path / "control")
    plane.start()
    restored(Catalog(plane), tmp_path)
    plane.close()
    with running(tmp_path, clock) as after:
        own_turns(after)
        schedule_turn(after)
        assert (ticks(after, now.partition), ticks(after, older.partition)) == (3, 0)
        clock.advance(1_000)
        schedule_turn(after)
        assert (ticks(after, now.partition), ticks(after, older.partition)) == (3, 1)


def ticks(fixture: Fixture, number: int) -> int:
    """The number of messages of a partition, which only ticks are in."""
    partition = fixture.broker.topics.get("t").local[number]
    eventually(lambda: partition.high_watermark == partition.replica.next_offset)
    pieces = partition.reader.pieces(partition.start.offset, partition.high_watermark, 10_000)
    return sum(len(list(piece.records())) for piece in pieces)
