"""A start opens no files of replicas that were closed and are as they were, and opens all others."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import apsw
import msgspec
import pytest
from support.domain import Fixture, HandClock, records, running

from portalmq import wire
from portalmq.broker import broker as started_broker
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.folding import Recovered, recover
from portalmq.broker.partition.rest import recovered_from
from portalmq.broker.storage import closed_replicas
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.closed_replicas import CLOSED_NAME, ClosedReplica, ClosedReplicas
from portalmq.broker.storage.errors import StorageFault
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.segment import SegmentFacts
from portalmq.broker.storage.state import StateFile
from portalmq.errors import Unavailable


def send(fixture: Fixture, topic: str, *values: str) -> None:
    fixture.broker.produce(topic, ProduceRequest(records(*values)))


def values_of(fixture: Fixture, topic: str) -> list[bytes]:
    return [stored.record.value for stored in fixture.broker.browser.read_all(topic, None)]


def folder_of(data_dir: Path, topic: str) -> Path:
    (folder,) = data_dir.glob(f"partitions/{topic}@*/0")
    return folder


def segment_of(data_dir: Path, topic: str) -> Path:
    (file,) = folder_of(data_dir, topic).glob("0*.sqlite")
    return file


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The topics whose logs were opened at a start."""
    found: list[str] = []
    open_log = Log.open.__func__

    def noting(cls, directory, **more):
        found.append(directory.parent.name.partition("@")[0])
        return open_log(cls, directory, **more)

    monkeypatch.setattr(Log, "open", classmethod(noting))
    return found


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The data of a broker that was stopped: topic t has two messages, u one, empty none."""
    with running(tmp_path) as before:
        send(before, "t", "a", "b")
        send(before, "u", "c")
        before.broker.create_topic("empty", wire.CreateTopic())
    return tmp_path


def test_a_start_opens_files_only_at_their_first_use(data_dir, opened):
    with running(data_dir) as after:
        topics = {topic.name: topic.local[0] for topic in after.broker.topics}
        assert opened == []
        assert [topics[name].log.is_open for name in ("t", "u", "empty")] == [False, False, False]
        assert all(partition.serves for partition in topics.values())
        send(after, "t", "d")
        assert values_of(after, "t") == [b"a", b"b", b"d"]
        assert [topics[name].log.is_open for name in ("t", "u", "empty")] == [True, False, False]
        assert not after.faults
    opened.clear()
    with running(data_dir) as again:
        assert values_of(again, "t") == [b"a", b"b", b"d"]
        assert opened == []


def test_which_lanes_a_closed_replica_has_is_known_without_its_files(data_dir, opened):
    with running(data_dir) as before:
        later = Record(b"x", deliver_at_ms=before.clock.wall_ms() + 60_000)
        before.broker.produce("later", ProduceRequest([later, Record(b"x", priority=3)]))
    opened.clear()
    with running(data_dir) as after:
        logs = {topic.name: topic.local[0].log for topic in after.broker.topics}
        lanes = {name: logs[name].lanes.present for name in ("later", "t", "empty")}
        assert lanes == {"later": {3, DELAYED}, "t": set(), "empty": set()}
        assert opened == []
        assert not any(each.is_open for each in logs.values())
        assert len([*logs["later"].lanes.after(DELAYED, 0, 0, 9)]) == 1


def test_a_note_of_an_earlier_release_does_not_tell_the_lanes(data_dir):
    with running(data_dir) as fixture:
        facts = fixture.broker.topics.known("u").local[0].log.facts
    earlier = msgspec.msgpack.encode(msgspec.to_builtins(facts)[:-1])
    assert msgspec.msgpack.decode(earlier, type=SegmentFacts) == msgspec.structs.replace(facts, lanes=None)


def _written_by_another_program(data_dir: Path) -> None:
    connection = sqlite3.connect(segment_of(data_dir, "t"))
    connection.execute("CREATE TABLE notes (text)")
    connection.commit()
    connection.close()


def _copied(data_dir: Path) -> None:
    file = segment_of(data_dir, "t")
    shutil.copy2(file, data_dir / "copy")
    os.replace(data_dir / "copy", file)


def _with_a_write_ahead_log(data_dir: Path) -> None:
    Path(f"{segment_of(data_dir, 't')}-wal").touch()


def _without_state(data_dir: Path) -> None:
    (folder_of(data_dir, "t") / "state.sqlite").unlink()


def _with_another_description(data_dir: Path) -> None:
    (folder_of(data_dir, "t").parent / "topic.json").write_text("{}")


@pytest.mark.parametrize(
    "change",
    [_written_by_another_program, _copied, _with_a_write_ahead_log, _without_state, _with_another_description],
)
def test_a_replica_with_any_change_of_its_files_is_opened(data_dir, opened, change):
    change(data_dir)
    with running(data_dir) as after:
        assert opened == ["t"]
        assert values_of(after, "t") == [b"a", b"b"]


def test_after_another_boot_all_are_opened(data_dir, opened, monkeypatch):
    """A disk may have forgotten what it synced, and only the files tell."""
    monkeypatch.setattr(closed_replicas, "boot_id", lambda: "another")
    with running(data_dir) as after:
        assert sorted(opened) == ["empty", "t", "u"]
        assert values_of(after, "t") == [b"a", b"b"]


def test_a_system_that_does_not_tell_its_boots_has_no_notes(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(closed_replicas, "boot_id", lambda: "")
    with running(tmp_path) as before:
        send(before, "t", "a")
    opened.clear()
    assert not (tmp_path / CLOSED_NAME).exists()
    with running(tmp_path) as after:
        assert values_of(after, "t") == [b"a"]
    assert opened == ["t"]


def _overwritten(path: Path) -> None:
    path.write_bytes(b"nothing" * 1_000)


def _with_other_notes(path: Path) -> None:
    with apsw.Connection(str(path)) as connection:
        connection.execute("UPDATE replicas SET note = zeroblob(length(note))")


@pytest.mark.parametrize("damage", [_overwritten, _with_other_notes, Path.unlink])
def test_damaged_notes_count_as_none(data_dir, opened, damage):
    damage(data_dir / CLOSED_NAME)
    with running(data_dir) as after:
        assert sorted(opened) == ["empty", "t", "u"]
        assert values_of(after, "t") == [b"a", b"b"]
    opened.clear()
    with running(data_dir):
        assert opened == []


def _note_another_end(data_dir: Path, topic: str) -> None:
    """Let the note of a topic have one message more than its file."""
    with apsw.Connection(str(data_dir / CLOSED_NAME)) as connection:
        for topic_id, content in connection.execute("SELECT topic_id, note FROM replicas").fetchall():
            note = closed_replicas._decode(content)
            if note.replica.identity.topic == topic:
                segment = msgspec.structs.replace(note.replica.segment, end_offset=9, messages_end=9)
                replica = msgspec.structs.replace(note.replica, segment=segment)
                content = closed_replicas._encode(msgspec.structs.replace(note, replica=replica))
                row = (content, closed_replicas.zlib.crc32(content), topic_id)
                connection.execute("UPDATE replicas SET note = ?, crc = ? WHERE topic_id = ?", row)


def test_a_file_that_contradicts_its_note_is_not_used_and_the_next_start_goes_by_the_file(
    data_dir, opened, monkeypatch
):
    monkeypatch.setattr(started_broker, "OPEN_WITHIN_S", 0.5)  # a process would end at the fault, this fixture goes on
    _note_another_end(data_dir, "t")
    with running(data_dir) as wrong:
        with pytest.raises(Unavailable):
            send(wrong, "t", "d")
        assert any(isinstance(fault, StorageFault) for fault in wrong.faults), wrong.faults
    assert opened == []
    with running(data_dir) as after:
        assert opened == ["t"]
        assert values_of(after, "t") == [b"a", b"b"]


def test_a_replica_is_noted_while_the_broker_runs_and_not_once_it_has_changed(tmp_path, monkeypatch):
    """So a killed broker starts as quickly, and opens what it was using."""
    monkeypatch.setattr(closed_replicas, "UNCHANGED_FOR_NS", 0)
    with running(tmp_path) as broker:
        send(broker, "t", "a")
        send(broker, "u", "b")
        ids = {topic.name: topic.state.topic_id for topic in broker.broker.topics}
        assert ClosedReplicas(tmp_path).load() == {}
        broker.broker.maintenance.save_state()
        for _ in range(2):  # the first call finds them used
            broker.broker.maintenance.close_idle_files()
        assert ClosedReplicas(tmp_path).load().keys() == {(ids["t"], 0), (ids["u"], 0)}
        send(broker, "t", "c")
        assert ClosedReplicas(tmp_path).load().keys() == {(ids["u"], 0)}
        broker.broker.delete_topic("u")
        with apsw.Connection(str(tmp_path / CLOSED_NAME)) as connection:
            assert connection.execute("SELECT topic_id FROM replicas").fetchall() == [(ids["t"],)]


def test_files_that_changed_just_now_are_not_noted(tmp_path):
    """A later change in the same step of the file system's clock would not show."""
    with running(tmp_path) as broker:
        send(broker, "t", "a")
        broker.broker.maintenance.save_state()
        for partition in broker.broker.topics.partitions():
            partition.log.park()
            partition.state_file.park()
        broker.broker.topics.note_closed()
        assert ClosedReplicas(tmp_path).load() == {}


def _as_plain(found: Recovered) -> object:
    """Return what a fold holds, in a form that compares."""
    groups = found.groups
    return (
        [delivery.snapshot() for delivery in groups.delivery.values()],
        [stream.snapshot() for stream in groups.streams.values()],
        (groups.outbox, groups.cancelled, groups.compacted, groups.purged_upto, groups.state_offset),
        found.producers.snapshot(),
        (found.epochs, found.high_watermark, found.highest_epoch, found.start, found.readable_end),
        (found.recovered_end, found.lost, found.is_saved),
    )


def test_a_note_tells_what_opening_the_files_tells(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        send(before, "t", "a", "b", "c")
        broker = before.broker
        broker.put_group("readers", {"visibility_timeout_ms": 60_000})
        taken = broker.receive_handler.receive("readers", wire.ReceiveRequest(["t"], max_messages=2), None)
        assert len(taken) == 2
        producer = broker.new_producer(None)
        stamp = wire.ProducerStamp(producer.id, producer.epoch, 0)
        broker.produce_range("t", ProduceRequest(records("d"), producer=stamp, partition=0))
        (topic,) = broker.topics
        identity = topic.local[0].log.identity
    noted: ClosedReplica = ClosedReplicas(tmp_path).load()[identity.key]
    directory = folder_of(tmp_path, "t")
    log, state_file = Log.open(directory, identity=identity), StateFile(directory, identity=identity)
    try:
        assert _as_plain(recovered_from(noted, -1)) == _as_plain(recover(log, state_file))
        assert noted.saved == state_file.saved
    finally:
        log.close()
        state_file.close()
